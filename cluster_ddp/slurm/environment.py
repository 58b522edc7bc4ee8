"""Read a process's rank and world from the variables of each launcher.

Each launcher has one reader; `read` chooses it. Facts about Slurm's variables are in `variables`. Preset MASTER_ADDR
and MASTER_PORT win. If there may be several nodes, localhost is never used: each node would make a world of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from cluster_ddp.errors import TopologyError, counted
from cluster_ddp.run.names import Env
from cluster_ddp.slurm import hostlist, port, variables
from cluster_ddp.slurm.variables import Variables

TORCH_DEFAULT_PORT = 29500
_TORCHS_PORTS: tuple[int, ...] = (TORCH_DEFAULT_PORT,)

Launcher = Literal["slurm", "torchrun", "manual", "submitit-local", "single"]

Fields = dict[str, Any]
"""Fields of `topology.Topology` by name; unknown ones are left out."""


def read(env: Mapping[str, str]) -> Fields:
    """Return the fields of `Topology` that an environment describes; see `Topology.from_environ` for errors."""
    v = Variables(env)
    return {**_reader(v)(v), "gpus_per_task": v.gpus_per_task()}


def _reader(v: Variables) -> Callable[[Variables], Fields]:
    if v.text("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in v.env:
        return _submitit_local
    if "TORCHELASTIC_RUN_ID" in v.env:
        return _torchrun
    is_hand_set = v.text("RANK") is not None and v.text("WORLD_SIZE") is not None
    rank = v.integer(*variables.RANK)  # the batch shell has it, too, as 0, but always with a local rank
    if rank is not None and (v.step_id() is not None or rank > 0 or v.text(*variables.LOCAL_RANK) is None):
        # In a step of srun. Its tasks may start their own ranks: then the world has another size than the step.
        is_hand_set = is_hand_set and v.integer("WORLD_SIZE") != v.integer(*variables.WORLD_SIZE)
        return _hand_set if is_hand_set else _slurm_step
    if is_hand_set:
        return _hand_set
    if v.text(*variables.JOB_ID) is not None:
        return _slurm_without_step
    if v.text("RANK", "WORLD_SIZE") is not None:
        return _hand_set  # which says what is missing
    return lambda v: {"launcher": "single", **_alone(v, _TORCHS_PORTS)}


def _slurm_step(v: Variables) -> Fields:
    """A task of srun. A container may have removed some of its variables."""
    rank, world_size = v.integer(*variables.RANK), v.integer(*variables.WORLD_SIZE)
    assert rank is not None
    if world_size is None:
        asked, found = "Finding the number of ranks of this step:", v.shown("SLURM_PROCID", *variables.WORLD_SIZE)
        hint = "pass Slurm's variables into the container, or export WORLD_SIZE, RANK, LOCAL_RANK and MASTER_ADDR"
        raise TopologyError(asked, f"{found}.", hint)
    _check_inherited(v)
    nodes, gpus = hostlist.of_variable(v, *variables.NODELIST), v.integer(*variables.GPUS_ON_NODE)
    tasks = v.tasks_per_node()
    if sum(tasks) != world_size:  # the job's, not the step's
        tasks = ()
    by_gpus = (gpus or 0) // v.gpus_per_task() or None  # ranks on each node, if all GPUs are driven
    num_nodes = len(nodes) or v.integer(*variables.NUM_NODES) or len(tasks) or None
    if num_nodes is None:
        num_nodes = 1 if world_size == 1 else by_gpus and math.ceil(world_size / by_gpus)
    node_rank = v.integer(*variables.NODE_RANK)
    if node_rank is None:  # removed: block distribution over equal nodes
        node_rank = rank // by_gpus if by_gpus else 0 if num_nodes == 1 else None
    local_world_size = world_size if num_nodes == 1 else by_gpus
    if tasks and node_rank is not None:
        local_world_size = tasks[min(node_rank, len(tasks) - 1)]
    local_rank = _local_rank(v, rank, by_gpus, tasks)
    _check_gpus(v, local_world_size)
    job_id, step_id = v.integer(*variables.JOB_ID) or 0, v.step_id() or 0
    ports = port.candidates(job_id, step_id), port.candidates(job_id, variables.place_in_job(v.env))
    return {
        **{"launcher": "slurm", "rank": rank, "local_rank": local_rank, "node_rank": node_rank, "step_id": step_id},
        **{"world_size": world_size, "local_world_size": local_world_size, "tasks_per_node": tasks},
        **{"nodes": nodes, "num_nodes": num_nodes, "gpus_on_node": gpus},
        **{"master_addr": address(v, nodes, num_nodes), "port_candidates": _ports(v, *ports)},
        **_job(v),
    }


def _slurm_without_step(v: Variables) -> Fields:
    """In the shell of sbatch or salloc: correct for one task only. With several tasks, this process would hang."""
    tasks = v.integer(*variables.JOB_TASKS) or sum(v.job_tasks())
    if tasks > 1:
        shown = v.shown("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_STEP_ID")
        found = f"{shown}: the job has {tasks} tasks, and this one process would wait forever for the others."
        hint = "start it with srun, which starts all tasks: srun python …"
        raise TopologyError(f"Starting rank 0 of {tasks} without srun:", found, hint)
    nodes = hostlist.of_variable(v, *variables.JOB_NODELIST)
    of_slurm = {"launcher": "slurm", "nodes": nodes, "tasks_per_node": (1,) if nodes else ()}
    ports = port.candidates(v.integer(*variables.JOB_ID) or 0)
    return {**of_slurm, **_alone(v, ports), "gpus_on_node": v.integer(*variables.GPUS_ON_NODE), **_job(v)}


def _torchrun(v: Variables) -> Fields:
    """A worker of torchrun's agent. Its agent may serve a store of its own on MASTER_PORT, for all its restarts."""
    fields, agent_restarts = _hand_set(v), v.integer("TORCHELASTIC_RESTART_COUNT") or 0
    fields |= {"launcher": "torchrun", "agent_restarts": agent_restarts}
    fields["restart_count"] += agent_restarts
    if (cpus := fields["cpus_per_task"]) is not None:  # those of the agent's task
        fields["cpus_per_task"] = max(1, cpus // (fields["local_world_size"] or 1))
    if v.text("TORCHELASTIC_USE_AGENT_STORE") == "True":
        fields["port_candidates"] = port.candidates(fields["port_candidates"][0])
    return fields


def _hand_set(v: Variables) -> Fields:
    """RANK, WORLD_SIZE, LOCAL_RANK in the environment: the user's own, or torchrun's."""
    rank, world_size, local_rank = v.integer("RANK"), v.integer("WORLD_SIZE"), v.integer("LOCAL_RANK")
    if rank is None or world_size is None or (local_rank is None and world_size > 1):
        asked, found = "Taking RANK, WORLD_SIZE and LOCAL_RANK from the environment:", "all three are needed."
        hint = "set all three, or unset all (for one process), or start with srun or torchrun, which set them"
        raise TopologyError(asked, f"{v.shown('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}: {found}", hint)
    local_world_size = v.integer("LOCAL_WORLD_SIZE") or (1 if world_size == 1 else None)
    num_nodes = world_size // local_world_size if local_world_size and world_size % local_world_size == 0 else None
    node_rank = v.integer("GROUP_RANK", "NODE_RANK")
    job, ports = _job(v), _TORCHS_PORTS
    if job["job_id"] is None and (local_job_id := v.integer(Env.LOCAL_JOB_ID)) is not None:
        job |= {"job_id": local_job_id, "is_local": True}
        ports = port.candidates(local_job_id)
    return {
        **{"launcher": "manual", "rank": rank, "local_rank": local_rank or 0, "world_size": world_size},
        **{"local_world_size": local_world_size, "num_nodes": num_nodes},
        "node_rank": 0 if node_rank is None and num_nodes == 1 else node_rank,
        **{"master_addr": address(v, (), num_nodes), "port_candidates": _ports(v, ports)},
        **job,
    }


def _submitit_local(v: Variables) -> Fields:
    """submitit's LocalExecutor: all tasks on this machine."""
    names = ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS")
    rank, local_rank, tasks = (v.integer(name) for name in names)
    if rank is None or local_rank is None or tasks is None:
        asked = "Finding this process's place under submitit's local executor:"
        raise TopologyError(asked, f"{v.shown(*names)}.", "submit it with submitit, or unset SUBMITIT_EXECUTOR")
    job_id = v.integer("SUBMITIT_LOCAL_JOB_ID") or 0
    ranks = {"rank": rank, "local_rank": local_rank, "world_size": tasks, "local_world_size": tasks}
    job = {"job_id": job_id, "is_local": True, "restart_count": v.integer(*variables.RESTART_COUNT) or 0}
    return {"launcher": "submitit-local", **_alone(v, port.candidates(job_id)), **ranks, **job}


def _alone(v: Variables, ports: tuple[int, ...]) -> Fields:
    """A single process on a single node."""
    return {
        **{"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "node_rank": 0, "num_nodes": 1},
        **{"master_addr": address(v, (), 1), "port_candidates": _ports(v, ports)},
    }


def _job(v: Variables) -> Fields:
    return {
        "job_id": v.integer(*variables.JOB_ID),
        "chain_id": v.integer(Env.CHAIN),
        "array_job_id": v.integer(*variables.ARRAY_JOB_ID),
        "array_task_id": v.integer(*variables.ARRAY_TASK_ID),
        "restart_count": v.integer(*variables.RESTART_COUNT) or 0,
        "start_id": v.integer(Env.START_ID),
        "cpus_per_task": v.integer(*variables.CPUS_PER_TASK),
    }


def _local_rank(v: Variables, rank: int, ranks_on_node: int | None, tasks: tuple[int, ...]) -> int:
    """SLURM_LOCALID; if a container removed it, derived for block distribution over equal nodes only."""
    local_rank = v.integer(*variables.LOCAL_RANK)
    if local_rank is not None:
        return local_rank
    is_block = (v.text(*variables.DISTRIBUTION) or "block").startswith("block")
    if ranks_on_node and is_block and len(set(tasks)) <= 1:
        return rank % ranks_on_node
    shown = v.shown("SLURM_LOCALID", "SLURM_GPUS_ON_NODE", "SLURM_DISTRIBUTION", *variables.TASKS_PER_NODE[:1])
    found = f"{shown}: deriving it needs SLURM_GPUS_ON_NODE, block distribution and equal nodes."
    raise TopologyError("Finding this process's local rank:", found, "pass SLURM_LOCALID into the container")


def _check_inherited(v: Variables) -> None:
    """Refuse RANK or WORLD_SIZE exported in the batch shell: every task would have the same value."""
    of_task = {"RANK": variables.RANK, "WORLD_SIZE": variables.WORLD_SIZE, "LOCAL_RANK": variables.LOCAL_RANK}
    for name, theirs in of_task.items():
        preset, ours = v.integer(name), v.integer(*theirs)
        if None not in (preset, ours) and preset != ours:
            found = f"{v.shown(name, theirs[0])}, which contradict each other."
            found += f" A batch script that exports {name} gives every task the same value."
            hint = f"remove 'export {name}=…' from the batch script (or unset {name} before srun)"
            raise TopologyError("Finding the rank of this task:", found, hint)


def _check_gpus(v: Variables, local_world_size: int | None) -> None:
    gpus, each = v.integer(*variables.GPUS_ON_NODE), v.gpus_per_task()
    if not gpus or local_world_size is None or local_world_size * each == gpus:
        return
    more, fitting = "more" if local_world_size * each > gpus else "fewer", gpus // each or 1
    shown = v.shown("SLURM_GPUS_ON_NODE", *variables.TASKS_PER_NODE[:1], "SLURM_NTASKS", Env.GPUS_PER_TASK)
    hint = f"ask for tasks that fit the GPUs: --ntasks-per-node={fitting} --gres=gpu:{fitting * each}"
    if more == "fewer" and gpus % local_world_size == 0:
        hint += f"; for a model over several GPUs: export {Env.GPUS_PER_TASK}={gpus // local_world_size}"
    asked = f"Running {local_world_size} tasks on this node, {counted(each, 'GPU')} each:"
    raise TopologyError(asked, f"{shown}: {more} tasks than GPUs for them.", hint)


def address(v: Variables, nodes: Sequence[str], num_nodes: int | None) -> str:
    """Return MASTER_ADDR if preset, else the first of the step's nodes, on which rank 0 runs.

    Raises:
        TopologyError: no node is known, and there may be several; or MASTER_ADDR is a node of the job on which rank 0
            of this step does not run.
    """
    preset = v.text("MASTER_ADDR")
    if preset is None and not nodes and num_nodes != 1:
        shown = v.shown("MASTER_ADDR", "SLURM_STEP_NODELIST", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        found = f"{shown}: the ranks may be on several nodes, and no node is named."
        hint = "export MASTER_ADDR=<host of rank 0>, or, if all ranks are on this node, LOCAL_WORLD_SIZE=$WORLD_SIZE"
        raise TopologyError("Finding the host of rank 0:", found, hint)
    if preset and nodes and preset != nodes[0] and preset in hostlist.of_variable(v, *variables.JOB_NODELIST):
        found = f"{v.shown('MASTER_ADDR', 'SLURM_STEP_NODELIST')}: rank 0 of this step runs on {nodes[0]}."
        hint = "unset MASTER_ADDR MASTER_PORT before an srun on part of the job's nodes"
        raise TopologyError(f"Meeting rank 0 on {preset}:", found, hint)
    return preset or (nodes[0] if nodes else "127.0.0.1")


def _ports(v: Variables, *own: tuple[int, ...]) -> tuple[int, ...]:
    """The ports to try: the first of `own`, or MASTER_PORT alone if it is preset to another port.

    A preset port that is in one of `own` is the free one that a batch script found. It then comes first, and the others
    of its tuple follow. A batch script does not know the step id, so its candidates are others.
    """
    preset = v.integer("MASTER_PORT")
    if preset is None:
        return own[0]
    if not 1 <= preset <= 65535:
        found = f"{v.shown('MASTER_PORT')} is not a TCP port (1 to 65535)."
        raise TopologyError("Reading MASTER_PORT:", found, "unset MASTER_PORT; a free port is then chosen")
    walk = next((walk for walk in own if preset in walk), (preset,))
    start = walk.index(preset)
    return walk[start:] + walk[:start]
