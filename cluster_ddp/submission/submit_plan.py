"""From a plan to a submitted job: all of it or nothing, whatever fails and whichever signal arrives."""

from __future__ import annotations

import dataclasses
import functools
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from cluster_ddp.agent.array_values import ARRAY_TASK, configuration, fill_in, numbers
from cluster_ddp.errors import SlurmError
from cluster_ddp.protocol import File
from cluster_ddp.submission import resume, run_dirs
from cluster_ddp.submission.backends import Held, submitit_task
from cluster_ddp.submission.frozen import code_snapshot, frozen_agent, venv_archive
from cluster_ddp.submission.job import Job
from cluster_ddp.submission.packed import allocation
from cluster_ddp.submission.planning import Plan

_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Of Ctrl-C, a closed terminal, and kill or a time limit."""


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
    if plan.earlier is not None:
        plan.earlier.refuse_unended()
    with _Signals() as signals:
        topmost = run_dirs.prepare(plan.run_dir.parent if plan.run_dir else plan.runs_dir, plan.run_dir)
        made: list[Path] = []
        held = aside = None
        try:
            if plan.venv_archive is not None and plan.spec.venv is not None:
                venv_archive.pack(Path(plan.spec.venv), plan.venv_archive, shared=plan.spec.share)
            with signals.late():  # without the job's id, it could not be cancelled
                held = plan.scheduler.hold(plan.script, plan.options)
            with signals.late():
                aside = resume.set_aside(plan.earlier) if plan.earlier else None
            jobs = _make_run_dirs(plan, held, made)
            plan.scheduler.release(held, jobs[0].run_dir, plan.spec.begin or "now")
        except BaseException:
            with signals.late():
                run_dirs.remove(made, topmost)
                if aside is not None:
                    resume.put_back(aside)
                if held is not None:
                    _cancel(plan, held)
            raise
    if plan.run_dir is None:
        run_dirs.point_latest(jobs[0].run_dir)
    return jobs


def _cancel(plan: Plan, held: Held) -> None:
    try:
        plan.scheduler.abandon(held)
    except SlurmError as error:
        found = f"{error.found} The job has no run directory, and would start in an hour."
        raise SlurmError(f"Cancelling job {held.label}:", found, f"scancel {held.label}") from error


def _make_run_dirs(plan: Plan, held: Held, made: list[Path]) -> list[Job]:
    """Make and fill the run directories: that of the job; for an array, that of the whole and one for each task.

    Each is added to `made` before it is made.
    """
    spec, whole = plan.spec, Path(plan.folder(held.label))
    described = dataclasses.asdict(spec)
    script = {plan.scheduler.script_name: plan.script.encode(), File.AGENT: frozen_agent.content()}
    if spec.array is None:
        _make_run_dir(plan, whole, {**_files(plan, held, held.label, described, {}), **script}, made)
        folders = {held.label: whole}
    else:
        description = _description(plan, held, held.label, described, {})
        _make_run_dir(plan, whole, {File.SPEC: description, **script}, made)
        folders = {f"{held.label}_{number}": Path(f"{whole}_{number}") for number in numbers(spec.array)}
        described |= {"array": None, "grid": {}, "pack": None, "jobs": None}  # a task resumes as a single job
        holders = allocation.holders(spec, held.label)
        for label, folder in folders.items():
            number = label.rpartition("_")[2]
            values = {**configuration(spec.grid, int(number)), ARRAY_TASK: number}
            files = _files(plan, held, label, described, values, packed=holders.get(int(number), ""))
            _make_run_dir(plan, folder, files, made)
    if plan.take_snapshot:
        code_snapshot.take(Path.cwd(), whole)
    return [_job(plan, held, label, folder) for label, folder in folders.items()]


def _job(plan: Plan, held: Held, label: str, folder: Path) -> Job:
    largest = dataclasses.replace(plan.spec, nodes=plan.spec.max_nodes or plan.spec.nodes)
    return Job(
        id=label,
        run_dir=folder,
        tasks=largest.tasks,
        ranks=largest.world_size,
        cluster=held.cluster,
        is_function=plan.function is not None,
        scheduler=plan.scheduler,
    )


def _make_run_dir(plan: Plan, path: Path, files: Mapping[str, bytes], made: list[Path]) -> None:
    if plan.earlier is None:
        if not path.exists():
            made.append(path)
        run_dirs.create(path, shared=plan.spec.share)
    run_dirs.fill(path, files, shared=plan.spec.share)


def _files(
    plan: Plan, held: Held, label: str, spec: Mapping[str, Any], values: Mapping[str, str], packed: str = ""
) -> dict[str, bytes]:
    """The own files of a job, or of an array task with its values of the grid, and the job that holds it."""
    files, function = {File.SPEC: _description(plan, held, label, spec, values, packed)}, plan.function
    if isinstance(function, resume.Pickled):
        files[submitit_task.pickle_name(label)] = function.content
    elif function is not None:
        called = functools.partial(function, **{key: values[key] for key in plan.spec.grid})
        files[submitit_task.pickle_name(label)] = submitit_task.pickled(called)
    return files


def _description(
    plan: Plan, held: Held, label: str, spec: Mapping[str, Any], values: Mapping[str, str], packed: str = ""
) -> bytes:
    """The spec.json of a job, or of an array task with its values of the grid, and the job that holds it."""
    options, code = plan.reference_options, plan.code
    return run_dirs.description(
        {**spec, "command": tuple(fill_in(word, values) for word in plan.spec.command)},
        label=label,
        local=plan.local,
        cluster=held.cluster,
        identity=held.identity,
        code=f"../{plan.spec.name}-{held.label}/{code}" if code and ARRAY_TASK in values else code,
        values={key: value for key, value in values.items() if key != ARRAY_TASK},
        packed=packed,
        reference_options=options and [fill_in(word, values) for word in options],
    )


class _Interrupted(BaseException):
    """A signal arrived; the body must undo what it has done."""


class _Signals:
    """Context manager: in its body, such a signal raises `_Interrupted`; at its end, the signal has its usual effect.

    Ignored signals stay ignored (nohup). Outside the main thread nothing changes, since only it can set handlers.

    Raises:
        KeyboardInterrupt: a signal arrived, and the caller's own handler returned.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._is_late = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._came:
            signal.raise_signal(self._came[0])
        if isinstance(error, _Interrupted):
            raise KeyboardInterrupt from None  # a handler of the caller's own has returned

    @contextmanager
    def late(self) -> Iterator[None]:
        """Delay signals until the end of the body, so that it is completed. Then it raises `_Interrupted`."""
        came, self._is_late = len(self._came), True
        try:
            yield
        finally:
            self._is_late = False
        if len(self._came) > came:
            raise _Interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        if not self._is_late and len(self._came) == 1:
            raise _Interrupted
