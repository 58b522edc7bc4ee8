"""`python -m cluster_ddp.agent`, and the program that a submission freezes into one file.

job OPTIONS -- COMMAND                       on the batch host, or on this machine: starts the ranks, and what follows
task [--ignore-warnings] OPTIONS -- COMMAND  in each task of a step
rank -- COMMAND                              around each worker of torchrun
unpack ARCHIVE VENV                          on each node, before the ranks: the environment of --stage-env
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster_ddp.agent import options, place, python_command
from cluster_ddp.agent.job import allocation, step
from cluster_ddp.agent.job.local_job import LocalJob
from cluster_ddp.agent.job.slurm_job import Job
from cluster_ddp.agent.options import Options
from cluster_ddp.agent.task import staging, start
from cluster_ddp.contract import Env
from cluster_ddp.errors import RunDirError, SpecError, exit_on_error
from cluster_ddp.files import make_dir

PROGRAM = "cluster-ddp launch"


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the first word says. Returns the exit status."""
    verb, *words = sys.argv[1:] if argv is None else argv
    with exit_on_error(PROGRAM):
        if verb == "job":
            return launch(job_of(options.parse(PROGRAM, words)))
        if verb == "unpack":
            return 0 if staging.unpack(Path(words[0]), os.environ[Env.COPY], words[1], os.environ) else 1
        if verb == "rank":
            rank = int(os.environ["RANK"])
            return start.keep(Options(command=tuple(words[1:])), [], os.environ, rank=rank, ignore_warnings=True)
        ignore_warnings = words[:1] == ["--ignore-warnings"]
        asked = options.parse(f"{PROGRAM} (task)", words[ignore_warnings:])
        return start.run(asked, step.agent(), ignore_warnings=ignore_warnings)


def job_of(asked: Options) -> Job | LocalJob:
    """Return the job whose ranks are to be started.

    Raises:
        SpecError: this is no job of Slurm, and no number of ranks was given.
        ClusterDDPError: the environment contradicts itself, or all ports for the rendezvous are in use.
    """
    if asked.ranks is not None:
        return LocalJob(asked, os.environ)
    if "SLURM_JOB_ID" in os.environ:
        return Job(asked, allocation.completed(os.environ), is_on_node=allocation.is_on_node(os.environ))
    found = "this shell is not in a job of Slurm, and the number of ranks on this machine is not given."
    raise SpecError("Starting ranks:", found, "sbatch SCRIPT, or in salloc; on this machine: --ranks N")


def launch(job: Job | LocalJob) -> int:
    """Start a job's ranks, and wait for their end. Returns the exit status.

    Raises:
        SpecError: there is no such script, or there are too few CPUs for the ranks.
        RunDirError: the run directory can't be made, or not be written.
    """
    asked = job.options
    if job.folder is not None:
        _make(job.folder, shared=asked.share)
    if asked.code is not None:
        os.chdir(place.named(asked.code, os.environ))
    if asked.container is None and asked.container_image is None:
        python_command.check_script(asked.command, Path.cwd())
    return job.run()


def _make(run_dir: Path, *, shared: bool) -> None:
    try:
        if not run_dir.is_dir():
            make_dir(run_dir, shared=shared)
        if not os.access(run_dir, os.W_OK):
            raise PermissionError(errno.EACCES, "It can't be written", str(run_dir))
    except OSError as error:
        found = f"{error.strerror}: {error.filename}."
        hint = "choose one on a file system that you can write from all nodes: --run-dir PATH"
        raise RunDirError(f"Using the run directory {run_dir}:", found, hint) from error


def run() -> NoReturn:
    """Do what the command line says, and exit. A full disk, on which no log can be written, changes no exit status."""
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
