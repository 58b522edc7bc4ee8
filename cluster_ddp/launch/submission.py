"""From a plan to a job that is submitted: all of it or nothing."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster_ddp.errors import SlurmError
from cluster_ddp.launch import grids, run_folder, snapshot, task
from cluster_ddp.launch.job import Job
from cluster_ddp.launch.planning import Plan
from cluster_ddp.launch.render import task_command
from cluster_ddp.launch.schedulers import Held
from cluster_ddp.launch.spec import ARRAY_TASK


def submit(plan: Plan) -> list[Job]:
    """Submit what was planned: all of it or nothing.

    The job first waits, so that its run folder is there, under the job's id, before anything of it starts.

    Returns:
        The job; of an array its tasks, in the order of their numbers.

    Raises:
        RunDirError: the run folders can't be written; nothing is submitted then.
        SlurmError: Slurm refused, in its words; nothing is left behind then.
    """
    made = run_folder.prepare(plan.runs_dir)
    folders: list[Path] = []
    held = None
    try:
        with _late_interrupt():
            held = plan.scheduler.hold(plan.script, plan.options)
        jobs = _make_folders(plan, held, folders)
        plan.scheduler.release(held, jobs[0].run_dir, plan.spec.begin or "now")
    except BaseException:  # an interruption, too
        run_folder.remove(folders, made)
        if held is not None:
            _take_back(plan, held)
        raise
    run_folder.point_latest(folders[0])
    return jobs


@contextmanager
def _late_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the body: without the job's id, nobody could take the job back."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C is the main thread's
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if came:
        raise KeyboardInterrupt


def _take_back(plan: Plan, held: Held) -> None:
    try:
        plan.scheduler.abandon(held)
    except SlurmError as error:
        found = f"{error.found} The job has no run folder and would start in an hour."
        raise SlurmError(f"Taking back job {held.label}:", found, f"scancel {held.label}") from error


def _make_folders(plan: Plan, held: Held, folders: list[Path]) -> list[Job]:
    """Make and fill the run folders; each is noted in `folders` before it is made."""
    spec, prefix = plan.spec, run_folder.prefix(plan.runs_dir, plan.spec)
    script = {plan.scheduler.script_name: plan.script.encode()}
    if spec.array is None:
        _make_folder(plan, held, held.label, {}, script, folders)
    else:
        _make_folder(plan, held, held.label, None, script, folders)
        for number in grids.tasks(spec.array):
            values = grids.configuration(spec.grid, number) if spec.grid else {}
            _make_folder(plan, held, f"{held.label}_{number}", {**values, ARRAY_TASK: str(number)}, {}, folders)
    if plan.take_snapshot:
        snapshot.take(Path.cwd(), folders[0])
    return [
        Job(
            id=str(folder).removeprefix(prefix),
            run_dir=folder,
            tasks=spec.nodes * (1 if spec.launcher == "torchrun" else spec.gpus_per_node),
            cluster=held.cluster,
            is_function=plan.function is not None,
            scheduler=plan.scheduler,
        )
        for folder in (folders if spec.array is None else folders[1:])
    ]


def _make_folder(
    plan: Plan,
    held: Held,
    label: str,
    values: dict[str, str] | None,
    files: dict[str, bytes],
    folders: list[Path],
) -> None:
    """One run folder: of a job, of an array's task with its `values`, or (None) of a whole array."""
    command = tuple(grids.fill_in(word, values or {}) for word in plan.spec.command) if plan.function is None else ()
    described = run_folder.description(
        plan.spec,
        label=label,
        backend=plan.backend,
        cluster=held.cluster,
        command=command,
        values={key: value for key, value in (values or {}).items() if key != ARRAY_TASK},
    )
    files = {run_folder.SPEC_FILE: described, **files}
    if values is not None and plan.backend != "sbatch":
        if plan.function is None:
            work: Callable[[], Any] = task.Command(task_command(plan.spec, command))
        else:
            work = functools.partial(plan.function, **{key: values[key] for key in plan.spec.grid})
        files[task.pickle_name(label)] = task.pickled(work)
    path = Path(run_folder.prefix(plan.runs_dir, plan.spec) + label)
    if not path.exists():
        folders.append(path)
    run_folder.create(path, files)
