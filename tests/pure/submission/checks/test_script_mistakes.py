"""Scripts that can't run are refused before they wait in the queue; variables without a value are a warning."""

from __future__ import annotations

import os
import py_compile
import re
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

from cluster_ddp.errors import SpecError
from cluster_ddp.submission.checks import script_mistakes
from cluster_ddp.submission.spec import JobSpec

PYTHON = Path(sys.executable).name


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "a folder"
    (path / "pack").mkdir(parents=True)
    monkeypatch.chdir(path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name, text in {
        "good.py": "import nowhere\nopen('ran', 'w')\n",
        "bad.py": "import os\ndef f(:\n",
        "nul.py": "\0",
        "pack/bad.py": "f(\n",
        "pack/__main__.py": "if True:\npass\n",
        "good.sh": "touch ran\nnowhere\n",
        "bad.sh": "echo\nif true; then\n",
    }.items():
        (path / name).write_text(text)
    return path


def check(*command: str, folder: Path | None = None, on_slurm: bool = True, **more: object) -> list[tuple[str, str]]:
    spec = JobSpec(name="x", command=command, **more)  # type: ignore[arg-type]
    return [tuple(one) for one in script_mistakes.check(spec, folder or Path.cwd(), on_slurm=on_slurm)]


@pytest.mark.parametrize("command", [(PYTHON, "app.pyz"), (PYTHON, "good.pyc"), ("bash", "extglob.sh")])
def test_what_runs_is_not_refused(folder: Path, command: tuple[str, ...]) -> None:
    (folder / "main").mkdir()
    (folder / "main" / "__main__.py").write_text("print('runs')\n")
    zipapp.create_archive(folder / "main", folder / "app.pyz")
    py_compile.compile(str(folder / "main" / "__main__.py"), cfile=str(folder / "good.pyc"))
    (folder / "extglob.sh").write_text("shopt -s extglob\necho !(x) >/dev/null; case b in @(b|c)) echo runs;; esac\n")
    assert subprocess.run(command, capture_output=True, text=True).stdout == "runs\n"
    assert check(*command) == []


@pytest.mark.fault(
    "you submit a script with a syntax error",
    "`submit` refuses it; in a container, it warns",
    bound="before the submission",
    also=("test_where_the_job_may_have_another_python_it_is_a_warning",),
)
@pytest.mark.parametrize(
    ("command", "name", "found"),
    [
        ((PYTHON, "bad.py", "--lr", "1"), "bad.py", "SyntaxError: .* line 2"),
        (("env", "A=1", PYTHON, "-u", "bad.py"), "bad.py", "SyntaxError: .* line 2"),
        ((PYTHON, "-m", "pack.bad"), "pack/bad.py", "SyntaxError: .* line 1"),
        ((PYTHON, "-m", "pack"), "pack/__main__.py", "IndentationError: .* line 2"),
        ((PYTHON, "nul.py"), "nul.py", ""),
        (("bash", "bad.sh"), "bad.sh", "line 3: syntax error: "),
    ],
)
def test_a_script_with_a_syntax_error_is_refused(command: tuple[str, ...], name: str, found: str) -> None:
    with pytest.raises(SpecError) as caught:
        check(*command)
    assert caught.value.asked == f"Running {name!r}:"
    assert re.search(found, caught.value.found)
    assert caught.value.hint == "mend it, and submit it again"


@pytest.mark.parametrize(
    "command",
    [
        (PYTHON, "good.py"),
        (PYTHON, "-m", "pack.nowhere"),
        (PYTHON, "-c", "f("),
        (PYTHON, "{script}.py"),
        ("bash", "good.sh"),
        ("true",),
    ],
)
def test_other_commands_pass_and_no_script_is_run(command: tuple[str, ...], folder: Path) -> None:
    assert check(*command) == []
    assert not (folder / "ran").exists()
    assert not list(folder.rglob("__pycache__"))


def test_the_jobs_own_python_decides(folder: Path, tmp_path: Path) -> None:
    """A script may be for another version than ours."""
    other = tmp_path / "bin" / "python3.99"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n[ $1 = -c ] && echo 'cluster_ddp asks:' && echo 'line 1: SyntaxError: too new'\n")
    other.chmod(0o755)
    with pytest.raises(SpecError, match="line 1: SyntaxError: too new"):
        check(str(other), "good.py")


@pytest.mark.parametrize("more", [{"container": "docker://x"}, {"modules": ("python/3.12",)}, {"setup": ("true",)}])
@pytest.mark.parametrize("command", [(PYTHON, "bad.py"), ("bash", "bad.sh")])
def test_where_the_job_may_have_another_python_it_is_a_warning(
    more: dict[str, object], command: tuple[str, ...]
) -> None:
    ((code, text),) = check(*command, **more)
    assert code == "syntax"
    assert text.startswith(f"{command[1]} can't be read on this machine: ")
    assert check(command[0], command[1].replace("bad", "good"), **more) == []


def test_a_resumed_snapshot_is_what_counts(folder: Path) -> None:
    """Not the code as it is now."""
    (folder / "good.py").rename(folder / "pack" / "bad.py")
    assert check(PYTHON, "bad.py", folder=folder / "pack") == []


READS = {
    "tries": 'import os\ntry:\n    n = os.environ["{0}"]\nexcept (KeyError, ValueError):\n    n = 1\n',
    "needs": 'import os\nn = int(os.environ["{}"])\n',
    "from": 'from os import environ\nn = int(environ["{}"])\n',
    "get": 'import os\nn = os.environ.get("{}", "1")\n',
    "asks": 'import os\nn = os.environ["{0}"] if "{0}" in os.environ else 1\n',
    "both": 'import os\na = os.environ.get("{0}", "1")\nb = os.environ["{0}"]\n',
    "chooses": 'import os\nn = os.environ["{0}"] if os.environ.get("{0}") else 1\n',
    "sets": 'import os\nos.environ["{}"] = "1"\n',
    "says": '"""It takes os.environ["{0}"]."""\n# os.environ["{0}"]\n',
}


@pytest.mark.fault(
    "a script reads a Slurm variable that the job lacks",
    "`submit` warns",
    bound="before the submission",
    also=("test_the_variables_that_submit_warns_of_have_no_value",),
)
@pytest.mark.parametrize(
    ("read", "variable", "more", "cure"),
    [
        ("needs", "SLURM_CPUS_PER_TASK", {}, "--cpus-per-task N sets it."),
        ("from", "SLURM_CPUS_PER_TASK", {"launcher": "fork"}, "--cpus-per-task N sets it."),
        ("both", "SLURM_CPUS_PER_TASK", {}, "--cpus-per-task N sets it."),
        ("chooses", "SLURM_CPUS_PER_TASK", {}, None),
        ("needs", "SLURM_CPUS_PER_TASK", {"cpus_per_task": 4}, None),
        *((read, "SLURM_CPUS_PER_TASK", {}, None) for read in ("get", "asks", "sets", "says", "tries")),
        ("needs", "SLURM_ARRAY_TASK_ID", {}, "--array sets it."),
        ("needs", "SLURM_ARRAY_TASK_ID", {"array": "0-3"}, None),
        ("needs", "SLURM_RESTART_COUNT", {}, 'os.environ.get("SLURM_RESTART_COUNT", "0")'),
        ("needs", "SLURM_GPUS_PER_NODE", {}, "sets SLURM_GPUS_ON_NODE."),
        ("needs", "SLURM_PROCID", {}, None),
        ("needs", "SLURM_PROCID", {"on_slurm": False}, "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR …"),
        ("needs", "HOME", {"on_slurm": False}, None),
    ],
)
def test_a_variable_without_a_value_is_a_warning(
    folder: Path, read: str, variable: str, more: dict[str, object], cure: str | None
) -> None:
    (folder / "t.py").write_text(READS[read].format(variable))
    said = check(PYTHON, "t.py", **more)  # type: ignore[arg-type]
    if cure is None:
        assert said == []
    else:
        ((code, text),) = said
        assert code == "slurm-variable"
        assert text.startswith(f't.py reads os.environ["{variable}"], which has no value in this job: a KeyError. ')
        assert text.endswith(cure)


@pytest.mark.parametrize(
    ("command", "text", "is_refused"),
    [
        (("bash", "windows"), "echo hi\r\n", True),
        (("bash", "windows"), "#!/bin/bash\n\necho hi\r\n", True),
        (("./windows",), "#!/bin/bash\r\necho hi\r\n", True),
        (("./windows",), "#!/usr/bin/env python3\r\nprint(1)\r\n", True),
        ((PYTHON, "windows"), "print(1)\r\n", False),  # Python reads them
        (("bash", "-c", "./windows 1"), "#!/bin/bash\r\necho hi\r\n", True),
        (("bash", "-c", "./windows 1"), "\x7fELF\r\n\0", False),
        (("bash", "windows"), "echo hi\n", False),
        (("./windows",), "#!/bin/bash\necho hi\n", False),
    ],
)
def test_lines_that_end_as_on_windows_are_refused(
    folder: Path, command: tuple[str, ...], text: str, is_refused: bool
) -> None:
    """The kernel would look for an interpreter whose name ends with a carriage return, on the node."""
    (folder / "windows").write_bytes(text.encode())
    (folder / "windows").chmod(0o755)
    if not is_refused:
        assert check(*command) == []
        return
    with pytest.raises(SpecError, match="end as on Windows") as error:
        check(*command)
    assert error.value.hint.startswith(r"sed -i 's/\r$//' ")


def test_what_a_sitecustomize_prints_is_no_error_of_the_script(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('Welcome to the cluster!')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert check(PYTHON, "good.py") == []
