"""Ask the Python that will run a job, before the submission."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from cluster_ddp.agent.python_command import interpreter, interpreter_words, program_words
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.waiting_notice import named_if_slow


def runs_here(spec: JobSpec) -> bool:
    """Return whether a job finds the programs that this process finds: no container, module or setup changes that."""
    return not (spec.container or spec.container_image or spec.conda_env or spec.modules or spec.setup)


def ask(spec: JobSpec, code: str, words: Sequence[str]) -> list[str] | None:
    """Run code by the job's Python.

    Args:
        spec: the job. Without a command it runs a function, with the present Python.
        code: the code. It must not import what the job imports: that would take long.
        words: its arguments.

    Returns:
        The lines that it prints; None if that Python can't be known, is not here, or does not answer.
    """
    if not runs_here(spec):
        return None
    program_at = len(spec.command) - len(program_words(spec.command))  # after env and its variables
    if spec.launcher == "fork":
        python = list(spec.command[: interpreter_words(spec.command)])
    else:
        python = [*spec.command[:program_at], interpreter(spec.command)]
    path = os.pathsep.join([*([f"{spec.venv}/bin"] if spec.venv else []), os.environ.get("PATH", os.defpath)])
    program = shutil.which(python[0], path=path)
    if program is None:
        return None  # another check says so
    try:
        with named_if_slow(f"{program} to answer"):
            done = subprocess.run(
                [program, *python[1:], "-c", code, *words],
                capture_output=True,
                text=True,
                timeout=30,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PATH": path},
            )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None
