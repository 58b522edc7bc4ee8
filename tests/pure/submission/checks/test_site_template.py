"""A site's own template: blocks of ours, and what is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled

from cluster_ddp.errors import SpecError
from cluster_ddp.submission.render import agent_options, render
from cluster_ddp.submission.spec import JobSpec

EXAMPLE = Path(__file__).parents[4] / "examples" / "templates" / "with_prologue.sbatch.j2"
EXTENDS = '{% extends "job.sbatch.j2" %}\n'


def rendered(path: Path) -> str:
    spec = JobSpec(name="fit", command=("true",), nodes=2, gpus_per_node=2, template=str(path))
    return render(spec, agent_options(spec), source="")


def of_text(folder: Path, text: str) -> str:
    path = folder / "our site.j2"
    path.write_text(text)
    return rendered(path)


def plain() -> str:
    spec = JobSpec(name="fit", command=("true",), nodes=2, gpus_per_node=2)
    return render(spec, agent_options(spec), source="")


def test_a_template_adds_to_ours(tmp_path: Path) -> None:
    text = rendered(EXAMPLE)
    assert "#SBATCH --open-mode=append\n\n#SBATCH --comment=fit:4-ranks\n" in text
    ours = plain().splitlines()
    lines = [line for line in text.splitlines() if line and line not in ours]
    first = ["#SBATCH", "#", "SITE_SCRATCH=$(mktemp", "export", "srun", "exec", "--cleanup='srun", "--"]
    assert [line.split()[0] for line in lines] == first
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert of_text(tmp_path, EXTENDS) == plain()


BLOCKS = """
{% block environment %}
IN_ENVIRONMENT=1
{% endblock %}
{% block before %}
export MINE="it's $IN_ENVIRONMENT"
{% endblock %}
{% block after %}
echo "$MINE, status $status"
{% endblock %}
"""


def test_what_stands_before_the_ranks_reaches_them_and_what_stands_after_runs_after_them(tmp_path: Path) -> None:
    (tmp_path / "cluster-ddp").write_text('#!/bin/bash\necho "$MINE"; printf "%s|" "$@"; echo; echo "$$"\n')
    (tmp_path / "cluster-ddp").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", "-c", of_text(tmp_path, EXTENDS + BLOCKS)], stdout=subprocess.PIPE, env=env)
    mine, words, pid = process.communicate(timeout=scaled(LIMIT_S))[0].decode().splitlines()
    assert (mine, int(pid)) == ("it's 1", process.pid), "the ranks are started by the script's own process"
    launch, cleanup, *command = words.split("|")
    assert (launch, command) == ("launch", ["--", "true", ""])
    lines = cleanup.removeprefix("--cleanup=")
    done = subprocess.run(["bash", "-c", lines], env={"MINE": "x", "status": "3"}, stdout=subprocess.PIPE)
    assert done.stdout == b"x, status 3\n"


def test_a_trap_in_it_runs_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "cluster-ddp").write_text("#!/bin/bash\nexit 7\n")
    (tmp_path / "cluster-ddp").chmod(0o755)
    text = of_text(tmp_path, EXTENDS + "{% block before %}trap 'echo bye' EXIT{% endblock %}")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], env=env, stdout=subprocess.PIPE, timeout=scaled(LIMIT_S))
    assert (done.returncode, done.stdout) == (7, b"bye\n")


@pytest.mark.parametrize(
    ("text", "found", "hint"),
    [
        (
            "{% extends 'job.sbatch' %}",
            "there is no template job.sbatch.",
            'to extend our template: {% extends "job.sbatch.j2" %}; ',
        ),
        (EXTENDS + "{% block before %}{% if %}{% endblock %}", "line 2: ", "look at it: "),
        (
            EXTENDS + "{% block before %}{{ comand }}{% endblock %}",
            "there is no variable comand. Did you mean command?",
            "the variables are agent, command, ",
        ),
        (
            EXTENDS + "{% block before %}{{ spec.node }}{% endblock %}",
            "'node'. Did you mean nodes?",
            "a job's fields are command, ",
        ),
        (
            EXTENDS + "{% block directives %}{{ super() }}\n#SBATCH --ntasks-per-node=8\n#SBATCH -N 4\n{% endblock %}",
            "have --nodes=4; --ntasks-per-node=8, but the ranks of this job need --nodes=2 --ntasks-per-node=2.",
            "let the block directives begin with {{ super() }}",
        ),
        (
            EXTENDS + "{% block directives %}#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n{% endblock %}",
            "its directives have no --gres, but the ranks of this job need --gres=gpu:2.",
            "let the block directives begin",
        ),
        (
            EXTENDS + "{% block directives %}{{ super() }}\n#SBATCH --gpus 4\n{% endblock %}",
            "its directives have --gpus=4, but the ranks of this job need none of these.",
            "and leave these out",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, text: str, found: str, hint: str) -> None:
    with pytest.raises(SpecError) as error:
        of_text(tmp_path, text)
    assert error.value.asked == f"Rendering the template {tmp_path}/our site.j2:"
    assert found in error.value.found
    assert hint in error.value.hint


def test_a_template_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"there is no template nowhere\.j2\."):
        rendered(tmp_path / "nowhere.j2")
