"""Read a process's rank and world from the variables of each launcher.

Each launcher has one reader; `read` chooses it. Facts about Slurm's variables are in `variables`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cluster_ddp.errors import TopologyError
from cluster_ddp.slurm import endpoint, port, variables
from cluster_ddp.slurm.variables import Variables

TORCH_DEFAULT_PORT = 29500

Launcher = Literal["slurm", "torchrun", "manual", "submitit-local", "single"]

Fields = dict[str, Any]
"""Fields of `topology.Topology` by name; unknown ones are left out."""


def read(env: Mapping[str, str]) -> Fields:
    """Return the fields of `Topology` that an environment describes; see `Topology.from_environ` for errors."""
    v = Variables(env)
    return {**_place(v, env), "gpus_per_task": v.gpus_per_task()}


def _place(v: Variables, env: Mapping[str, str]) -> Fields:
    if env.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in env:
        return _submitit_local(v)
    if "TORCHELASTIC_RUN_ID" in env:
        return _torchrun(v)
    if _in_step(v):
        return _hand_set(v) if _has_launcher_of_its_own(v) else _slurm_step(v)
    if env.get("RANK") and env.get("WORLD_SIZE"):
        return _hand_set(v)
    if v.text(*variables.JOB_ID) is not None:
        return _slurm_without_step(v)
    if env.get("RANK") or env.get("WORLD_SIZE"):
        raise _partial(v)
    return {"launcher": "single", **_alone(v, (TORCH_DEFAULT_PORT,))}


def _in_step(v: Variables) -> bool:
    """Whether srun started this process. The batch shell has SLURM_PROCID=0, too, but always with SLURM_LOCALID."""
    rank = v.integer(*variables.RANK)
    return rank is not None and (v.step_id() is not None or rank > 0 or v.text(*variables.LOCAL_RANK) is None)


def _has_launcher_of_its_own(v: Variables) -> bool:
    """Whether the step's tasks start their own ranks: RANK and WORLD_SIZE are set, for another size than the step's."""
    world_size = v.integer("WORLD_SIZE")
    return None not in (v.text("RANK"), world_size) and world_size != v.integer(*variables.WORLD_SIZE)


def _slurm_step(v: Variables) -> Fields:
    rank, world_size = v.integer(*variables.RANK), v.integer(*variables.WORLD_SIZE)
    assert rank is not None
    if world_size is None:
        asked, found = "Finding the number of ranks of this step:", v.shown("SLURM_PROCID", *variables.WORLD_SIZE)
        hint = "pass Slurm's variables into the container, or export WORLD_SIZE, RANK, LOCAL_RANK and MASTER_ADDR"
        raise TopologyError(asked, f"{found}.", hint)
    _check_inherited(v, rank, world_size)
    gpus_are_for = (v.integer(*variables.GPUS_ON_NODE) or 0) // v.gpus_per_task() or None  # so many ranks
    tasks = v.tasks_per_node() or ()
    if sum(tasks) != world_size:  # the job's, not the step's: the container kept only those
        tasks = ()
    local_rank = _local_rank(v, rank, gpus_are_for, tasks)
    nodes = endpoint.node_names(v, variables.NODELIST)
    num_nodes = len(nodes) or v.integer(*variables.NUM_NODES) or len(tasks) or (1 if world_size == 1 else None)
    if num_nodes is None and gpus_are_for:
        num_nodes = -(-world_size // gpus_are_for)
    node_rank = v.integer(*variables.NODE_RANK)
    if node_rank is None:  # a container removed it: block distribution over equal nodes
        node_rank = rank // gpus_are_for if gpus_are_for else 0 if num_nodes == 1 else None
    local_world_size = world_size if num_nodes == 1 else gpus_are_for
    if tasks and node_rank is not None:
        local_world_size = tasks[min(node_rank, len(tasks) - 1)]
    _check_gpus(v, local_world_size)
    job_id, step_id = v.integer(*variables.JOB_ID) or 0, v.step_id() or 0
    ports = port.candidates(job_id, step_id), port.candidates(job_id, variables.place_in_job(v.env))
    return {
        **{"launcher": "slurm", "rank": rank, "local_rank": local_rank, "node_rank": node_rank, "step_id": step_id},
        **{"world_size": world_size, "local_world_size": local_world_size, "tasks_per_node": tasks},
        **{"nodes": nodes, "num_nodes": num_nodes, "gpus_on_node": v.integer(*variables.GPUS_ON_NODE)},
        "master_addr": endpoint.step_address(v, nodes, num_nodes),
        "port_candidates": endpoint.port_candidates(v, *ports),
        **_job(v),
    }


def _slurm_without_step(v: Variables) -> Fields:
    """In the shell of sbatch or salloc: correct for one task only. With several tasks, this process would hang."""
    # With --ntasks-per-node alone, some versions leave SLURM_NTASKS unset.
    per_node = v.integer("SLURM_NTASKS_PER_NODE") or 1
    tasks = v.integer(*variables.JOB_TASKS) or per_node * (v.integer(*variables.JOB_NODES) or 1)
    if tasks > 1:
        shown = v.shown("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_STEP_ID")
        found = f"{shown}: the job has {tasks} tasks, and this one process would wait forever for the others."
        hint = "start it with srun, which starts all tasks: srun python …"
        raise TopologyError(f"Starting rank 0 of {tasks} without srun:", found, hint)
    nodes = endpoint.node_names(v, variables.JOB_NODELIST)
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
        raise _partial(v)
    local_world_size = v.integer("LOCAL_WORLD_SIZE") or (1 if world_size == 1 else None)
    is_even = local_world_size is not None and world_size % local_world_size == 0
    num_nodes = world_size // local_world_size if local_world_size and is_even else None
    node_rank = v.integer("GROUP_RANK", "NODE_RANK")
    job = _job(v)
    ports: tuple[int, ...] = (TORCH_DEFAULT_PORT,)
    if job["job_id"] is None and (local_job_id := v.integer(*variables.LOCAL_JOB_ID)) is not None:
        job["job_id"], ports = local_job_id, port.candidates(local_job_id)
    return {
        **{"launcher": "manual", "rank": rank, "local_rank": local_rank or 0, "world_size": world_size},
        **{"local_world_size": local_world_size, "num_nodes": num_nodes},
        "node_rank": 0 if node_rank is None and num_nodes == 1 else node_rank,
        "master_addr": endpoint.hand_set_address(v, several_nodes=num_nodes != 1),
        "port_candidates": endpoint.port_candidates(v, ports),
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
    job = {"job_id": job_id, "restart_count": v.integer(*variables.RESTART_COUNT) or 0}
    return {"launcher": "submitit-local", **_alone(v, port.candidates(job_id)), **ranks, **job}


def _alone(v: Variables, ports: tuple[int, ...]) -> Fields:
    """A single process on a single node."""
    return {
        **{"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "node_rank": 0, "num_nodes": 1},
        "master_addr": v.text("MASTER_ADDR") or endpoint.LOCALHOST,
        "port_candidates": endpoint.port_candidates(v, ports),
    }


def _job(v: Variables) -> Fields:
    return {
        "job_id": v.integer(*variables.JOB_ID),
        "chain_id": v.integer(*variables.CHAIN),
        "array_job_id": v.integer(*variables.ARRAY_JOB_ID),
        "array_task_id": v.integer(*variables.ARRAY_TASK_ID),
        "restart_count": v.integer(*variables.RESTART_COUNT) or 0,
        "cpus_per_task": v.integer(*variables.CPUS_PER_TASK),
        "end_time": v.integer(*variables.END_TIME),
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


def _check_inherited(v: Variables, rank: int, world_size: int) -> None:
    """Refuse RANK or WORLD_SIZE exported in the batch shell: every task would have the same value."""
    for name, ours, theirs in (
        ("RANK", rank, "SLURM_PROCID"),
        ("WORLD_SIZE", world_size, "SLURM_STEP_NUM_TASKS"),
        ("LOCAL_RANK", v.integer(*variables.LOCAL_RANK), "SLURM_LOCALID"),
    ):
        preset = v.integer(name)
        if None not in (preset, ours) and preset != ours:
            found = f"{v.shown(name, theirs)}, which contradict each other."
            found += f" A batch script that exports {name} gives every task the same value."
            hint = f"remove 'export {name}=…' from the batch script (or unset {name} before srun)"
            raise TopologyError("Finding the rank of this task:", found, hint)


def _check_gpus(v: Variables, local_world_size: int | None) -> None:
    gpus, each = v.integer(*variables.GPUS_ON_NODE), v.gpus_per_task()
    if not gpus or local_world_size is None or local_world_size * each == gpus:
        return
    shown = v.shown("SLURM_GPUS_ON_NODE", *variables.TASKS_PER_NODE[:1], "SLURM_NTASKS")
    if each > 1:
        asked, needed = f"{each} GPUs each", each * local_world_size
        found = f"{shown}, {v.shown(*variables.GPUS_PER_TASK)}: that needs {needed} GPUs."
        hint = f"--ntasks-per-node={local_world_size} --gres=gpu:{needed}"
    else:
        asked, more = "one GPU each", "more" if local_world_size > gpus else "fewer"
        found = f"{shown}: {more} tasks than GPUs."
        hint = f"ask for as many tasks as GPUs: --ntasks-per-node={gpus} --gres=gpu:{gpus}"
        if gpus % local_world_size == 0:
            hint += f"; for a model over several GPUs: export {variables.GPUS_PER_TASK[0]}={gpus // local_world_size}"
    raise TopologyError(f"Running {local_world_size} tasks on this node, {asked}:", found, hint)


def _partial(v: Variables) -> TopologyError:
    asked, found = "Taking RANK, WORLD_SIZE and LOCAL_RANK from the environment:", "all three are needed."
    hint = "set all three, or unset all (for one process), or start with srun or torchrun, which set them"
    return TopologyError(asked, f"{v.shown('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}: {found}", hint)
