"""What the text of a job's script shows before the submission: a syntax error, a variable of Slurm without a value.

Without this, the job waits in the queue, and then every rank fails in its first second.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from cluster_ddp.agent.command_program import Target, program_words, target
from cluster_ddp.errors import SpecError
from cluster_ddp.submission.checks import job_environment
from cluster_ddp.submission.checks.job_warnings import Advice
from cluster_ddp.submission.spec import JobSpec

# Prints nothing for a text that compiles. Compiling runs and imports nothing of it.
_COMPILE = """
import sys
try:
    with open(sys.argv[1], "rb") as file:
        compile(file.read(), sys.argv[1], "exec", dont_inherit=True)
except (SyntaxError, ValueError) as error:  # ValueError: it has NUL bytes (before Python 3.12)
    print(f"{type(error).__name__}: {error}")
"""
_GETS = ("os.environ.get", "environ.get", "os.getenv", "getenv")
_CHOICES = ast.If, ast.IfExp, ast.BoolOp, ast.Try
_LOOKED_AT_BYTES = 1 << 16


def check(spec: JobSpec, folder: Path, *, on_slurm: bool) -> list[Advice]:
    """Check the script of a job, if its command names one that is here.

    Args:
        spec: the job.
        folder: the folder in which it will run.
        on_slurm: whether Slurm will run it.

    Returns:
        A warning of a syntax error, if the job may have another Python or shell than this machine; warnings of
        variables that it reads and that the job does not have.

    Raises:
        SpecError: the Python or the shell of the job can't read the script.
    """
    run = target(spec.command)
    refuse_windows_lines(spec.command, folder)
    path, is_python = _script(run, folder), run.program == "python"
    if path is None:
        return []
    name = os.path.relpath(path)
    said = _compiled(spec, path) if is_python else _read_by_shell(program_words(spec.command)[0], path)
    if said and job_environment.runs_here(spec):
        raise SpecError(f"Running {name!r}:", f"{said}.", "mend it, and submit it again")
    text = f"{name} can't be read on this machine: {said}. The job's own Python or shell may say the same."
    wrong = [Advice("syntax", text)] if said else []
    return [*wrong, *(_variables(spec, path, on_slurm) if is_python else ())]


def refuse_windows_lines(command: Sequence[str], folder: Path) -> None:
    """Refuse a script for a shell, or one with a `#!` line that the kernel reads, whose lines end as on Windows.

    Raises:
        SpecError: the command runs such a script in the folder.
    """
    run, word = target(command), program_words(command)[0]
    if run.kind == "script":
        word = run.words[0]
    elif run.kind == "code" and run.program == "shell" and run.words:  # bash -c './run.sh 1'
        word = (run.words[0].split() or [word])[0]
    path = folder / word
    if run.program == "python" or ("/" not in word and run.kind != "script") or not path.is_file():
        return
    with open(path, "rb") as file:
        text = file.read(_LOOKED_AT_BYTES)
    by_kernel = re.match(rb"#!.*\r\n", text)
    if by_kernel or (run.program == "shell" and b"\r\n" in text and b"\0" not in text):
        found = "its lines end as on Windows, and a shell takes the carriage return for a part of each command."
        raise SpecError(f"Running {word!r}:", found, f"sed -i 's/\\r$//' {shlex.quote(word)}")


def _script(run: Target, folder: Path) -> Path | None:
    """The text of the script or of the module that a command runs, if it is in the folder of the job.

    Python also runs a .pyc and an archive (python -m zipapp), which are no text.
    """
    files = [folder / run.words[0]] if run.kind == "script" else []
    if run.kind == "module" and run.words:
        module = folder / run.words[0].replace(".", "/")
        files = [module.with_suffix(".py"), module / "__main__.py"]
    path = next((path for path in files if path.is_file()), None)
    return None if path is None or path.suffix == ".pyc" or zipfile.is_zipfile(path) else path


def _compiled(spec: JobSpec, path: Path) -> str:
    """What the job's Python, or else the present one, says of a file that it can't compile."""
    said = job_environment.ask_python(spec, _COMPILE, [str(path)])
    if said is None:
        done = subprocess.run([sys.executable, "-ISc", _COMPILE, path], capture_output=True, text=True)
        said = done.stdout.splitlines()
    return said[0] if said else ""


def _read_by_shell(shell: str, path: Path) -> str:
    """What a shell says of a file that it can't read; nothing if that shell is not here."""
    # With -n, a script's own `shopt -s extglob` has no effect, and without it `!(a|b)` would be an error.
    options = ("-O", "extglob", "-n") if Path(shell).name == "bash" else ("-n",)
    done = job_environment.answer(shell, [shell, *options, str(path)])
    return done.stderr.partition("\n")[0] if done is not None and done.returncode else ""


def _variables(spec: JobSpec, path: Path, on_slurm: bool) -> Iterator[Advice]:
    """Warnings of Slurm's variables that a script uses, and that have no value or another meaning in this job."""
    name = os.path.relpath(path)
    for variable in sorted(_used(path)):
        if cure := cure_of_unset(spec, variable, on_slurm=on_slurm):
            text = f'{name} reads os.environ["{variable}"], which has no value in this job: a KeyError. {cure}'
            yield Advice("slurm-variable", text)


def cure_of_unset(spec: JobSpec, variable: str, *, on_slurm: bool) -> str:
    """Return how to get a variable of Slurm that has no value in a job, or what has; empty if it has one."""
    if not on_slurm:
        return "Without Slurm, only torchrun's variables are set: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR …"
    if variable == "SLURM_CPUS_PER_TASK" and spec.cpus_per_task is None:
        return "--cpus-per-task N sets it."
    if variable in ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_JOB_ID") and spec.array is None:
        return "--array sets it."
    if variable == "SLURM_RESTART_COUNT":  # Slurm 20.11 to 26.05; later, 0
        return f'Before the first restart, most versions of Slurm do not set it: os.environ.get("{variable}", "0")'
    if variable in ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"):
        return "The job asks for its GPUs by --gres, which sets SLURM_GPUS_ON_NODE."
    return ""


def _used(path: Path) -> Collection[str]:
    """Slurm's variables that a script only reads as os.environ["NAME"], without a default."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    named = Counter(name for node in nodes if (name := _text(node)))
    guarded = {id(read) for node in nodes if _catches(node) for one in node.body for read in ast.walk(one)}
    reads = Counter(
        _text(node.slice)
        for node in nodes
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and id(node) not in guarded
        and ast.unparse(node.value) in ("os.environ", "environ")
    )
    asked = Counter(filter(None, map(_asked_with_default, nodes)))
    chosen = {name for node in nodes if isinstance(node, _CHOICES) for name in map(_asked_with_default, ast.walk(node))}
    needed = {name for name, n in reads.items() if named[name] == n + (0 if name in chosen else asked[name])}
    return {name for name in needed if name.startswith("SLURM_")}


def _catches(node: ast.AST) -> TypeGuard[ast.Try]:
    """Whether a statement catches a KeyError."""
    handlers = node.handlers if isinstance(node, ast.Try) else []
    names = [ast.unparse(one.type) if one.type is not None else "Exception" for one in handlers]
    return any(re.search(r"\b(KeyError|LookupError|Exception|BaseException)\b", name) for name in names)


def _asked_with_default(node: ast.AST) -> str:
    """The variable of a call such as os.environ.get("NAME"); empty for any other node."""
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in _GETS:
        return _text(node.args[0])
    return ""


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
