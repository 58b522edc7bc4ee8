"""From a plan to a submitted job: all of it or nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster_ddp.agent.grid import ARRAY_TASK, configuration, fill_in
from cluster_ddp.errors import SlurmError
from cluster_ddp.protocol import File
from cluster_ddp.submission import frozen_agent, grids, resume, run_dirs
from cluster_ddp.submission.backends import Held, submitit_task
from cluster_ddp.submission.copies import snapshot, venv_archive
from cluster_ddp.submission.job import Job
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.submit_signals import SubmitSignals


def submit(plan: Plan) -> list[Job]:
    """Submit a plan: all of it or nothing.

    The job waits until its run directory exists, named by the job's id; only then can it start. INT, HUP and TERM first
    cancel the job and remove its files, then have their usual effect.

    Returns:
        The job; for an array one item per task, in the order of the task numbers.

    Raises:
        RunDirError: run directories can't be written, or code or environment not copied. No job is left behind.
        SpecError: the run to resume has not ended.
        SlurmError: Slurm refused; the error has its words. It names a job that could not be cancelled.
    """
    request = plan.request
    if request.earlier is not None:
        request.earlier.refuse_unended()
    with SubmitSignals() as signals:
        made = run_dirs.prepare(request.run_dir.parent if request.run_dir else request.runs_dir, request.run_dir)
        folders: list[Path] = []
        held = aside = None
        try:
            _pack_environment(plan)
            with signals.late():  # without the job's id, it could not be cancelled
                held = plan.scheduler.hold(plan.script, plan.options)
            with signals.late():
                aside = resume.set_aside(request.earlier) if request.earlier else None
            jobs = _make_folders(plan, held, folders)
            plan.scheduler.release(held, jobs[0].run_dir, plan.spec.begin or "now")
        except BaseException:
            with signals.late():
                run_dirs.remove(folders, made)
                if aside is not None:
                    resume.put_back(aside)
                if held is not None:
                    _take_back(plan, held)
            raise
    if request.run_dir is None:
        run_dirs.point_latest(jobs[0].run_dir)
    return jobs


def _pack_environment(plan: Plan) -> None:
    if plan.venv_archive is not None and plan.spec.venv is not None:
        venv_archive.pack(Path(plan.spec.venv), plan.venv_archive, shared=plan.spec.share)


def _take_back(plan: Plan, held: Held) -> None:
    try:
        plan.scheduler.abandon(held)
    except SlurmError as error:
        found = f"{error.found} The job has no run directory, and would start in an hour."
        raise SlurmError(f"Cancelling job {held.label}:", found, f"scancel {held.label}") from error


def _make_folders(plan: Plan, held: Held, folders: list[Path]) -> list[Job]:
    """Make and fill the run directories. Each is added to `folders` before it is made."""
    spec, request = plan.spec, plan.request
    whole = request.run_dir or Path(run_dirs.prefix(request.runs_dir, spec) + held.label)
    described = dataclasses.asdict(spec)
    script = {plan.scheduler.script_name: plan.script.encode(), File.AGENT: frozen_agent.content()}
    if spec.array is None:
        _make_folder(plan, whole, {**_files(plan, held, held.label, described, {}), **script}, folders)
        made = {held.label: whole}
    else:
        files = {File.SPEC: _description(plan, held, held.label, described, {})}
        _make_folder(plan, whole, {**files, **script}, folders)
        made = {f"{held.label}_{number}": Path(f"{whole}_{number}") for number in grids.tasks(spec.array)}
        described |= {"array": None, "grid": {}}  # a task resumes as a single job; the array's spec.json has the grid
        for label, path in made.items():
            number = label.rpartition("_")[2]
            values = configuration(spec.grid, int(number)) if spec.grid else {}
            files = _files(plan, held, label, described, {**values, ARRAY_TASK: number})
            _make_folder(plan, path, files, folders)
    if request.take_snapshot:
        snapshot.take(Path.cwd(), whole)
    return [
        Job(
            id=label,
            run_dir=path,
            tasks=spec.nodes if spec.launcher == "torchrun" else spec.world_size,
            ranks=spec.world_size,
            cluster=held.cluster,
            is_function=request.function is not None,
            scheduler=plan.scheduler,
        )
        for label, path in made.items()
    ]


def _make_folder(plan: Plan, path: Path, files: Mapping[str, bytes], folders: list[Path]) -> None:
    if plan.request.earlier is None:
        if not path.exists():
            folders.append(path)
        run_dirs.create(path, shared=plan.spec.share)
    run_dirs.fill(path, files, shared=plan.spec.share)


def _files(
    plan: Plan, held: Held, label: str, described: dict[str, Any], values: Mapping[str, str]
) -> dict[str, bytes]:
    """Files for the run directory of a job, or of an array task with its values of the grid."""
    spec, function = plan.spec, plan.request.function
    command = tuple(fill_in(word, values) for word in spec.command)
    files = {File.SPEC: _description(plan, held, label, {**described, "command": command}, values)}
    if function is None:
        return files
    if isinstance(function, resume.Pickled):
        pickled = function.content
    else:
        pickled = submitit_task.pickled(functools.partial(function, **{key: values[key] for key in spec.grid}))
    return {**files, submitit_task.pickle_name(label): pickled}


def _description(plan: Plan, held: Held, label: str, described: Mapping[str, Any], values: Mapping[str, str]) -> bytes:
    request, options = plan.request, plan.request.reference_options
    in_array = ARRAY_TASK in values
    return run_dirs.description(
        described,
        label=label,
        local=request.local,
        cluster=held.cluster,
        identity=held.identity,
        code=f"../{plan.spec.name}-{held.label}/{request.code}" if request.code and in_array else request.code,
        values={key: value for key, value in values.items() if key != ARRAY_TASK},
        reference_options=options and [fill_in(word, values) for word in options],
    )
