"""A job's ranks: where they are started, in a job of Slurm or on this machine, and their start."""

from __future__ import annotations

import errno
import os
import re
import shlex
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import command_program
from cluster_ddp.agent.job import inherited_env, job_log
from cluster_ddp.agent.job.local_job import LocalJob
from cluster_ddp.agent.job.slurm_job import SlurmJob
from cluster_ddp.agent.job.start_loop import BaseJob
from cluster_ddp.agent.launch_env import Shape
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.errors import RunDirError, SpecError, counted
from cluster_ddp.run import job_file, ownership, places
from cluster_ddp.run.files import make_dir
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.run.names import File


def job_of(asked: AgentOptions, env: Mapping[str, str]) -> BaseJob:
    """Return the job whose ranks are to be started.

    Args:
        asked: its options.
        env: the `inherited_env.own` of this process.

    Raises:
        SpecError: this is no job of Slurm, and no number of ranks was given.
        ClusterDDPError: the environment contradicts itself, or all ports for the rendezvous are in use.
    """
    if asked.ranks is not None:
        return LocalJob(asked, env)
    if "SLURM_JOB_ID" in env:
        return SlurmJob(asked, inherited_env.completed(env), is_on_node="SLURMD_NODENAME" in env)
    found = "this shell is not in a job of Slurm, and the number of ranks on this machine is not given."
    raise SpecError("Starting ranks:", found, "sbatch SCRIPT, or in salloc; on this machine: --ranks N")


def run(job: BaseJob) -> int:
    """Start a job's ranks, and wait for their end. Returns the exit status.

    Raises:
        SpecError: there is no such script, folder or srun, or there are too few CPUs for the ranks.
        RunDirError: the run directory can't be made, or not be written; or somebody else can put files there.
    """
    asked = job.options
    if job.folder is not None:
        if isinstance(job, SlurmJob):
            _refuse_backslash(job.folder)
            _warn_of_array(asked.run_dir or "", job.env)
        make_run_dir(job.folder, shared=asked.share)
        here = () if isinstance(job, SlurmJob) else (socket.gethostname(), processes.started(os.getpid()))
        job_file.complete(job.folder, JobFile(job.label, None, time.time(), *here), shared=asked.share)
        if asked.function:  # submitit's runner looks for a pickle with the job's id
            places.point(job.folder / f"{job.job}_submitted.pkl", job.folder / File.FUNCTION)
    if asked.code is not None:
        _enter(Path(asked.code))
    if asked.container is None and asked.container_image is None:
        hint = "start it in its folder; or sbatch --chdir=FOLDER SCRIPT"
        command_program.check_script(asked.command, Path.cwd(), hint)
    if isinstance(job, SlurmJob) and (remark := gpu_remark(job.size, asked)):
        job_log.say(remark)
    if job.folder is not None and not _is_output_in(job.folder):
        logs = job.folder / File.TASK_LOG.format("*")
        job_log.say(f"The ranks write to {logs}; to read that: cluster-ddp logs {shlex.quote(str(job.folder))}")
    return job.run()


def _is_output_in(run_dir: Path) -> bool:
    """Whether this process itself writes there: then it is the log of a submission."""
    return Path(os.path.realpath("/proc/self/fd/1")).parent == run_dir.resolve()


def _refuse_backslash(run_dir: Path) -> None:
    if "\\" in str(run_dir):
        found = "its path has a backslash, which srun interprets in the paths of logs."
        raise RunDirError(f"Using the run directory {run_dir}:", found, "--run-dir PATH, without one")


def _warn_of_array(run_dir: str, env: Mapping[str, str]) -> None:
    """Say that an array's tasks may share a run directory. Those that run one after the other (%1) may be meant to."""
    task, of_task = env.get("SLURM_ARRAY_TASK_ID"), ("%j", "%a", env["SLURM_JOB_ID"])
    is_alone = task is None or env.get("SLURM_ARRAY_TASK_COUNT") == "1"
    if is_alone or any(word in run_dir for word in of_task) or re.search(rf"(?<!\d){task}(?!\d)", run_dir):
        return
    job_log.say(
        f"warning: The run directory {run_dir} does not name task {task} of the array: tasks that use it at the same\n"
        f"  time write the same logs and checkpoints.\n  Hint: --run-dir {shlex.quote(run_dir + '-%j')}"
    )


def _enter(code: Path) -> None:
    try:
        os.chdir(code)
    except OSError as error:
        hint = f"ls -ld {shlex.quote(str(code))}; all nodes must see it"
        raise SpecError(f"Running in {code}:", f"{error.strerror}.", hint) from error


def make_run_dir(run_dir: Path, *, shared: bool) -> None:
    """Make a run directory, if it is not there.

    Raises:
        RunDirError: it can't be made, or not be written; or others can put links there.
    """
    try:
        if not run_dir.is_dir():
            make_dir(run_dir, shared=shared)
        if not os.access(run_dir, os.W_OK):
            raise PermissionError(errno.EACCES, "It can't be written", str(run_dir))
        _refuse_planted(run_dir)
    except OSError as error:
        found = f"{error.strerror}: {error.filename}."
        hint = "choose one on a file system that you can write from all nodes: --run-dir PATH"
        raise RunDirError(f"Using the run directory {run_dir}:", found, hint) from error


def _refuse_planted(run_dir: Path) -> None:
    """Refuse a folder in which others can put links: srun follows them, and writes what the ranks print."""
    found = ownership.others(run_dir.lstat()) or ownership.others(run_dir.stat())
    links = [path.name for path in run_dir.glob(File.TASK_LOG.format("*")) if path.is_symlink()]
    if found or links:
        found = f"it {found}." if found else f"{links[0]} is a symbolic link: the output of a rank would go elsewhere."
        hint = f"choose another one; if it is yours, and nobody has changed it: chmod go-w {shlex.quote(str(run_dir))}"
        raise RunDirError(f"Using the run directory {run_dir}:", found, hint)


def gpu_remark(size: Shape, options: AgentOptions) -> str:
    """Return what to say of a job whose tasks are not as many as its GPUs; empty if each task drives its GPUs.

    Raises:
        SpecError: srun would refuse to start so many ranks.
    """
    _check_cpus(size, options)
    ranks, gpus, each = size.ranks_per_node, size.gpus_per_node, options.gpus_per_task
    if gpus is None:
        return ""
    if ranks * each == gpus:
        if size.tasks_per_node == ranks or options.nodes:  # with a range, a submitted job has no number of tasks
            return ""
        asked = counted(size.tasks_per_node, "task")
        return f"The job has {asked} and {gpus} GPUs on each node: starting {counted(ranks, 'rank')} there."
    needed = f"{counted(ranks, 'rank')} on each node, with {counted(each, 'GPU')} each"
    fault = "some have no GPU of their own" if ranks * each > gpus else "the others stay idle"
    hint = f"--ntasks-per-node={max(1, gpus // each)}, or cluster-ddp launch --ranks-per-node {max(1, gpus // each)}"
    return f"warning: Starting {needed}: the job has {counted(gpus, 'GPU')} there; {fault}.\n  Hint: {hint}"


def _check_cpus(size: Shape, options: AgentOptions) -> None:
    ranks, cpus = size.ranks_per_node, size.node_cpus
    may_be_more = size.is_overcommitted or any(re.match(r"--overc|-\w*O", one) for one in options.srun_options)
    if options.launcher == "srun" and cpus is not None and ranks > cpus and not may_be_more:
        asked = f"Starting {counted(ranks, 'rank')} on each node:"
        found = f"the job has {counted(cpus, 'CPU')} there, and srun gives each rank one of its own."
        raise SpecError(asked, found, f"ask for them: --ntasks-per-node={ranks}, or --cpus-per-task={ranks}")
