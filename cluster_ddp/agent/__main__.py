"""`python -m cluster_ddp.agent`, and the program that a submission freezes into one file.

job OPTIONS -- COMMAND                       on the batch host, or on this machine: starts the ranks, and what follows
task [--ignore-warnings] [--stays [--waits=MARK]] OPTIONS -- COMMAND
                                             in each task of a step
rank [--ignore-warnings] -- COMMAND          around each worker of torchrun
spare OPTIONS -- COMMAND                     on each spare node
unpack ARCHIVE VENV                          on each node, before the ranks: the environment of --stage-env
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster_ddp.agent.task import signals
from cluster_ddp.errors import SpecError, exit_on_error
from cluster_ddp.protocol import Env

PROGRAM = "cluster-ddp launch"
_VERBS = ("job", "task", "rank", "spare", "unpack")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the first word says. Returns the exit status. Only what that needs is imported: nodes have many tasks."""
    verb, *words = (sys.argv[1:] if argv is None else argv) or [""]
    with exit_on_error(PROGRAM):
        if verb not in _VERBS:
            found = f"its first word is {verb!r}, not one of {', '.join(_VERBS)}."
            raise SpecError("Starting the agent of a job:", found, f"{PROGRAM} --help")
        if verb == "job":
            from cluster_ddp.agent import launch_options
            from cluster_ddp.agent.job import allocation, launch_job

            return launch_job.run(launch_job.job_of(launch_options.parse(PROGRAM, words), allocation.own(os.environ)))
        if verb == "unpack":
            from cluster_ddp.agent.task import staging

            return 0 if staging.unpack(Path(words[0]), os.environ[Env.COPY], words[1], os.environ) else 1
        signals.hold()  # one that comes now waits for the supervisor
        return _around(verb, words)


def _around(verb: str, words: Sequence[str]) -> int:
    """Around a task, or a rank below torchrun."""
    from cluster_ddp.agent import launch_options
    from cluster_ddp.agent.task import task

    words, flags = list(words), set()
    while words[0] in ("--ignore-warnings", "--stays"):
        flags.add(words.pop(0))
    waits = words.pop(0).partition("=")[2] if words[0].startswith("--waits=") else ""
    asked, ignores = launch_options.parse(f"{PROGRAM} ({verb})", words), "--ignore-warnings" in flags
    if verb == "rank":
        return task.Task(asked, int(os.environ["RANK"]), ignores).keep(os.environ)
    if verb == "spare":
        from cluster_ddp.agent.task import orders

        return orders.wait_as_spare(asked)
    return task.run(asked, ignore_warnings=ignores, stays="--stays" in flags, waits=waits)


def run() -> NoReturn:
    """Do what the command line says, and exit. A full disk, on which no log can be written, changes no exit status."""
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
