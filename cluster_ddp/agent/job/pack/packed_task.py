"""What the agent of a packed task gets: its options, and an environment in which the job looks like the task's own.

Its step has a part of the job: `srun --exact` gives it these CPUs, GPUs and this memory only, and waits until they are
free (seen with 22.05 and 26.05: "step creation temporarily disabled, retrying").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster_ddp.agent.launch_options import Options
from cluster_ddp.slurm import variables
from cluster_ddp.slurm.variables import Variables

_SHARED = ("SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_MEM_PER_NODE")
_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def share(tasks: Sequence[int], jobs: int, job: int) -> list[int]:
    """Return the tasks that one of several jobs holds: task number `job` of the list, and every `jobs`-th after it."""
    return [*tasks[job::jobs]]


def environment(env: Mapping[str, str], pack: int, tasks: Sequence[int], task: int, restarts: int) -> dict[str, str]:
    """Return the environment of a task's agent, made from that of the job which holds it.

    Args:
        env: of the job.
        pack: how many tasks it runs at a time.
        tasks: the numbers of all tasks of the array.
        task: the number of this one.
        restarts: how often it was started before.
    """
    ranks = (Variables(env).integer(*variables.NTASKS_PER_NODE) or pack) // pack
    shares = {name: str(int(env[name]) // pack) for name in _SHARED if env.get(name, "").isdigit()}
    array = {"ID": task, "COUNT": len(tasks), "MIN": tasks[0], "MAX": tasks[-1]}
    return {
        **{name: value for name, value in env.items() if name != "SLURM_ARRAY_TASK_STEP"},
        **dict.fromkeys(_TASKS, str(ranks)),
        **shares,
        **{f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in array.items()},
        "SLURM_RESTART_COUNT": str(restarts),
    }


def options(asked: Options, env: Mapping[str, str], job: str) -> Options:
    """Return the options of a task's agent.

    Args:
        asked: those of the job that holds it.
        env: the task's.
        job: the label of the job.
    """
    part = ["--exact", "--nodes=1"]
    part += [f"--gres=gpu:{env['SLURM_GPUS_ON_NODE']}"] if env.get("SLURM_GPUS_ON_NODE") else []
    part += [f"--mem={env['SLURM_MEM_PER_NODE']}M"] if env.get("SLURM_MEM_PER_NODE") else []
    of_job = {"pack": None, "jobs": 1, "array": "", "cleanup": None, "stage_env": None}
    return asked._replace(**of_job, packed=job, srun_options=(*part, *asked.srun_options))  # type: ignore[arg-type]
