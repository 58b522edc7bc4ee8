"""From a command or function, and a launcher, to the command of each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster_ddp.submission import parse_python_command
from cluster_ddp.submission.backends import submitit_task
from cluster_ddp.submission.spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCommand:
    """What each task of a job runs. The templates add the launcher and the container of the `JobSpec`."""

    argv: tuple[str, ...]
    """The program and its arguments; for a command in an array, with the placeholders of the grid."""
    imports_us: bool
    """Whether it is a Python command that imports this package. It starts with warnings (USR1, USR2) ignored."""
    is_foreign_python: bool = False
    """Whether it is a Python command that does not import this package."""
    interpreter_words: int = 0
    """With the launcher fork: number of words before the script or module; else 0."""
    python: str = "python"
    """The Python interpreter that runs the command; the first on the PATH if the command is not Python."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the task alone; the values are bash words."""
    is_function: bool = False
    """Whether submitit's runner loads a function from a pickle in the run directory and calls it."""


def of_command(spec: JobSpec) -> TaskCommand:
    """Return the command of a specification as a `TaskCommand`.

    Raises:
        SpecError: the launcher is fork, and the command does not run a Python script or module.
    """
    words = parse_python_command.interpreter_words(spec.command) if spec.launcher == "fork" else 0
    program = parse_python_command.program_words(spec.command)
    imports_us = parse_python_command.imports_us(spec.command)
    return TaskCommand(
        argv=spec.command,
        imports_us=imports_us,
        is_foreign_python=parse_python_command.is_python(spec.command) and not imports_us,
        interpreter_words=words,
        python=next(iter(program), "python") if parse_python_command.is_python(spec.command) else "python",
    )


def of_function(folder: str, *, local: bool) -> TaskCommand:
    """Return the command that runs a pickled function.

    Args:
        folder: the run directory; %j in it stands for the job's id.
        local: whether the job runs on this machine. submitit's runner then reads its rank from other variables.
    """
    env = {"SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_LOG_LEVEL": '"${SUBMITIT_LOG_LEVEL-CRITICAL}"'}
    if local:
        env |= {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": "$PPID",  # the supervisor's process id
            "SUBMITIT_LOCAL_NTASKS": "$WORLD_SIZE",
            "SUBMITIT_LOCAL_GLOBALID": "$RANK",
            "SUBMITIT_LOCAL_LOCALID": "$LOCAL_RANK",
        }
    argv = submitit_task.runner(folder)
    return TaskCommand(argv=argv, imports_us=True, python=argv[0], env=env, is_function=True)
