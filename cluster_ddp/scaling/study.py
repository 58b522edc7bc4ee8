"""The folder of a scaling study. What it has is not measured again, so a study that was stopped continues where it was.

scaling/study.json     what is measured: the command and its options
        runs/          the run directories
        measured.json  the figures of each run
        results.*      tables and plots
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_ddp.errors import JobNotFoundError, RunDirError
from cluster_ddp.jobs import find_runs, run_record
from cluster_ddp.jobs.find_runs import of_run
from cluster_ddp.jobs.run_record import RunRecord
from cluster_ddp.run import journal
from cluster_ddp.run.files import atomic_write, make_dir, read_json, why
from cluster_ddp.scaling.points import Measured, Point, measure
from cluster_ddp.slurm.job_status import elapsed_s
from cluster_ddp.submission.job import Job, describe, poll_intervals_s

_STUDY, _MEASURED = "study.json", "measured.json"


@dataclass(kw_only=True)
class Study:
    """A study in its folder."""

    folder: Path
    """The folder."""
    points: Sequence[Point]
    """The runs that are wanted."""
    metric: re.Pattern[str] | None = None
    """What finds the throughput in rank 0's log; None: metrics.jsonl has it."""
    say: Callable[[str], None] = print
    """Shows a line."""
    failures: dict[Point, str] = field(default_factory=dict)
    """The runs that failed, and how."""

    @property
    def runs(self) -> Path:
        """The folder of the run directories."""
        return self.folder / "runs"

    def open(self, what: Mapping[str, Any]) -> None:
        """Make the folder, or check that it is of the same study, which measures `what`; JSON can hold that.

        Raises:
            RunDirError: it can't be made or read, or another study is in it.
        """
        asked, path = f"A scaling study in {self.folder}:", self.folder / _STUDY
        try:
            if not path.exists():
                if not self.folder.exists():
                    make_dir(self.folder)
                _write(path, what)
            before = read_json(path)
        except (OSError, ValueError) as error:
            raise RunDirError(asked, f"{error}.", "choose another folder: --folder PATH") from error
        if before != json.loads(json.dumps(what)):
            found = f"it is the study of another job: {' '.join(before.get('words', []))}."
            raise RunDirError(asked, found, "choose another folder: --folder PATH; or give the same options")

    def measured(self) -> dict[Point, Measured]:
        """Return the figures of the runs that are measured."""
        known = self._known()
        return {point: Measured(**known[point.name]) for point in self.points if point.name in known}

    def run(self, submit: Callable[[Point], Job], *, one_at_a_time: bool) -> None:
        """Submit what is not measured yet, and wait until it is. Says on the way how the jobs are.

        If it is `one_at_a_time`, a job is submitted only when the one before has ended.
        """
        measured, runs = self.measured(), find_runs.in_folder(self.runs)
        left = [point for point in self.points if point not in measured]
        running = {point: job for point in left if (job := self._submitted(point, runs)) is not None}
        left = [point for point in left if point not in running]
        said: dict[Point, str] = {}
        intervals_s = poll_intervals_s()
        while left or running:
            while left and not (one_at_a_time and running):
                running[left[0]] = submit(left[0])
                del left[0]
            for point, job in list(running.items()):
                words, has_ended = self._look(point, job)
                if words != said.get(point):
                    self.say(f"{point.name}: {words}")
                    said[point] = words
                if has_ended:
                    del running[point]
            if running:
                time.sleep(next(intervals_s))

    def _submitted(self, point: Point, runs: Sequence[RunRecord]) -> Job | None:
        """The newest job of a run, unless it failed: that one is to be submitted again."""
        found = [one for one in runs if one.name == point.name]
        if not found:
            return None
        job = of_run(found[-1])
        try:
            status = job.status()
        except JobNotFoundError:
            return job if measure(job.run_dir, seconds=None, metric=self.metric).samples_per_s else None
        return job if not status.ended or status.state == "COMPLETED" else None

    def _look(self, point: Point, job: Job) -> tuple[str, bool]:
        """How a job is, and whether it has ended. Keeps its figures if it has succeeded."""
        try:
            status = job.status()
        except JobNotFoundError:  # so long ago that Slurm has forgotten it
            self._keep(point, measure(job.run_dir, seconds=None, metric=self.metric))
            return f"job {job.id}: measured", True
        if status.ended and status.state == "COMPLETED":
            found = measure(job.run_dir, seconds=_seconds(job, status.elapsed), metric=self.metric)
            self._keep(point, found)
            rate = "no throughput" if found.samples_per_s is None else f"{found.samples_per_s:,.0f} samples/s"
            return f"{describe(job.id, status)}, {rate}", True
        if status.ended:
            self.failures[point] = f"{describe(job.id, status)}; its logs: cluster-ddp logs {job.run_dir}"
            return self.failures[point], True
        return re.sub(r" after .*", "", describe(job.id, status)), False

    def _keep(self, point: Point, found: Measured) -> None:
        _write(self.folder / _MEASURED, {**self._known(), point.name: dataclasses.asdict(found)})

    def _known(self) -> dict[str, Any]:
        path = self.folder / _MEASURED
        try:
            return read_json(path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            hint = f"remove it, to measure again: rm {shlex.quote(str(path))}"
            raise RunDirError(f"Reading {path}:", f"{why(error)}.", hint) from error


def _seconds(job: Job, elapsed: str) -> float | None:
    """From a job's start to its end; on this machine from its submission."""
    if elapsed:
        return elapsed_s(elapsed)
    ended = journal.last_end(job.run_dir, job.id)
    return ended.time - run_record.read(job.run_dir).began_s if ended is not None else None


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")
