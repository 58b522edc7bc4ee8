"""Follow a job: its state, why and until when it waits, what it prints, how it ends."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.errors import JobNotFoundError, SlurmError
from cluster_ddp.jobs import run_state
from cluster_ddp.jobs.logs import LogReader
from cluster_ddp.run.files import tail
from cluster_ddp.run.names import RESTART, TO_RESUME, File
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission import run_dirs
from cluster_ddp.submission.job import Job, describe, exit_in_words, poll_intervals_s

_LOG_POLL_S = 0.5
_QUIET_S = 5.0
_FIGURES_S = 5.0
_REPEAT_S = 60.0


def follow(
    jobs: Sequence[Job],
    *,
    show: Callable[[str], None],
    show_figures: Callable[[str], None] = lambda line: None,
    logs: LogReader | None = None,
) -> int:
    """Follow a job, or the tasks of an array, until they end. They keep running if you interrupt this.

    Args:
        jobs: one job, or all tasks of one array.
        show: called with each line.
        show_figures: called every few seconds with how far a job's training is and how well it runs, if it says.
        logs: shows the logs; default: all logs of a job, none of an array.

    Returns:
        The exit status: 0, the job's own, or 128 + the signal that ended it; for an array the highest. 1 if Slurm
        forgets the job before its end was seen.
    """
    following = _Following(jobs, show, logs)
    intervals_s, figures, figures_at, began_s = poll_intervals_s(), "", 0.0, time.time()
    while not following.update():
        ask_again_at = time.monotonic() + next(intervals_s)
        while time.monotonic() < ask_again_at:
            following.show_logs()
            is_due = following.is_training() and time.monotonic() >= figures_at
            if is_due and (figures := _figures(jobs[0].run_dir, began_s)):
                show_figures(figures)
                figures_at = time.monotonic() + _FIGURES_S
            time.sleep(_LOG_POLL_S)
    if not figures and not following.is_array:  # it ended within seconds
        show_figures(_figures(jobs[0].run_dir, began_s))
    show_figures("")
    return following.outcome()


def _figures(run_dir: Path, since_s: float) -> str:
    """How far a training is, if it has told anything since then: a resumed run has records of an earlier job."""
    with contextlib.suppress(OSError):
        if (run_dir / File.METRICS).stat().st_mtime >= since_s:
            return run_state.line(run_dir)
    return ""


def on_terminal(
    jobs: Sequence[Job], *, if_left: str, names: Sequence[str] = (), fit: Callable[[str], str] = str
) -> int:
    """Follow jobs on this terminal until they end, or the user leaves them. Returns the exit status, as `follow` does.

    `if_left` is said if the user leaves: that they continue. `names` are those of the logs to show; empty for all.
    `fit` makes a line of a log fit for a terminal.
    """
    try:
        with BottomLine() as bottom:
            logs = LogReader(lambda line: bottom.show(fit(line)), jobs[0], names)
            status = follow(jobs, show=bottom.show, show_figures=bottom.update, logs=logs)
            _show_cost(jobs, bottom.show)
            return status
    except KeyboardInterrupt:
        print(f"\nNo longer following; {if_left}", file=sys.stderr)
        return 130


def _show_cost(jobs: Sequence[Job], show: Callable[[str], None]) -> None:
    """Show what jobs that have ended have cost, as far as it is known."""
    from cluster_ddp.jobs.report import cost  # `submit --dry-run` does without
    from cluster_ddp.jobs.status import RunStatus

    ended = (RunStatus(job=job.id, name="", state="unknown", run_dir=job.run_dir) for job in jobs)
    costs = [cost.read(one) for one in ended]
    known = [one for one in costs if one.gpu_hours is not None or one.energy_kwh is not None]
    if line := cost.total(known, partly=False).line:
        show(line + (f". Known of {len(known)} of {len(costs)} tasks" if len(known) < len(costs) else ""))


class BottomLine:
    """Prints lines, and keeps a last line that changes: in its place on a terminal, elsewhere once a minute.

    A context manager.
    """

    def __init__(self) -> None:
        self._live: Any = None
        self._last, self._again_s = "", 0.0

    def show(self, line: str) -> None:
        """Print a line, above the last one."""
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.console.out(line, highlight=False)

    def update(self, text: str) -> None:
        """Change the last line."""
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(text, no_wrap=True, overflow="ellipsis", style="bold"), refresh=True)
        elif text not in ("", self._last) and time.monotonic() >= self._again_s:
            print(text, flush=True)
            self._last, self._again_s = text, time.monotonic() + _REPEAT_S

    def __enter__(self) -> BottomLine:
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            from rich.live import Live

            self._live = Live("", auto_refresh=False, transient=True)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()


class _Following:
    """What is known of jobs that are followed, and was shown of them."""

    def __init__(self, jobs: Sequence[Job], show: Callable[[str], None], logs: LogReader | None) -> None:
        self.jobs, self.first, self.show = jobs, jobs[0], show
        self.is_array = len(jobs) > 1
        self.label = self.first.id.partition("_")[0] if self.is_array else self.first.id
        self.statuses: list[JobStatus] = []
        self.said = ""
        self.forgotten: str | None = None
        """How the training of a job that Slurm has forgotten ended, as far as it says."""
        self.answers = True
        self.quiet_since: float | None = None
        """When the job was first seen running; None before, and once something is said about its output."""
        self.logs = logs or LogReader(show, self.first)

    def update(self) -> bool:
        """Query the state, and show it if it is new. Returns whether the job, or every task, has ended."""
        try:
            self.statuses = self.first.scheduler.statuses(self.label, self.first.cluster, self.first.run_dir)
        except JobNotFoundError:
            self.forgotten = None if self.is_array else run_state.how_ended(self.first.run_dir, self.first.id)
            said = f" Its training ended as {self.forgotten}, by its own records." if self.forgotten else ""
            self.show(f"job {self.label}: Slurm no longer knows it.{said}")
            self.show_logs(to_the_end=True)
            return True
        except SlurmError as error:
            if self.answers:
                self.show(f"Slurm does not answer ({error.found}); the job continues. Trying again …")
            self.answers = False
            return False
        if not self.answers:
            self.show("Slurm answers again.")
        self.answers, ended = True, all(status.ended for status in self.statuses)
        if ended:
            time.sleep(_LOG_POLL_S)  # the last lines may still be on their way through the file system
            self.show_logs(to_the_end=True)
        described = self._describe_array() if self.is_array else describe(self.label, self.statuses[0])
        if described != self.said:
            self.show(described)
            self.said = described
            self.quiet_since = time.monotonic() if self.statuses[0].state == "RUNNING" else None
        return ended

    def is_training(self) -> bool:
        """Return whether it is one job, which runs."""
        return not self.is_array and bool(self.statuses) and self.statuses[0].state == "RUNNING"

    def show_logs(self, *, to_the_end: bool = False) -> None:
        """Show new lines of a job's logs. Not for arrays: the tasks' lines would mix."""
        if self.is_array:
            return
        self.logs.show_new(to_the_end=to_the_end)
        if self.quiet_since is not None and time.monotonic() - self.quiet_since > _QUIET_S:
            self.quiet_since = None
            if not any(path.stat().st_size for path in self.first.log_files()):
                self.show("It has printed nothing yet: importing PyTorch may take a minute on a shared file system …")

    def outcome(self) -> int:
        """Show what failed, and how to resume it; of an array, the best task. Returns the exit status."""
        if self.forgotten == "COMPLETED":
            return 0
        if not self.statuses:
            return 1
        failed = [status for status in self.statuses if status.state != "COMPLETED"]
        if self.is_array:
            by_label = {job.id: job.run_dir for job in self.jobs}  # tasks that never started share one record
            for status in failed:
                label = f"{self.label}_{status.array_task}"
                self.show(f"job {label}: {status.state}, {exit_in_words(status)}")
                if label in by_label and run_dirs.has_results(by_label[label]):
                    self.show(f"  {TO_RESUME}{run_dirs.resume_command(by_label[label])}")
            from cluster_ddp.jobs.report import array_tasks  # `submit --dry-run` does without

            if best := array_tasks.best_line([job.run_dir for job in self.jobs]):
                self.show(best)
        elif failed:
            run_dir = self.first.run_dir
            self.show(f"Its logs: {run_dir}")
            said = tail(run_dir / File.JOB_LOG).rpartition(f"\n{RESTART}")[2]  # in its last start
            # The batch script has said it, in its own spelling of the path, unless Slurm ended the script.
            if run_dirs.has_results(run_dir) and f"\n{TO_RESUME}" not in f"\n{said}":
                self.show(f"{TO_RESUME}{run_dirs.resume_command(run_dir)}")
        return max(_exit_status(status) for status in self.statuses)

    def _describe_array(self) -> str:
        counts = Counter(status.state for status in self.statuses)
        waiting = len(self.jobs) - sum(counts.values())  # waiting tasks share one record
        if waiting > 0:
            counts["PENDING"] += waiting
        states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        return f"array {self.label}: {states}"


def _exit_status(status: JobStatus) -> int:
    if status.state == "COMPLETED":
        return 0
    return status.exit_code or (128 + status.signal if status.signal else 1)
