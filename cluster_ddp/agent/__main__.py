"""`python -m cluster_ddp.agent`, and the program that a submission freezes into one file.

job OPTIONS -- COMMAND                       on the batch host, or on this machine: starts the ranks, and what follows
task [--ignore-warnings] OPTIONS -- COMMAND  in each task of a step
rank -- COMMAND                              around each worker of torchrun
unpack ARCHIVE VENV                          on each node, before the ranks: the environment of --stage-env
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from cluster_ddp.agent import options, place, python_command
from cluster_ddp.agent.job import step
from cluster_ddp.agent.job.local_job import LocalJob
from cluster_ddp.agent.job.slurm_job import Job
from cluster_ddp.agent.options import Options
from cluster_ddp.agent.task import staging, start
from cluster_ddp.contract import Env
from cluster_ddp.errors import SpecError, exit_on_error
from cluster_ddp.files import make_dir

PROGRAM = "cluster-ddp launch"


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the first word says. Returns the exit status."""
    verb, *words = sys.argv[1:] if argv is None else argv
    with exit_on_error(PROGRAM):
        if verb == "job":
            return launch(options.parse(options.parser(PROGRAM, ""), words))
        if verb == "unpack":
            return 0 if staging.unpack(Path(words[0]), os.environ[Env.COPY], words[1], os.environ) else 1
        if verb == "rank":
            rank = int(os.environ["RANK"])
            return start.keep(Options(command=tuple(words[1:])), [], os.environ, rank=rank, ignore_warnings=True)
        ignore_warnings = words[:1] == ["--ignore-warnings"]
        asked = options.parse(options.parser(f"{PROGRAM} (task)", ""), words[ignore_warnings:])
        return start.run(asked, step.agent(), ignore_warnings=ignore_warnings)


def launch(asked: Options) -> int:
    """Start a job's ranks, and wait for their end. Returns the exit status.

    Raises:
        SpecError: this is no job of Slurm, and no number of ranks was given.
        ClusterDDPError: the environment contradicts itself, or all ports for the rendezvous are in use.
    """
    if asked.ranks is not None:
        job: Job | LocalJob = LocalJob(asked, os.environ)
    elif "SLURM_JOB_ID" in os.environ:
        job = Job(asked, os.environ)
    else:
        found = "this shell is not in a job of Slurm, and the number of ranks on this machine is not given."
        raise SpecError("Starting ranks:", found, "sbatch SCRIPT, or in salloc; on this machine: --ranks N")
    if asked.dry_run:
        print(_shown(job.added, job.command()))
        return 0
    if job.folder is not None and not job.folder.is_dir():
        make_dir(job.folder, shared=asked.share)
    if asked.code is not None:
        os.chdir(place.named(asked.code, os.environ))
    if asked.container is None and asked.container_image is None:
        _check_script(job.options.command)
    return job.run()


def _check_script(command: Sequence[str]) -> None:
    """Check that a Python script is there, once instead of in each rank."""
    target = python_command.python_target(command) if python_command.is_python(command) else None
    if target is not None and target.kind == "script" and not Path(target.words[0]).exists():
        found = f"there is no such file in {Path.cwd()}."
        raise SpecError(f"Running {target.words[0]}:", found, "start it in its folder; or sbatch --chdir=FOLDER SCRIPT")


def _shown(added: Mapping[str, str], command: Sequence[str]) -> str:
    """What would be started. The secret is made anew at each start, and shown to nobody."""
    shown = {name: value for name, value in added.items() if name != Env.SECRET}
    return "\n".join([*(f"export {name}={shlex.quote(value)}" for name, value in shown.items()), shlex.join(command)])


def run() -> NoReturn:
    """Do what the command line says, and exit. A full disk, on which no log can be written, changes no exit status."""
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
