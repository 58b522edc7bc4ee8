"""What a job's shell does not know, or knows of another job.

A shell of salloc runs on a login node, and knows no node and no GPUs. Where salloc starts it on the first node
(LaunchParameters=use_interactive_step), nothing is missing. A job that another job has submitted inherits what that
one is in its array, how often it was restarted, its step, and what we have set for its ranks: Slurm replaces a variable
only if the new job has it, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cluster_ddp.agent.job import slurm_commands
from cluster_ddp.errors import SpecError
from cluster_ddp.run.names import OF_A_JOB, Env
from cluster_ddp.slurm import variables
from cluster_ddp.slurm.variables import Variables

_NODE = "SLURMD_NODENAME"
_GPUS = "SLURM_GPUS_ON_NODE"
_ARRAY, _TASK, _RESTARTS = "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"
# Of ranks: a new rank would take them for its own.
_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "SUBMITIT_")
_NAMES = frozenset(
    [
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", *OF_A_JOB),
    ]
)
# Of a job or a step. sbatch and srun read many of them as options (sbatch(1), INPUT ENVIRONMENT VARIABLES).
_SLURMS = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_")
_KEPT = ("SLURM_CONF", "SLURM_JWT")
# Slurm sets these in a job. Outside a job they are the user's own.
_GPUS_OF_A_JOB = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Options of srun that sbatch sets where the job has them, and what `scontrol show job` calls them. srun refuses two
# kinds of memory, and GPUs that the job has not. A job of the same kind has set the variable anew.
_MEMORY = {
    "SLURM_MEM_PER_CPU": "MinMemoryCPU",
    "SLURM_MEM_PER_NODE": "MinMemoryNode",
    "SLURM_MEM_PER_GPU": "MemPerTres",
}
_GPUS_REQUESTED = {
    **{"SLURM_GPUS": "TresPerJob", "SLURM_GPUS_PER_NODE": "TresPerNode", "SLURM_GPUS_PER_SOCKET": "TresPerSocket"},
    **{"SLURM_GPUS_PER_TASK": "TresPerTask", "SLURM_TRES_PER_TASK": "TresPerTask"},  # 22.05; 26.05
    **{"SLURM_NTASKS_PER_GPU": "NtasksPerTRES"},
}
# Of a step; by the second, a step of srun binds its tasks to CPUs that another job may not have.
_OF_A_STEP = ("SLURM_STEP", "SLURM_CPU_BIND")


def completed(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job's shell with what a batch script has: the first node's name, the GPUs of a node.

    Raises:
        SpecError: Slurm does not name the nodes of the job.
    """
    if _NODE in env:
        return dict(env)
    if not (nodes := slurm_commands.hostnames(env)):
        found = f"scontrol show hostnames {env.get('SLURM_JOB_NODELIST', '')} names no node."
        raise SpecError(f"Finding the first node of job {env['SLURM_JOB_ID']}:", found, "in salloc, or sbatch SCRIPT")
    more = {_NODE: nodes[0]}
    shown = slurm_commands.ask(["scontrol", "show", "job", env["SLURM_JOB_ID"]], env)
    gpus = _gpus_per_node(shown.words)
    return {**env, **more, **({_GPUS: gpus} if gpus and _GPUS not in env else {})}


def own(env: Mapping[str, str]) -> dict[str, str]:
    """Return a shell's environment without what is another job's. Where Slurm does not answer, it stays as it is."""
    if Env.SECRET in env:  # a rank of a job of ours has submitted this one, or starts ranks itself
        env = {name: value for name, value in env.items() if not is_of_ranks(name)}
    if "SLURM_JOB_ID" not in env:
        return dict(env)
    if "SLURM_STEP_NODELIST" in env and not _is_in_step(env):
        env = {name: value for name, value in env.items() if not name.startswith(_OF_A_STEP)}
    return _in_own_array(_without_requests(env))


def _without_requests(env: Mapping[str, str]) -> Mapping[str, str]:
    """An environment without requests that this job has not made. Without them a step has all that the job has."""
    if len(_MEMORY.keys() & env.keys()) < 2 and not _GPUS_REQUESTED.keys() & env.keys():
        return env
    answer = slurm_commands.ask(["scontrol", "show", "job", env["SLURM_JOB_ID"]], env)
    made = set(re.findall(r"(?<!\S)(\w+)=(?!0?(?:\s|$))", answer.words))
    others = {name for name, field in {**_MEMORY, **_GPUS_REQUESTED}.items() if field not in made}
    per_node = env.get("SLURM_GPUS_PER_NODE", "")
    if _gpus_per_node(answer.words) != per_node.rpartition(":")[2]:  # --gres has asked for others
        others.add("SLURM_GPUS_PER_NODE")
    return {name: value for name, value in env.items() if not answer.is_ok or name not in others}


def _gpus_per_node(shown: str) -> str | None:
    """The number of GPUs on each node that a job has asked for, as `scontrol show job` shows it."""
    kind = r"(?::[^:=,\s]+)?"
    found = re.search(rf"\bTresPerNode=\S*?gpu(?:{kind}[:=](\d+)|{kind})(?=[,\s]|$)", shown)
    return (found[1] or "1") if found else None


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a new job inherits: this shell's, without the variables of a job around it."""
    gpus = _GPUS_OF_A_JOB if "SLURM_JOB_ID" in env else ()
    of_a_job = {name for name in env if name.startswith(_SLURMS) or is_of_ranks(name) or name in gpus}
    return {name: value for name, value in env.items() if name in _KEPT or name not in of_a_job}


def is_of_ranks(name: str) -> bool:
    """Whether a variable is that of a rank, or is set for one by a job of ours."""
    return name in _NAMES or name.startswith(_PREFIXES)


def _is_in_step(env: Mapping[str, str]) -> bool:
    """Whether srun has started this process. A batch script inherits a step's variables (up to 24.11 its id, too)."""
    v = Variables(env)
    if v.step_id() is None:
        return False
    answer = slurm_commands.ask(["scontrol", "listpids", env["SLURM_JOB_ID"]], env)
    rows = (line.split() for line in answer.words.splitlines())
    steps = [row[2] for row in rows if len(row) > 2 and row[0] == v.text(*variables.TASK_PID)]
    return steps != ["batch"]


def _in_own_array(env: Mapping[str, str]) -> dict[str, str]:
    """An environment whose array and restarts are this job's own."""
    if not env.keys() & {_ARRAY, _RESTARTS}:
        return dict(env)
    form = "JobID:20,ArrayJobID:20,ArrayTaskID:200,RestartCnt:20"
    answer = slurm_commands.ask(["squeue", "--noheader", f"--jobs={env['SLURM_JOB_ID']}", f"--Format={form}"], env)
    for line in answer.words.splitlines() if answer.is_ok else ():
        job, array, task, restarts = (line.split() + [""] * 4)[:4]
        if job == env["SLURM_JOB_ID"] and restarts.isdigit():
            in_array = {_ARRAY: array, _TASK: task} if task.isdigit() else {}
            kept = {name: value for name, value in env.items() if in_array or not name.startswith("SLURM_ARRAY_")}
            return {**kept, **in_array, _RESTARTS: restarts}
    return dict(env)
