"""From a plan to a submitted job: all of it or nothing, whatever fails and whichever signal arrives."""

from __future__ import annotations

import dataclasses
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from cluster_ddp.agent.array_values import ARRAY_TASK, configuration, fill_in, numbers
from cluster_ddp.run import places, spec_file
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.run.names import LATEST, File
from cluster_ddp.submission import resume, run_dirs
from cluster_ddp.submission.backends import submitit_task
from cluster_ddp.submission.frozen import code_snapshot, frozen_agent, venv_archive
from cluster_ddp.submission.job import Job
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.spec import derived, of_task

_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Of Ctrl-C, a closed terminal, and kill or a time limit."""


def submit(plan: Plan) -> list[Job]:
    """Submit a plan: all of it or nothing.

    The job may start at once, so its run directory has all that it needs before. INT, HUP and TERM first cancel the job
    and remove its files, then have their usual effect.

    Returns:
        The job; for an array one item per task, in the order of the task numbers.

    Raises:
        RunDirError: run directories can't be written, or code or environment not copied. No job is left behind.
        SpecError: the run to resume has not ended.
        SlurmError: Slurm refused; the error has its words. It names a job that could not be cancelled.
    """
    if plan.earlier is not None:
        plan.earlier.refuse_unended()
    with _interruptible() as late:
        submission = _Submission(plan, late)
        try:
            jobs = submission.run()
        except BaseException:
            with late():
                submission.take_back()
            raise
    if not plan.is_chosen:
        places.point(plan.folder.with_name(LATEST), jobs[0].run_dir)
    return jobs


class _Submission:
    """A submission, and what it has done so far."""

    def __init__(self, plan: Plan, late: Callable[[], AbstractContextManager[None]]) -> None:
        self._plan, self._late = plan, late
        self._topmost = run_dirs.prepare(plan.folder)
        self._made: list[Path] = []
        self._aside: Path | None = None
        self._job: JobFile | None = None

    def run(self) -> list[Job]:
        """Make the run directories, submit, and name them by the job. See `submit` for errors."""
        plan, shared = self._plan, self._plan.spec.share
        if plan.venv_archive is not None and plan.spec.venv is not None:
            venv_archive.pack(Path(plan.spec.venv), plan.venv_archive, shared=shared)
        if plan.earlier is not None:
            with self._late():
                self._aside = resume.set_aside(plan.earlier)
        comment = plan.scheduler.new_comment(plan.script)
        for folder, files in _contents(plan, comment):
            if plan.earlier is None:
                with self._late():
                    run_dirs.create(folder, shared=shared)
                    self._made.append(folder)
            run_dirs.fill(folder, files, self._made, shared=shared)
        if plan.take_snapshot:
            code_snapshot.take(Path.cwd(), plan.folder)
        with self._late():  # without the job's id, it could not be cancelled
            self._job = plan.scheduler.submit(plan.folder, plan.options, comment)
            return self._name(self._job)

    def _name(self, job: JobFile) -> list[Job]:
        """Write which job it is, and let runs/NAME-ID lead to its run directory."""
        plan = self._plan
        self._made.append(plan.folder / File.JOB)
        run_dirs.note_job(plan.folder, job, shared=plan.spec.share)
        if (link := places.link(plan.folder, job.job)) is not None:
            self._made.append(link)
        folders = {job.job: plan.folder}
        if plan.spec.array is not None:
            folders = {f"{job.job}_{task}": plan.folder / str(task) for task in numbers(plan.spec.array)}
        largest = derived(plan.spec, nodes=plan.spec.max_nodes or plan.spec.nodes)
        known: dict[str, Any] = {"ranks": largest.world_size, "cluster": job.cluster}
        known |= {"is_function": plan.function is not None, "scheduler": plan.scheduler}
        return [Job(id=label, run_dir=folder, **known) for label, folder in folders.items()]

    def take_back(self) -> None:
        """Cancel the job, and remove what was made. Raises SlurmError if it can't be cancelled; then all stays."""
        if self._job is not None:
            self._plan.scheduler.abandon(self._job, self._plan.folder)
        run_dirs.remove(self._made, self._topmost)
        if self._aside is not None:
            resume.put_back(self._aside)


def _contents(plan: Plan, comment: str) -> Iterator[tuple[Path, dict[str, bytes]]]:
    """The run directories with their files: that of the job; for an array, that of the whole and one for each task."""
    array = plan.spec.array
    script = {plan.scheduler.script_name: plan.script.encode(), File.AGENT: frozen_agent.content()}
    yield plan.folder, {**_files(plan, dataclasses.asdict(plan.spec), comment), **script}
    described = dataclasses.asdict(of_task(plan.spec))
    for task in [] if array is None else numbers(array):
        held = {"held_by": plan.holders[task]} if plan.holders else {}
        yield plan.folder / str(task), _files(plan, described, comment, array_task=task, **held)


def _files(plan: Plan, spec: Mapping[str, Any], comment: str, **of_task: int) -> dict[str, bytes]:
    """The own files of a job, or of an array's task: `array_task` is its number, `held_by` that of the job it is in."""
    values = configuration(plan.spec.grid, of_task["array_task"]) if of_task else {}
    filled_in = {**values, ARRAY_TASK: str(of_task["array_task"])} if of_task else {}
    command = [fill_in(word, filled_in) for word in plan.spec.command]
    record = {
        "local": plan.local,
        "identity": {"comment": comment} if comment else {},
        "code": f"../{plan.folder.name}/{plan.code}" if plan.code and of_task else plan.code,
        "command": command,
        "values": values,
        **of_task,
        "submitted": time.time(),
        "folder": str(Path.cwd()),
        "spec": {**spec, "command": command},
    }
    files, function = {File.SPEC: spec_file.content(record)}, plan.function
    if isinstance(function, resume.Pickled):
        files[File.FUNCTION] = function.content
    elif function is not None and (of_task or plan.spec.array is None):
        files[File.FUNCTION] = submitit_task.pickled(functools.partial(function, **values))
    return files


class _Interrupted(BaseException):
    """A signal arrived; the body must undo what it has done."""


@contextmanager
def _interruptible() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """In the body, such a signal raises `_Interrupted`; at its end, the signal has its usual effect.

    Yields a context manager that delays signals until the end of its body. Ignored signals stay ignored (nohup).
    Outside the main thread nothing changes, since only it can set handlers.

    Raises:
        KeyboardInterrupt: a signal arrived, and the caller's own handler returned.
    """
    came, before, lateness = list[int](), dict[int, Any](), list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if not lateness and len(came) == 1:
            raise _Interrupted

    @contextmanager
    def late() -> Iterator[None]:
        lateness.append(len(came))
        try:
            yield
        finally:
            had_come = lateness.pop()
        if len(came) > had_come:
            raise _Interrupted

    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, note)
    try:
        yield late
    except _Interrupted:
        raise KeyboardInterrupt from None  # unless the signal has its usual effect first
    finally:
        for noted, handler in before.items():
            signal.signal(noted, handler)
        if came:
            signal.raise_signal(came[0])
