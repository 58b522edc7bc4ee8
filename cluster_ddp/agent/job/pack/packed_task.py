"""A packed task: its options and environment, in which the job looks like the task's own; its starts.

Its starts are in its own run directory, in the journal: the job that holds it notes each turn, `status` reads them.

Its step has a part of the job: `srun --exact` gives it these CPUs, GPUs and this memory only, and waits until they are
free (seen with 22.05 and 26.05: "step creation temporarily disabled, retrying").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.agent.launch_options import Options
from cluster_ddp.run import journal, spec_file
from cluster_ddp.run.journal import Event
from cluster_ddp.run.outcome import Outcome
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


class Turn(NamedTuple):
    """The last start of a packed task."""

    starts: int
    """How often it was started, with this one."""
    requeues: int
    """How often Slurm had started the job that holds it again before."""
    time: float
    """When, in seconds of UNIX time."""


NONE = Turn(0, 0, 0.0)
"""Of a task that has not been started."""


def begin(folder: Path, label: str, turn: Turn, *, shared: bool) -> bool:
    """Note a start of a task with this label. Returns whether it is noted: the disk may be full."""
    return journal.append(folder, Event.TURN, shared=shared, job=label, **turn._asdict())


def last(folder: Path, label: str) -> Turn:
    """Return the last start of a task; `NONE` if there is none, or it can't be read."""
    turn = NONE
    for one in journal.events(folder):
        starts, requeues = one.get("starts"), one.get("requeues")
        if one.get("event") == Event.TURN and one.get("job") == label and type(starts) is type(requeues) is int:
            turn = Turn(starts, requeues, one["time"])
    return turn


def final(folder: Path, label: str) -> Outcome | None:
    """Return how a task has ended for good; None if it has not, and is to be started (again)."""
    ended = journal.last_end(folder, label)
    return None if ended is None or ended.starts_again else ended


def is_stopped(ended: Outcome | None, turn: Turn) -> bool:
    """Whether the last start of a task was stopped in time, and the task waits for another."""
    return ended is not None and ended.starts_again and ended.state == "STOPPED" and ended.time >= turn.time


def is_elsewhere(folder: Path) -> bool:
    """Whether a task's run directory is gone, or has become another job's by `submit --resume`."""
    try:
        return "array_task" not in spec_file.raw(folder)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # it can't be read now
        return False
