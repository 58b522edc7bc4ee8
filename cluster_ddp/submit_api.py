"""Submission from Python: `cluster_ddp.submit` and `cluster_ddp.submit_array`."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shlex
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.with_world import WithWorld
from cluster_ddp.submission import submit_plan
from cluster_ddp.submission.checks import preflight
from cluster_ddp.submission.job import Job
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.resume import find
from cluster_ddp.submission.spec import JobSpec


def submit(
    spec: JobSpec,
    function_or_command: Callable[..., Any] | Sequence[str] | None = None,
    *,
    local: bool = False,
    runs_dir: str | os.PathLike[str] = "runs",
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    snapshot: bool = False,
    check: bool = True,
) -> Job:
    """Submit a job, and return it without waiting for it.

    Args:
        spec: what to run, and on how many nodes and GPUs.
        function_or_command: a function, called in every rank with the `World`; or a command, as a sequence of words.
            Default: the spec's command.
        local: run the job on this machine. Without sbatch on the PATH, it runs on this machine anyway.
        runs_dir: folder of the run directories.
        run_dir: the new run directory. Default: one in `runs_dir`, to which the link <name>-<job id> leads.
        resume: a job that has ended (12, or 12_3 for an array task), or its run directory. The new job runs there.
        snapshot: run a copy of the code as it is now.
        check: check first whether the job can run, here and on the cluster. Doubts become Python warnings.

    Raises:
        SpecError: the job can't be submitted like this, or can't run on this cluster; the job to resume has not ended.
        RunDirError: the run directory exists already, or can't be written or resumed; a snapshot can't be taken.
        SlurmError: Slurm refused; the error has its words. No job is left behind, unless the error names it.
    """
    _check_array(spec, wanted=False)
    plan = _plan(
        spec,
        function_or_command,
        local=local,
        runs_dir=Path(runs_dir),
        run_dir=None if run_dir is None else Path(run_dir),
        earlier=None if resume is None else find(resume, Path(runs_dir)),
        take_snapshot=snapshot,
    )
    return _submitted(plan, check)[0]


def submit_array(
    spec: JobSpec,
    function_or_command: Callable[..., Any] | Sequence[str] | None = None,
    *,
    runs_dir: str | os.PathLike[str] = "runs",
    snapshot: bool = False,
    check: bool = True,
) -> list[Job]:
    """Submit a job array. The other arguments and the errors are those of `submit`.

    Args:
        spec: what to run; its `grid` or `array` sets the number of tasks.
        function_or_command: as for `submit`. A function gets its task's grid values as keyword arguments (strings). In
            a command, `{key}` becomes the value.

    Returns:
        One job per task, in the order of the task numbers.
    """
    _check_array(spec, wanted=True)
    plan = _plan(spec, function_or_command, runs_dir=Path(runs_dir), take_snapshot=snapshot)
    return _submitted(plan, check)


def _check_array(spec: JobSpec, *, wanted: bool) -> None:
    if spec.array is None and wanted:
        hint = 'JobSpec(…, grid={"seed": ("0", "1")}) or array="0-7"; for one job: cluster_ddp.submit'
        raise SpecError("Submitting an array:", "the specification has neither grid nor array.", hint)
    if spec.array is not None and not wanted:
        hint = "cluster_ddp.submit_array(spec, …), which returns a job for each task"
        raise SpecError(f"Submitting one job with array={spec.array!r}:", "this is a job array.", hint)


def _plan(spec: JobSpec, function_or_command: Callable[..., Any] | Sequence[str] | None, **how: Any) -> Plan:
    """Plan the job; `how` are further arguments of a `Plan`."""
    if callable(function_or_command):
        _check_call(function_or_command, spec)
        return Plan(spec=spec, function=WithWorld(function_or_command), **how)
    if isinstance(function_or_command, str):
        found = "it is one string, and no shell splits it into words."
        hint = f"give its words: {shlex.split(function_or_command)}"
        raise SpecError(f"Submitting the command {function_or_command!r}:", found, hint)
    if function_or_command is not None:
        spec = dataclasses.replace(spec, command=tuple(function_or_command))
    return Plan(spec=spec, **how)


def _check_call(function: Callable[..., Any], spec: JobSpec) -> None:
    """Check that a function can be called with the world and the values of the grid."""
    name = getattr(function, "__name__", repr(function))
    call = f"{name}({', '.join(['world', *(f'{key}=…' for key in spec.grid)])})"
    try:
        inspect.signature(function).bind(None, **dict.fromkeys(spec.grid))
    except ValueError:  # a function of C may tell no signature
        return
    except TypeError as error:
        found = f"each rank calls {call}, which does not fit: {error}."
        raise SpecError(f"Submitting the function {name}:", found, f"def {call.replace('=…', '')}: …") from error


def _submitted(plan: Plan, check: bool) -> list[Job]:
    if check:
        for advice in preflight.check(plan):
            warnings.warn(f"{advice.text} ({advice.code})", stacklevel=3)
    return submit_plan.submit(plan)
