"""The table of Slurm's variable names, and typed access to their values.

Sources: srun(1) and sbatch(1), "OUTPUT ENVIRONMENT VARIABLES", 20.11 to 26.05.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from cluster_ddp.errors import TopologyError
from cluster_ddp.run.names import Env

# The step's own variable comes first: the job's variables differ from it if the step uses part of the job.
RANK = ("SLURM_PROCID",)
LOCAL_RANK = ("SLURM_LOCALID",)
NODE_RANK = ("SLURM_NODEID",)
WORLD_SIZE = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")
CLUSTER_NAME = ("SLURM_CLUSTER_NAME",)
JOB_NODELIST = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
JOB_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS")
JOB_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
ARRAY_JOB_ID = ("SLURM_ARRAY_JOB_ID",)
ARRAY_TASK_ID = ("SLURM_ARRAY_TASK_ID",)
RESTART_COUNT = (Env.START, "SLURM_RESTART_COUNT")  # Slurm's is unset before the first requeue, up to 26.05
CPUS_PER_TASK = ("SLURM_CPUS_PER_TASK",)
TRES_PER_TASK = ("SLURM_TRES_PER_TASK",)  # from 23.11 on; repeats the CPUs per task: "cpu=2", in 23.11 "cpu:2"
GPUS_ON_NODE = ("SLURM_GPUS_ON_NODE",)  # of the step, even if each task sees only one
DISTRIBUTION = ("SLURM_DISTRIBUTION",)
NTASKS_PER_NODE = ("SLURM_NTASKS_PER_NODE",)  # set only if that option was given
HET_SIZE = ("SLURM_HET_SIZE",)  # parts of a heterogeneous job
RANKS_ON_NODE = ("SLURM_GTIDS",)  # such as "2,3"
TASK_PID = ("SLURM_TASK_PID",)
CPUS_ON_NODE = ("SLURM_CPUS_ON_NODE",)  # of the step

# Step ids from this number on are steps that srun did not make (batch, extern, interactive …).
_SPECIAL_STEP_IDS = 0xFFFFFF00
_COUNT = r"(\d+)(?:\(x(\d+)\))?"


class Variables:
    """Typed access to an environment; an empty value counts as unset."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env

    def first(self, *names: str) -> str | None:
        """Return the first of `names` that is set, else None."""
        return next((name for name in names if self.env.get(name)), None)

    def text(self, *names: str) -> str | None:
        """Return the value of the first of `names` that is set, else None."""
        return self.env.get(self.first(*names) or "")

    def integer(self, *names: str) -> int | None:
        """Return the value of the first of `names` that is set, as an integer of 0 or more, else None.

        Raises:
            TopologyError: the value is not such an integer.
        """
        name = self.first(*names)
        if name is not None and not re.fullmatch(r"\d+", self.env[name].strip()):
            found = f"{self.shown(name)} is not a whole number of 0 or more."
            raise TopologyError(f"Reading {name}:", found, f"find what sets it: env | grep {name}")
        return None if name is None else int(self.env[name])

    def shown(self, *names: str) -> str:
        """Return `names` with their values, for an error: "RANK=0, WORLD_SIZE unset"."""
        return ", ".join(f"{name}={self.env[name]}" if self.env.get(name) else f"{name} unset" for name in names)

    def requeues(self) -> int:
        """Return how often Slurm has started the job again. See `integer` for errors."""
        return self.integer("SLURM_RESTART_COUNT") or 0  # unset at first; 0 from Slurm 26.11 on

    def step_id(self) -> int | None:
        """Return the id of the step that srun made; None in the batch shell (unset on 22.05, -5 on 26.11)."""
        text = self.text(*STEP_ID) or ""
        return int(text) if text.isdigit() and int(text) < _SPECIAL_STEP_IDS else None

    def gpus_per_task(self) -> int:
        """Return how many GPUs each rank drives. See `integer` for errors."""
        return self.integer(Env.GPUS_PER_TASK) or 1

    def job_label(self) -> str:
        """Return the job's label; see `job_label`. In a chain of jobs, it is the array's id."""
        job = self.text(Env.CHAIN, *JOB_ID, Env.LOCAL_JOB_ID)
        return job_label(job, self.text(*ARRAY_JOB_ID), self.text(*ARRAY_TASK_ID))

    def job_tasks(self) -> tuple[int, ...]:
        """Return the number of tasks that the job has on each of its nodes, in its batch script or in salloc's shell.

        With --ntasks, --ntasks-per-node is a maximum (sbatch(1)): then SLURM_NTASKS_PER_NODE is only what was asked,
        and SLURM_TASKS_PER_NODE repeats it (22.05). Without either, SLURM_NTASKS is unset. A job that was submitted
        from within another one may have that one's variables, too.

        Raises:
            TopologyError: the job has fewer places than tasks; or a value can't be read.
        """
        nodes = self.integer(*JOB_NODES) or 1
        tasks, places = self.integer(*JOB_TASKS), self.tasks_per_node()
        if tasks is None:
            return (self.integer(*NTASKS_PER_NODE) or 1,) * nodes
        if tasks == sum(places):
            return places
        if places and tasks > sum(places) and not self.text("SLURM_OVERCOMMIT"):
            found = f"{self.shown(*JOB_TASKS[:1], *TASKS_PER_NODE[1:])}: they contradict each other."
            hint = "one is of another job around this one: unset it in the script, or say how many: --ranks-per-node N"
            raise TopologyError("Counting the tasks of the job:", found, hint)
        return tuple(tasks // nodes + (node < tasks % nodes) for node in range(nodes))

    def tasks_per_node(self) -> tuple[int, ...]:
        """Return the number of tasks on each node, none if unset: "2(x3),1" gives (2, 2, 2, 1).

        Raises:
            TopologyError: the value can't be read.
        """
        text = self.text(*TASKS_PER_NODE) or ""
        if text and not re.fullmatch(f"{_COUNT}(,{_COUNT})*", text):
            found = f"{self.shown(*TASKS_PER_NODE)}: that is no list of counts such as 2 or 2(x3)."
            raise TopologyError("Reading the tasks per node:", found, "find what sets it: env | grep TASKS_PER_NODE")
        return tuple(int(count) for count, times in re.findall(_COUNT, text) for _ in range(int(times or 1)))


def place_in_job(env: Mapping[str, str]) -> int:
    """Return what a job's ports differ by from those of others of ours in the same job of Slurm; 0 without others."""
    return Variables(env).integer(Env.PLACE_IN_JOB) or 0


def job_label(job: int | str | None, array: int | str | None, task: int | str | None) -> str:
    """Return a job as squeue shows it: "12", or "12_3" for a task of an array; empty outside a job."""
    if array is not None and task is not None:
        return f"{array}_{task}"
    return "" if job is None else str(job)


def node_name(env: Mapping[str, str]) -> str:
    """Return the name of this node as Slurm has it; outside of a job, the host's short name.

    A host's own name may have a domain, which the node's name lacks.
    """
    return env.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
