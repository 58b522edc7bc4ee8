"""From a payload and a launcher to the command of each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster_ddp.launch import parse_python_command
from cluster_ddp.launch.backends import submitit_task
from cluster_ddp.launch.spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCommand:
    """What each task of a job runs. The templates put the launcher and the container of the `JobSpec` around it."""

    argv: tuple[str, ...]
    """The program and its arguments; in an array, a command's with the placeholders of its grid."""
    imports_us: bool
    """Whether it is a Python that imports this package: it begins with warnings (USR1, USR2) ignored."""
    interpreter_words: int = 0
    """With the launcher fork: how many of the words are Python's own, before its script or module."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the task alone, as text for bash."""
    is_function: bool = False
    """Whether submitit's runner calls a function, which it loads from a pickle in the run directory."""


def of_command(spec: JobSpec) -> TaskCommand:
    """The command of a specification, as it stands there.

    Raises:
        SpecError: with the launcher fork, a command that is no script or module that Python runs.
    """
    words = parse_python_command.interpreter_words(spec.command) if spec.launcher == "fork" else 0
    return TaskCommand(
        argv=spec.command, imports_us=parse_python_command.imports_us(spec.command), interpreter_words=words
    )


def of_function(folder: str, *, local: bool) -> TaskCommand:
    """A pickled function.

    Args:
        folder: the run directory; %j in it is the job's id.
        local: on this machine, where submitit's runner is told its place by other variables.
    """
    env = {"SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_LOG_LEVEL": '"${SUBMITIT_LOG_LEVEL-WARNING}"'}
    if local:
        env |= {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": "$PPID",  # the supervisor's process id
            "SUBMITIT_LOCAL_NTASKS": "$WORLD_SIZE",
            "SUBMITIT_LOCAL_GLOBALID": "$RANK",
            "SUBMITIT_LOCAL_LOCALID": "$LOCAL_RANK",
        }
    return TaskCommand(argv=submitit_task.runner(folder), imports_us=True, env=env, is_function=True)
