"""A packed task is a job of its own in a part of a job of Slurm's: its options, its environment, what differs.

In its environment, the job looks like the task's own. Its step has a part of it: `srun --exact` gives it these CPUs,
GPUs and this memory only, and waits until they are free (seen with 22.05 and 26.05: "step creation temporarily
disabled, retrying").
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster_ddp.agent import launch_options
from cluster_ddp.agent.job import job_log, launch_job, slurm_commands
from cluster_ddp.agent.job.pack.task_time_limit import TaskLimits
from cluster_ddp.agent.job.slurm_job import SlurmJob
from cluster_ddp.agent.job.start_loop import Starts
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.run.names import Env
from cluster_ddp.run.outcome import Outcome
from cluster_ddp.slurm import variables
from cluster_ddp.slurm.variables import Variables

_SHARED = ("SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_MEM_PER_NODE")
_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


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
        Env.SLURM_RESTARTS: str(Variables(env).requeues()),
        Env.PLACE_IN_JOB: str(task + 1),
    }


def options(asked: AgentOptions, env: Mapping[str, str]) -> AgentOptions:
    """Return the options of a task's agent.

    Args:
        asked: those of the job that holds it.
        env: the task's.
    """
    part = ["--exact", "--nodes=1"]
    part += [f"--gres=gpu:{env['SLURM_GPUS_ON_NODE']}"] if env.get("SLURM_GPUS_ON_NODE") else []
    part += [f"--mem={env['SLURM_MEM_PER_NODE']}M"] if env.get("SLURM_MEM_PER_NODE") else []
    of_job: dict[str, Any] = {"pack": None, "jobs": 1, "array": "", "cleanup": None, "stage_env": None}
    return replace(asked, **of_job, srun_options=(*part, *asked.srun_options))


class PackedJob(SlurmJob):
    """A packed task, from one start by the job that holds it to the next. That job is named by its label."""

    shares_nodes = True

    def __init__(self, holder: str, options: AgentOptions, env: Mapping[str, str]) -> None:
        super().__init__(options, env)
        self._holder = holder
        self._limits = TaskLimits(self.options, self.env, self.folder)

    def look(self, step: str, send: Callable[[signal.Signals], object], end: Callable[[], object]) -> float:
        """Look after the task's limits. See `BaseJob`."""
        return self._limits.look(step, send, end)

    def judged(self, ended: Outcome) -> Outcome:
        """Return how a start ended: if it was ended at a limit, that counts."""
        return self._limits.judged(ended)

    def why_unfinished(self, ended: Outcome) -> str:
        """Return why a requeue of the job that holds it runs it again: its parent, that job's agent, is gone."""
        if not self.is_over or ended.status == 0:
            return ""
        return f"The agent of job {self._holder} is gone: a requeue of that job runs this task again."

    def times_noted(self, path: Path) -> AbstractContextManager[None]:
        """Note the start of this task, and its own end. See `SlurmJob`."""
        return slurm_commands.times_noted(self._holder, self.env, path, self.options.time_limit_s)

    def start_again(self, why: str, starts: Starts) -> bool:
        """Leave the task to the next start of the job that holds it."""
        if why:
            job_log.say(f"{why}: it starts again when job {self._holder} is requeued.")
        return bool(why)


def run(holder: str, *words: str) -> int:
    """Run a packed task, whose environment is its own already. Returns its exit status. See `launch_job.run`.

    Args:
        holder: the label of the job that holds it.
        words: the task's options and command.
    """
    return launch_job.run(PackedJob(holder, launch_options.parse(words), os.environ))
