"""The environment of a job's ranks: what the batch host gives to all, and what each task adds for its own."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.errors import RendezvousError, SpecError, TopologyError
from cluster_ddp.run.names import RESUME, Env, File
from cluster_ddp.slurm import port, variables
from cluster_ddp.slurm.variables import Variables

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""The place of one process that examines a node."""

_LOOPBACK = "127.0.0.1"


class Shape(NamedTuple):
    """How many ranks there are, and where."""

    nodes: int
    ranks_per_node: int
    node_cpus: int | None
    """CPUs of the job on the node that has the fewest; None if unknown."""
    cpus_per_task: int | None
    """CPUs that were asked for each task; None if they were not."""
    tasks_per_node: int = 1
    """Tasks that the job asked for on each node."""
    gpus_per_node: int | None = None
    """GPUs that the job has on each node; None if unknown, or if it has none."""
    gpus_per_task: int = 0
    """GPUs that the job asked for each of its tasks; 0 if it did not."""
    is_overcommitted: bool = False
    """Whether the job asked for more tasks than CPUs."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def tasks(self, launcher: str) -> int:
        """Return the number of tasks that srun starts: one for each rank, or for each node."""
        return self.world_size if launcher == "srun" else self.nodes


def shape(options: AgentOptions, env: Mapping[str, str]) -> Shape:
    """Return the shape of a job of Slurm, from the options, and else from what Slurm gave.

    Without --ranks-per-node: the job's tasks per node; if that is one, and the node has several GPUs, one for each
    GPU, as launchers of one task per node expect.

    Raises:
        TopologyError: a variable is not a number.
        SpecError: the job is heterogeneous; its tasks are not equal on all nodes, and the options don't say how many
            ranks to start; or all nodes are to be spares.
    """
    v = Variables(env)
    if (v.integer(*variables.HET_SIZE) or 1) > 1:
        found = f"{v.shown(*variables.HET_SIZE)}: it is a heterogeneous job, and srun would start its first part only."
        raise SpecError("Starting the ranks of the job:", found, "submit a job of one part: no #SBATCH hetjob, no ':'")
    nodes = (v.integer(*variables.JOB_NODES) or 1) - options.spare_nodes
    if nodes < 1:
        found = (
            f"the job has {nodes + options.spare_nodes} node(s), and {options.spare_nodes} of them are to be spares."
        )
        raise SpecError("Choosing the nodes that train:", found, "fewer with --spare-nodes, or more with --nodes")
    tasks = _tasks_per_node(v, options)
    of_task = _gpus_per_task(v)
    gpus = v.integer(*variables.GPUS_ON_NODE) or of_task * tasks or None
    driven = (gpus or 0) // options.gpus_per_task
    ranks = options.ranks_per_node or (driven if tasks == 1 and driven else tasks)
    asked = v.integer(*variables.CPUS_PER_TASK)
    cpus = [int(part.partition("(")[0]) for part in env.get("SLURM_JOB_CPUS_PER_NODE", "").split(",") if part]
    node_cpus = asked * tasks if asked else min(cpus) if cpus else None
    each_cpus, overcommits = max(1, asked * tasks // ranks) if asked else None, bool(v.text("SLURM_OVERCOMMIT"))
    return Shape(nodes, ranks, node_cpus, each_cpus, tasks, gpus, of_task, overcommits)


def _gpus_per_task(v: Variables) -> int:
    """What --gpus-per-task was: "2" or "a100:2"; from 23.11 on "cpu=4,gres/gpu=2"."""
    asked = v.text("SLURM_GPUS_PER_TASK") or "".join(re.findall("gpu[^,]*", v.text(*variables.TRES_PER_TASK) or ""))
    count = re.search(r"(?:^|[:=])(\d+)$", asked)
    return int(count[1]) if count else bool(asked)


def _tasks_per_node(v: Variables, options: AgentOptions) -> int:
    try:
        counts = v.job_tasks()
    except TopologyError:
        if options.ranks_per_node is None:
            raise
        counts = (1,)
    if len(set(counts)) > 1 and options.ranks_per_node is None:
        asked = "Starting the ranks of the job:"
        on_each = " and ".join(map(str, sorted({*counts}, reverse=True)))
        shown = v.shown(*variables.JOB_TASKS[:1], *variables.JOB_NODES[:1], *variables.TASKS_PER_NODE[1:])
        found = f"its tasks are not equal on all nodes, but {on_each}: {shown}."
        raise SpecError(asked, found, "ask for them with --ntasks-per-node, or say how many: --ranks-per-node N")
    return max(1, min(counts))


def run_dir(options: AgentOptions, label: str) -> Path | None:
    """Return the run directory of a job, 12 or 12_3, absolute; None if it has none."""
    if options.run_dir is None:
        return None
    return Path(options.run_dir.replace("%j", label).replace("%a", label.rpartition("_")[2])).absolute()


def common(options: AgentOptions, folder: Path | None) -> dict[str, str]:
    """Return the variables that a job has everywhere."""
    values = {Env.SECRET: os.urandom(32).hex()}  # by which the job's ranks recognise each other
    # Else a vocabulary from set(words) has another order in each rank, and after each restart.
    values |= {"PYTHONHASHSEED": "0"} if "PYTHONHASHSEED" not in os.environ else {}
    if folder is not None:
        values |= {Env.RUN_DIR: str(folder)}
        values |= {"PYTHONUNBUFFERED": "1"} if "PYTHONUNBUFFERED" not in os.environ else {}
        is_submitted = os.access(folder / File.SPEC, os.R_OK)  # Path.exists may raise, until Python 3.12
        how = RESUME if is_submitted else "the same command with --run-dir"
        values[Env.RESUME] = f"{how} {shlex.quote(str(folder))}"
    values |= {Env.GPUS_PER_TASK: str(options.gpus_per_task)} if options.gpus_per_task > 1 else {}
    values |= {Env.HANG_RESTART_S: str(options.hang_restart_s)} if options.hang_restart_s else {}
    values |= {Env.TRACK: " ".join(options.track)} if options.track else {}
    return {**values, Env.SHARE: "1"} if options.share else values


def of_start(env: Mapping[str, str], host: str, start: int) -> dict[str, str]:
    """Return the variables of one start of a job of Slurm: its number, and where the ranks meet; rank 0 is on `host`.

    Raises:
        RendezvousError: all ports for the rendezvous are in use.
    """
    ports = port.candidates(int(env["SLURM_JOB_ID"]), variables.place_in_job(env))
    rendezvous = {"MASTER_ADDR": host, "MASTER_PORT": str(_free_port(ports, host, start))}
    return {Env.START: str(start), **rendezvous}


def on_slurm(options: AgentOptions, size: Shape, label: str) -> dict[str, str]:
    """Return the variables of a job of Slurm that its tasks inherit in each start."""
    values = {
        **common(options, run_dir(options, label)),
        "WORLD_SIZE": str(size.world_size),
        "LOCAL_WORLD_SIZE": str(size.ranks_per_node),
        "SLURM_EXPORT_ENV": "ALL",  # after `sbatch --export=NONE`, srun would not pass this environment on
    }
    if options.launcher != "srun":  # the step's own value is that of all ranks of a node
        values[Env.CPUS_PER_TASK] = "" if size.cpus_per_task is None else str(size.cpus_per_task)
    return values


def on_this_machine(options: AgentOptions, ranks: int, start: int, requeues: int = 0) -> dict[str, str]:
    """Return the variables of one start of a job on this machine; `of_local_rank` has those of each rank.

    `requeues`: how often it was started again after a stop in time.

    Raises:
        RendezvousError: all ports for the rendezvous are in use.
    """
    gpus = ",".join(map(str, range(ranks * options.gpus_per_task)))
    cpus = options.cpus_per_task or max(1, len(os.sched_getaffinity(0)) // ranks)
    values = {
        Env.LOCAL_JOB_ID: str(os.getpid()),
        Env.START: str(start),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(_free_port(port.candidates(os.getpid()), _LOOPBACK, start)),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "NODE_RANK": "0",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", gpus),
    }
    if requeues:  # as Slurm counts them, for scripts that look there
        values["SLURM_RESTART_COUNT"] = str(requeues)
    values["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(cpus)
    if options.function:
        executor = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": str(os.getpid())}
        values |= {**executor, "SUBMITIT_LOCAL_NTASKS": str(ranks), **_SUBMITIT}
    return values


_SUBMITIT = {"SUBMITIT_LOG_LEVEL": os.environ.get("SUBMITIT_LOG_LEVEL", "CRITICAL")}


def of_local_rank(options: AgentOptions, rank: int) -> dict[str, str]:
    """Return the variables of one rank on this machine."""
    values = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if options.function:
        values |= {"SUBMITIT_LOCAL_GLOBALID": str(rank), "SUBMITIT_LOCAL_LOCALID": str(rank)}
    return values


def task(env: Mapping[str, str]) -> str:
    """Return the number of a task: of Slurm's step, or of this machine, where one stands for all ranks or for one."""
    return env.get("RANK", "0") if Env.LOCAL_JOB_ID in env else env["SLURM_PROCID"]


def of_task(options: AgentOptions, env: Mapping[str, str]) -> dict[str, str]:
    """Return what a task of Slurm adds: torchrun's variables, for scripts that know nothing of Slurm.

    Raises:
        TopologyError: a variable that srun sets is missing, or is not a number.
    """
    v, names = Variables(env), ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    rank, local_rank, node = (v.integer(name) for name in names)
    if rank is None or local_rank is None or node is None:
        found = f"{v.shown(*names)}. This is no task of srun."
        raise TopologyError("Finding the place of a task:", found, "start ranks with cluster-ddp launch -- COMMAND")
    values = {"NODE_RANK": str(node)}
    if env.get(Env.CHANNEL, "").startswith(":"):  # in salloc
        values[Env.CHANNEL] = env.get("SLURM_LAUNCH_NODE_IPADDR", "") + env[Env.CHANNEL]
    if options.launcher == "srun":
        tasks = v.tasks_per_node() or (1,)
        here = tasks[node] if len(tasks) > node else tasks[0]
        values |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(here)}
    if options.function:
        values |= {"SUBMITIT_EXECUTOR": "slurm", **_SUBMITIT}
    return values


def _free_port(candidates: tuple[int, ...], host: str, start: int = 0) -> int:
    """The first candidate port on which nothing listens here; each start begins with another one.

    Each task of an array has a job id of its own, or a place in its job, so they never share one.
    """
    at = start % len(candidates)
    candidates = candidates[at:] + candidates[:at]
    for candidate in candidates:
        if not any(listens(address, candidate) for address in {_LOOPBACK, host}):
            return candidate
    raise RendezvousError(
        f"Choosing a rendezvous port on {host}:",
        f"all {len(candidates)} candidate ports are in use; the last is {candidates[-1]}.",
        f"submit again; if it repeats, see what listens there: ssh {host} ss -ltn",
    )


def listens(address: str, number: int) -> bool:
    """Whether something listens on a port of a host, which answers within a second."""
    try:
        socket.create_connection((address, number), timeout=1.0).close()
    except OSError:
        return False
    return True
