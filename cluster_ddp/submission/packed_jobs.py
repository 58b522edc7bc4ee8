"""The jobs that hold the tasks of a packed array: what Slurm is asked for, so many times a task's."""

from __future__ import annotations

import math
import re

from cluster_ddp.agent import array_values
from cluster_ddp.agent.job.pack import packed_task
from cluster_ddp.submission import grids
from cluster_ddp.submission.spec import JobSpec, derived
from cluster_ddp.submission.validation import seconds, slurms_time

MARGIN_S = 60
"""Seconds that a turn of tasks may take beyond their time limit: TERM, KILL after 30 s, the end of the step, and the
start of the next one, which has to fit into what is left of the job's time."""


def of(spec: JobSpec) -> JobSpec:
    """Return the array that Slurm sees, with one task for each job that holds tasks; another job as it is."""
    if spec.pack is None or spec.array is None:
        return spec
    jobs = spec.jobs or 1
    turns = math.ceil(math.ceil(grids.count(spec.array) / jobs) / spec.pack)
    limit_s = None if spec.time is None else seconds(spec.time)
    return derived(
        spec,
        array=f"0-{jobs - 1}",
        grid={},
        pack=None,
        jobs=None,
        gpus_per_node=spec.gpus_per_node * spec.pack,
        mem=None if spec.mem is None else _times(spec.mem, spec.pack),
        time=spec.time if limit_s is None else slurms_time(turns * (limit_s + MARGIN_S)),
    )


def _times(mem: str, count: int) -> str:
    return re.sub(r"^\d+", lambda digits: str(int(digits[0]) * count), mem)


def holders(spec: JobSpec) -> dict[int, int]:
    """Return task number -> the number of the job that holds it; none without `pack`."""
    if spec.pack is None or spec.array is None:
        return {}
    numbers, jobs = array_values.numbers(spec.array), spec.jobs or 1
    return {task: job for job in range(jobs) for task in packed_task.share(numbers, jobs, job)}
