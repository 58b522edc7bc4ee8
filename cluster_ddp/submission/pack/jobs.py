"""The jobs that hold the tasks of a packed array: what Slurm is asked for, so many times a task's; what would fit."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from cluster_ddp.agent import array_values
from cluster_ddp.errors import SpecError, counted
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
    return {task: job for job in range(jobs) for task in array_values.share(numbers, jobs, job)}


def agent_options(spec: JobSpec) -> dict[str, Any]:
    """Return the options that the agent of a job which holds tasks needs beside a task's; none without `pack`."""
    if spec.pack is None or spec.array is None:
        return {}
    limit_s = None if spec.time is None else seconds(spec.time)
    shares = {"pack": spec.pack, "jobs": spec.jobs or 1, "array": spec.array}
    return {**shares, "time_limit_s": limit_s, "signal": spec.signal or ""}


def explained(spec: JobSpec, error: SpecError, fits: Callable[[JobSpec], bool]) -> SpecError:
    """Return why the cluster can't run the jobs of a packed array, with the options that would fit.

    Args:
        spec: the array.
        error: why it can't run such a job.
        fits: whether it can run another job.
    """
    assert spec.pack is not None
    asked = f"{counted(spec.pack, 'task')} at a time on one node. {error.asked}"
    hint = next(_fitting(spec, fits), f"for {counted(spec.pack, 'task')} together: {error.hint}")
    return SpecError(asked, error.found, hint).about("pack", *error.fields)


def _fitting(spec: JobSpec, fits: Callable[[JobSpec], bool]) -> Iterator[str]:
    """What would fit: fewer tasks at a time on a node, or more jobs, which are shorter."""
    fewer = [{"pack": count} for count in range((spec.pack or 1) - 1, 0, -1)]
    more = [{"jobs": count} for count in range((spec.jobs or 1) + 1, grids.count(spec.array or "0") + 1)]
    for change in (*fewer, *more):
        with contextlib.suppress(SpecError):  # the fields contradict each other
            if fits(of(replace(spec, **change))):  # type: ignore[arg-type]
                yield " ".join(f"--{name} {count}" for name, count in change.items())
