"""Rendered scripts: what is in them, and that nothing from outside becomes code when bash runs them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slowness import LIMIT_S, scaled, wait_until
from stand_ins import HOSTILE, FakeSlurm, fake_slurm
from strangers import STRANGER, needs_a_stranger

from cluster_ddp.agent import launch_options
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.submission import render as rendering
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.render import agent_options
from cluster_ddp.submission.spec import JobSpec

__all__ = ["fake_slurm"]

ROOT = Path(__file__).parents[3]

# In the place of the agent: it shows how it was started, and which signals come, until it is told to end.
AGENT = """\
import json, os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
shown = {"argv": sys.argv[1:], "pid": os.getpid(), "env": dict(os.environ), "python": sys.executable}
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM):
    signal.signal(number, lambda number, frame: (here / f"came-{signal.Signals(number).name}").touch())
(here / "shown.part").write_text(json.dumps(shown))
(here / "shown.part").rename(here / "shown")
while (here / "wait").exists():
    time.sleep(0.01)
sys.exit(7)
"""


def render(spec: JobSpec, *, source: str = "", **more: Any) -> str:
    return rendering.render(spec, agent_options(spec), source=source, **more)


def frozen(spec: JobSpec, folder: Path) -> str:
    """A script as `submit` makes it, with a stand-in for the agent."""
    agent = folder / "it's the agent.pyz"
    agent.write_text(AGENT)
    return render(spec, agent=shlex.quote(str(agent)))


def start(text: str, folder: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """Start a script as slurmd would. Its process is the first of a group of its own."""
    script = folder / "job.sbatch"
    script.write_text(text)
    return subprocess.Popen(
        ["bash", str(script), *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "71", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def run(text: str, folder: Path, *arguments: str, **env: str) -> tuple[int, str, str]:
    """Run a script. Returns its status, and what it has printed."""
    process = start(text, folder, *arguments, **env)
    out, err = process.communicate(timeout=scaled(LIMIT_S))
    return process.returncode, out, err


def shown(folder: Path) -> dict[str, Any]:
    """How the agent was started."""
    return json.loads((folder / "shown").read_text())


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


@pytest.mark.parametrize("launcher", ["srun", "fork"])
def test_tasks_match_where_each_drives_several_gpus(launcher: Any) -> None:
    """The job is the one that srun's launcher asks for, whichever launcher it has."""
    spec = JobSpec(
        name="x",
        command=("python", "x.py"),
        nodes=2,
        gpus_per_node=8,
        gpu_type="a100",
        gpus_per_task=2,
        cpus_per_task=3,
        launcher=launcher,
    )
    text = render(spec)
    assert {"--nodes=2", "--ntasks-per-node=4", "--gres=gpu:a100:8", "--cpus-per-task=3"} <= set(directives(text))
    assert "\n  --gpus-per-task=2 \\\n" in text
    assert (f"\n  --launcher={launcher} \\\n" in text) == (launcher != "srun")


def test_only_what_was_asked_for_is_asked_for() -> None:
    text = render(JobSpec(name="x", command=("true",)))
    assert directives(text) == [
        *("--job-name=x", "--nodes=1", "--ntasks-per-node=1", "--gres=gpu:1"),
        *('--output="%x-%j.out"', "--open-mode=append"),
    ]
    assert text.splitlines()[-1] == 'exec cluster-ddp launch -- true "$@"'


def test_everything_that_can_be_asked_for() -> None:
    spec = JobSpec(
        name="x",
        command=("true",),
        cpus_per_task=8,
        mem="32G",
        time="1-12",
        partition="gpu",
        account="me",
        qos="high",
        constraint="ib",
        array="0-3%2",
        signal="USR1@120",
        requeue=True,
        after="12",
        sbatch_options=("--reservation=course",),
    )
    expected = [
        *("--cpus-per-task=8", "--mem=32G", "--time=1-12:00:00", "--partition=gpu", "--account=me", "--qos=high"),
        *("--constraint=ib", "--array=0-3%2", "--signal=USR1@120", "--requeue", '--output="%x-%A_%a.out"'),
        *("--dependency=afterok:12", "--kill-on-invalid-dep=yes", "--reservation=course"),
    ]
    assert set(expected) <= set(directives(render(spec)))
    other = directives(render(JobSpec(name="x", command=("true",), requeue=False, after="afterany:12:13")))
    assert {"--no-requeue", "--dependency=afterany:12:13"} <= set(other)


def test_a_spare_node_is_asked_for_with_its_price() -> None:
    text = render(JobSpec(name="x", command=("true",), nodes=2, gpus_per_node=4, restarts=3, spare_nodes=1))
    price = "# 1 spare node of 3: its 4 GPUs wait idle, until another node is lost or at fault.\n"
    assert f"{price}#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=4\n" in text
    assert "\n  --restarts=3 \\\n  --spare-nodes=1 \\\n" in text


@pytest.mark.parametrize(
    ("cpus", "of_node"), [(None, "--mincpus=4"), (3, "--cpus-per-task=12")], ids=["a CPU each", "three CPUs each"]
)
def test_a_range_of_nodes_names_no_number_of_tasks(cpus: int | None, of_node: str) -> None:
    """Slurm 22.05 takes that of the fewest nodes, and gives no more nodes than tasks."""
    spec = JobSpec(name="x", command=("true",), nodes=2, max_nodes=8, gpus_per_node=4, cpus_per_task=cpus)
    text = render(spec, agent="agent.pyz")
    found = [one for one in directives(text) if one.startswith(("--n", "--gres", "--cpus", "--mincpus"))]
    assert found == ["--nodes=2-8", of_node, "--gres=gpu:4"]
    assert "\n  --ranks-per-node=4 \\\n  --nodes=2-8 \\\n" in text
    assert replace(spec, max_nodes=2) == replace(spec, max_nodes=None)


# As a user of a large site would have it: with everything that is not a list.
LARGE = JobSpec(
    name="x",
    command=("python", "train.py"),
    nodes=8,
    gpus_per_node=4,
    cpus_per_task=8,
    mem="32G",
    time="1-12",
    partition="gpu",
    account="me",
    signal="USR1@120",
    requeue=True,
    modules=("cuda/12.8",),
    venv="/a/venv",
    launcher="fork",
    max_requeues=3,
)


@pytest.mark.usefixtures("fake_slurm")
@pytest.mark.parametrize("spec", [LARGE, JobSpec(name="x", command=("true",))])
def test_a_person_can_read_it(spec: JobSpec) -> None:
    planned = Plan(spec=spec)
    assert len(planned.script.splitlines()) <= 45
    assert len(str(planned).splitlines()) <= 60  # --dry-run
    local = Plan(spec=replace(spec, nodes=1), local=True)
    assert len(str(local).splitlines()) <= 45


def test_the_committed_jobs_are_short_and_as_the_templates_would_have_them() -> None:
    command = [sys.executable, "scripts/render_jobs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\nIf the change is meant: make jobs"
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "jobs").glob("*.sbatch")}
    assert len(lengths) >= 5
    assert max(lengths.values()) <= 45, lengths


def test_the_agent_gets_what_was_asked_for(tmp_path: Path) -> None:
    """Through bash, word for word; what sbatch is given after the script follows the command."""
    same: dict[str, Any] = {
        **{"launcher": "fork", "gpus_per_task": 2, "share": True, "max_requeues": 3, "restarts": 4},
        **{"spare_nodes": 5, "hang_restart_s": 30, "restart_args": '--from "it\'s $(touch pwned)"'},
        **{"track": ("wandb", "mlflow")},
        "container": "/images/it's $(touch pwned).sif",
        "srun_options": ("--cpu-bind=none", "--mpi=pmix"),
    }
    spec = JobSpec(
        name="x",
        command=("python", *HOSTILE, "{lr}"),
        nodes=2,
        gpus_per_node=4,
        grid={"lr": ("0.1", "$(touch pwned) it's", "-1")},
        array="0-2",
        container_binds=("/data sets:/data", "/more"),
        container_overlays=("/o.sqsh",),
        **same,
    )
    status, _, err = run(frozen(spec, tmp_path), tmp_path, "more $(touch pwned)", "'")
    assert status == 7, err
    verb, *words = shown(tmp_path)["argv"]
    assert verb == "job"
    assert launch_options.parse(words) == AgentOptions(
        command=(*spec.command, "more $(touch pwned)", "'"),
        container_binds=("/data sets:/data", "/more"),
        container_overlays=("/o.sqsh",),
        grid={"lr": ["0.1", "$(touch pwned) it's", "-1"]},
        **same,
    )
    assert not (tmp_path / "pwned").exists()


def test_where_the_installed_package_starts_the_ranks_it_gets_the_same(tmp_path: Path) -> None:
    """As in jobs/*.sbatch."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cluster-ddp").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (tmp_path / "bin" / "cluster-ddp").chmod(0o755)
    spec = JobSpec(name="x", command=("a", *HOSTILE), launcher="fork")
    _, out, err = run(render(spec), tmp_path, "more", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert out.split("\0")[:-1] == ["launch", "--launcher=fork", "--", "a", *HOSTILE, "more"], err
    assert not (tmp_path / "pwned").exists()


def test_a_function_gets_no_arguments_of_sbatchs_and_no_values_in_its_path(tmp_path: Path) -> None:
    spec = JobSpec(name="x", grid={"seed": ("1", "2")}, array="0-1")
    (tmp_path / "agent.pyz").write_text(AGENT)
    asked = agent_options(spec, command=("runner", "/runs/{seed}/x-%j"), function=True)
    text = rendering.render(spec, asked, source="", agent=shlex.quote(f"{tmp_path}/agent.pyz"))
    run(text, tmp_path, "more")
    assert shown(tmp_path)["argv"] == ["job", "--function", "--", "runner", "/runs/{seed}/x-%j"]


@pytest.mark.parametrize(("array", "of_task"), [(None, ""), ("0-3", "/%a")])
def test_a_submitted_job_starts_the_agent_of_its_own_run_directory(
    tmp_path: Path, fake_slurm: FakeSlurm, array: str | None, of_task: str
) -> None:
    """Of an array: that of all its tasks."""
    runs = tmp_path / "it's $(touch pwned) runs"
    planned = Plan(spec=JobSpec(name="fit", command=("true",), array=array), runs_dir=runs, code="code/a b")
    planned.folder.mkdir(parents=True)
    (planned.folder / "agent.pyz").write_text(AGENT)
    run(planned.script, tmp_path)
    verb, *words = shown(planned.folder)["argv"]
    asked = launch_options.parse(words)
    assert (verb, asked.run_dir, asked.code) == ("job", f"{planned.folder}{of_task}", f"{planned.folder}/code/a b")


@pytest.mark.parametrize("setup", [(), ("ulimit -c 0",)])
def test_the_agents_python_is_isolated_and_is_the_process_of_the_script(tmp_path: Path, setup: tuple[str, ...]) -> None:
    """Slurm may signal that alone, and bash would die of the signal."""
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the working folder')")
    spec = JobSpec(name="x", command=("true",), setup=setup)
    process = start(frozen(spec, tmp_path), tmp_path, PYTHONPATH=str(tmp_path))
    assert process.wait(timeout=scaled(LIMIT_S)) == 7, process.communicate()
    assert (shown(tmp_path)["pid"], shown(tmp_path)["python"]) == (process.pid, sys.executable)
    assert shown(tmp_path)["env"]["PYTHONPATH"] == str(tmp_path), "the ranks get it"


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node lacks the Python that has submitted the job."""
    monkeypatch.setattr(sys, "executable", "/no such/it's $(touch pwned)/python")


@pytest.mark.usefixtures("no_python")
def test_without_the_submitters_python_the_nodes_own_serves(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text('#!/bin/bash\nprintf "own: %s\\n" "$*"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    _, out, err = run(
        frozen(JobSpec(name="x", command=("true",)), tmp_path), tmp_path, PATH=f"{tmp_path}/bin:/usr/bin:/bin"
    )
    assert out == f"own: -I -S {tmp_path}/it's the agent.pyz job -- true\n", err
    assert not (tmp_path / "pwned").exists()


@pytest.mark.usefixtures("no_python")
def test_without_any_python_the_job_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("bash", "hostname"):
        (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
    text = frozen(JobSpec(name="x", command=("true",)), tmp_path)
    status, _, err = run(text, tmp_path, PATH=str(tmp_path / "bin"))
    node = os.uname().nodename
    said = (
        f"error: There is neither /no such/it's $(touch pwned)/python nor python3 on {node}. Hint: --modules python\n"
    )
    assert (status, err) == (127, said)


@pytest.mark.parametrize("is_link", [False, True])
def test_an_agent_that_is_gone_is_named(tmp_path: Path, is_link: bool) -> None:
    """Or is a link, to a file of the user's that somebody else has chosen."""
    text = frozen(JobSpec(name="x", command=("true",)), tmp_path)
    agent = (tmp_path / "it's the agent.pyz").rename(tmp_path / "other")
    if is_link:
        (tmp_path / "it's the agent.pyz").symlink_to(agent)
    said = f"error: {tmp_path}/it's the agent.pyz is not a file of yours. Hint: cluster-ddp submit\n"
    assert run(text, tmp_path) == (2, "", said)


@needs_a_stranger
def test_an_agent_of_somebody_else_is_not_run(tmp_path: Path) -> None:
    text = frozen(JobSpec(name="x", command=("true",)), tmp_path)
    os.chown(tmp_path / "it's the agent.pyz", STRANGER, STRANGER)
    status, _, err = run(text, tmp_path)
    assert (status, "is not a file of yours" in err) == (2, True)
    assert not (tmp_path / "shown").exists()


TRAP = "trap 'echo \"ended with $?\"' EXIT"


@pytest.mark.parametrize("line", [TRAP, "source 'job env.sh'"])
def test_a_trap_of_the_setup_runs_at_the_end(tmp_path: Path, line: str) -> None:
    (tmp_path / "job env.sh").write_text(TRAP)
    status, out, err = run(frozen(JobSpec(name="x", command=("true",), setup=(line,)), tmp_path), tmp_path)
    assert (status, out) == (7, "ended with 7\n"), err


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM"])
def test_bash_that_waits_passes_on_what_it_gets(tmp_path: Path, name: str) -> None:
    """Twice, too. The status is still that of the agent."""
    (tmp_path / "wait").touch()
    process = start(frozen(JobSpec(name="x", command=("true",), setup=(TRAP,)), tmp_path), tmp_path)
    wait_until((tmp_path / "shown").exists)
    for _ in range(2):
        process.send_signal(signal.Signals[name])
        wait_until((tmp_path / f"came-{name}").exists)
        (tmp_path / f"came-{name}").unlink()
    assert process.poll() is None
    (tmp_path / "wait").unlink()
    assert process.communicate(timeout=scaled(LIMIT_S)) == ("ended with 7\n", "")
    assert process.returncode == 7


def test_term_is_final_with_a_trap_too(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    process = start(frozen(JobSpec(name="x", command=("true",), setup=(TRAP,)), tmp_path), tmp_path)
    wait_until((tmp_path / "shown").exists)
    process.terminate()
    assert process.communicate(timeout=scaled(LIMIT_S))[0] == "ended with 143\n"
    assert process.returncode == 143


def test_a_hostile_environment_path_is_inert(tmp_path: Path) -> None:
    venv = tmp_path / "it's $(touch pwned) a venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text(f"export ACTIVATED=yes VIRTUAL_ENV={shlex.quote(str(venv))}\n")
    run(frozen(JobSpec(name="x", command=("true",), venv=str(venv)), tmp_path), tmp_path)
    assert shown(tmp_path)["env"]["ACTIVATED"] == "yes"
    assert not (tmp_path / "pwned").exists()


def test_a_missing_environment_ends_the_job(tmp_path: Path) -> None:
    status, _, err = run(frozen(JobSpec(name="x", command=("true",), venv="/no/such/venv"), tmp_path), tmp_path)
    assert status == 1
    assert "/no/such/venv/bin/activate" in err and "error: /no/such/venv is not active on" in err
    assert not (tmp_path / "shown").exists()


ACTIVATE = """
CONDA_DEFAULT_ENV=$2 CONDA_PREFIX=/envs/$2
hook() { false; harmless=yes; return 3; }
hook
export CONDA_DEFAULT_ENV CONDA_PREFIX harmless
"""


def conda_in(folder: Path, activate: str) -> str:
    """A line that defines a conda whose files run these lines in the job's shell."""
    (folder / "etc" / "profile.d").mkdir(parents=True)
    (folder / "etc" / "profile.d" / "conda.sh").write_text(f"conda() {{ {activate}\n}}\n")
    return f'conda() {{ echo "{folder}"; }}'


@pytest.mark.fault(
    "a command fails in files of modules, conda or the site",
    "the log names it, and the job continues; an environment that is not active after that ends the job with its name",
    bound="at once",
    also=("test_an_environment_that_is_not_active_ends_the_job_with_its_name",),
)
def test_a_harmless_failure_in_files_of_others_is_named_and_ends_nothing(tmp_path: Path) -> None:
    """In a script of conda's activate.d it ended the job with status 1 and an empty log."""
    (tmp_path / "site.sh").write_text(f"{conda_in(tmp_path / 'conda', ACTIVATE)}\n")
    setup = ('ls "/no such folder"', "export AFTER=yes")
    script = frozen(JobSpec(name="x", command=("true",), conda_env="torch", setup=setup), tmp_path)
    status, _, err = run(f"source '{tmp_path}/site.sh'\n{script}", tmp_path)
    assert status == 7, err
    assert {"CONDA_DEFAULT_ENV": "torch", "harmless": "yes", "AFTER": "yes"}.items() <= shown(tmp_path)["env"].items()
    assert 'status 2 of: ls "/no such folder"' in err


def test_a_site_that_exits_leaves_no_empty_log(tmp_path: Path) -> None:
    status, _, err = run(frozen(JobSpec(name="x", command=("true",), setup=("exit 3",)), tmp_path), tmp_path)
    assert status == 3 and "status 3 of: exit 3" in err


def test_an_environment_that_is_not_active_ends_the_job_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "site.sh").write_text(f"{conda_in(tmp_path / 'conda', 'true')}\n")
    script = frozen(JobSpec(name="x", command=("true",), conda_env="my env"), tmp_path)
    status, _, err = run(f"source '{tmp_path}/site.sh'\n{script}", tmp_path)
    assert status == 1 and "error: my env is not active on" in err
    assert not (tmp_path / "shown").exists()


def test_modules_conda_and_setup_lines_come_first() -> None:
    spec = JobSpec(name="x", command=("true",), modules=("cuda/12.8",), conda_env="my env", setup=("ulimit -n 4096",))
    lines = render(spec).splitlines()
    last = 'exec cluster-ddp launch -- true "$@"'
    module = 'module load cuda/12.8 || not_active "module cuda/12.8"'
    order = [lines.index(x) for x in (module, "conda activate 'my env'", "ulimit -n 4096", last)]
    assert order == sorted(order)


def test_the_same_job_runs_on_this_machine(tmp_path: Path) -> None:
    """With the container and the launcher of the specification; `backends/test_local.py` runs them."""
    same: dict[str, Any] = {"container": "/i.sif", "launcher": "fork", "gpus_per_task": 2, "cpus_per_task": 3}
    same |= {"max_requeues": 3, "share": True}
    spec = JobSpec(name="x", command=("a", *HOSTILE), gpus_per_node=4, time="2", **same)
    run_dir = tmp_path / "it's $(touch pwned) a run"
    run_dir.mkdir()
    (run_dir / "agent.pyz").write_text(AGENT)
    text = rendering.render_local(spec, agent_options(spec), source="", code="code/a b")
    status, _, err = run(text, tmp_path, str(run_dir))
    assert status == 7, err
    verb, *words = shown(run_dir)["argv"]
    assert verb == "job"
    assert launch_options.parse(words) == AgentOptions(
        command=spec.command, ranks=2, run_dir=str(run_dir), code=f"{run_dir}/code/a b", time_limit_s=120, **same
    )
    assert not (tmp_path / "pwned").exists()


@pytest.mark.fault(
    "USR1 or USR2 comes before the job's ranks are there",
    "the batch script continues; that warning is lost, and nothing was trained before it",
    bound="at once",
)
@pytest.mark.parametrize("setup", [True, False])
def test_a_warning_from_before_the_ranks_does_not_end_the_script(tmp_path: Path, setup: bool) -> None:
    """bash would die of it, with an empty log."""
    begun = tmp_path / "it's begun"
    warned = tmp_path / "it's warned"
    lines = (f"touch {shlex.quote(str(begun))}", f"until [[ -e {shlex.quote(str(warned))} ]]; do sleep 0.05; done")
    spec = JobSpec(name="x", command=("true",), setup=lines if setup else ())
    text = frozen(spec, tmp_path)
    if not setup:
        text = text.replace("agent=", "\n".join((*lines, "agent=")), 1)
    process = start(text, tmp_path)
    wait_until(begun.exists)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
    warned.touch()
    assert process.wait(timeout=scaled(LIMIT_S)) == 7, process.communicate()
