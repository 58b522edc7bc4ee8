"""`python -m cluster_ddp.agent`, and the program that a submission freezes into one file.

job OPTIONS -- COMMAND       on the batch host, or on this machine: starts the ranks, and what follows
packed JOB OPTIONS -- …      the same in a part of a job that holds several tasks of an array
chain RUN_DIR                at the start of each job of a chain: whether anything is left to do
task OPTIONS -- COMMAND      in each task of a step
spare OPTIONS -- COMMAND     on each spare node
unpack ARCHIVE VENV          on each node, before the ranks: the environment of --stage-env
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster_ddp.agent.supervision import signals
from cluster_ddp.errors import SpecError, exit_on_error
from cluster_ddp.run.names import Env

PROGRAM = "cluster-ddp launch"
_VERBS = ("job", "packed", "chain", "task", "spare", "unpack")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the first word says. Returns the exit status. Only what that needs is imported: nodes have many tasks."""
    verb, *words = (sys.argv[1:] if argv is None else argv) or [""]
    with exit_on_error(PROGRAM):
        if verb not in _VERBS:
            found = f"its first word is {verb!r}, not one of {', '.join(_VERBS)}."
            raise SpecError("Starting the agent of a job:", found, f"{PROGRAM} --help")
        if verb == "unpack":
            from cluster_ddp.agent.task import staged_env

            return 0 if staged_env.unpack(Path(words[0]), os.environ[Env.COPY], words[1], os.environ) else 1
        if verb == "chain":
            from cluster_ddp.agent.job import chain

            return chain.begin(Path(words[0]), os.environ)
        if verb == "packed":
            from cluster_ddp.agent.job.pack import packed_job

            return packed_job.run(*words)
        if verb != "job":
            signals.hold()  # one that comes now waits for the supervisor
        from cluster_ddp.agent import launch_options

        asked = launch_options.parse(words)
        if verb == "job":
            from cluster_ddp.agent.job import inherited_env, launch_job

            env = inherited_env.own(os.environ)
            if asked.pack is not None:
                from cluster_ddp.agent.job.pack.pack import Pack

                return Pack(asked, env).run()
            return launch_job.run(launch_job.job_of(asked, env))
        from cluster_ddp.agent.task import orders, task

        if verb == "spare":
            return orders.wait_as_spare(asked)
        return task.run(asked)


def run() -> NoReturn:
    """Do what the command line says, and exit. A full disk, on which no log can be written, changes no exit status."""
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
