"""The jobs of the launchers' contract, and what happens to them. `launcher_contract.py` says what must come of it.

A place (a cluster, this machine) starts each job once for each launcher, all at once; `happen` plays the user, or the
fault. `launched.py` and `launched_training.py` are what the ranks run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slowness import scaled

from cluster_ddp import processes

HELPERS = Path(__file__).parent
ALL = ("stops", "hears", "meets", "raises", "exits", "killed", "crashes", "aborts", "parent", "cancelled")
"""The jobs of two ranks that any place can run."""
PATIENCE_S = 300.0
"""For the start of a job, which may wait for others. For hangs only."""

_WARNINGS, _OTHERS = ("USR1", "USR2"), ("HUP", "ALRM")
_OF_A_TASK = {
    "stops": {"before": _WARNINGS, "after": _WARNINGS, "finally": ("TERM",)},
    "hears": {"before": _OTHERS, "after": (*_OTHERS, "INT"), "to the batch process": ("USR1",)},
}
_OF_A_JOB = {"stops": {}, "hears": {"before": (*_WARNINGS, *_OTHERS), "after": (*_WARNINGS, *_OTHERS, "INT")}}
SIGNALS: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    (launcher, job): sent
    for launchers, of_jobs in (
        (("srun", "fork"), _OF_A_TASK),
        (("local srun", "local fork"), _OF_A_JOB),  # where TERM cancels
    )
    for launcher in launchers
    for job, sent in of_jobs.items()
}
"""By launcher and job: what is sent before the ranks have handlers (of INT, Python has one), after, and so on."""


@dataclass
class Job:
    """One of the jobs, running and afterwards. The place knows the functions."""

    name: str
    launcher: str
    run_dir: Path
    has_ended: Callable[[], bool]
    ancestry: Callable[[int], list[int]]
    """The process of a rank and those above it, up to its task's first; on this machine, up to the job's own."""
    batch_process: Callable[[], list[int]]
    """The job's own process: on a cluster, the batch script's. None once that has ended."""
    cancel: Callable[[], object]
    signal_all: Callable[[str], object] = lambda name: None
    """As `scancel --signal`."""
    lose_node: Callable[[str], object] = lambda node: None
    heard: set[str] = field(default_factory=set)
    commands: list[list[str]] = field(default_factory=list)
    """The command lines of rank 1 and of the processes above it, as ps shows them."""
    end: dict[str, Any] = field(default_factory=dict)
    """What `cluster-ddp status --json` says of it, and exit_status."""

    def wait(self, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
        """Whether it came true before the job ended."""
        deadline = time.monotonic() + scaled(seconds)
        while not (found := condition()) and time.monotonic() < deadline and not self.has_ended():
            time.sleep(0.1)
        return found

    def wait_for(self, *names: str) -> bool:
        return self.wait(lambda: all((self.run_dir / name).exists() for name in names))

    def tell(self, name: str) -> None:
        (self.run_dir / name).touch()

    def rank(self, rank: int) -> tuple[int, str]:
        """Its process id and host in its last start."""
        begun = max(self.run_dir.glob(f"begun*-{rank}"), key=lambda path: path.stat().st_mtime)
        pid, host = begun.read_text().split()
        return int(pid), host

    def first_processes(self) -> list[int]:
        """The one process of each task that Slurm signals where it tracks processes by control groups."""
        return list(dict.fromkeys(self.ancestry(rank)[-1] for rank in (0, 1)))

    def command_lines(self) -> list[list[str]]:
        return [Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1] for pid in self.ancestry(1)]

    def hear(self, when: str, send_them: Callable[[], object]) -> None:
        """Note which of the signals both ranks get that are sent now."""
        names = SIGNALS[self.launcher, self.name].get(when, ())

        def count(name: str, rank: int) -> int:
            path = self.run_dir / f"got-{name}-{rank}"
            return path.read_text().count("\n") if path.exists() else 0

        before = {(name, rank): count(name, rank) for name in names for rank in (0, 1)}
        if names or when == "before":
            send_them()
        self.wait(lambda: all(count(*one) > before[one] for one in before), 10)
        self.heard |= {f"{one} {when}" for one in names if all(count(one, rank) > before[one, rank] for rank in (0, 1))}

    @property
    def log(self) -> str:
        return (self.run_dir / "job.log").read_text()

    @property
    def logs(self) -> str:
        return "".join(f"==> {path.name} <==\n{path.read_text()}" for path in sorted(self.run_dir.glob("*.log")))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def send(pids: Iterable[int], *names: str) -> None:
    for pid in pids:
        for name in names:
            with contextlib.suppress(ProcessLookupError):  # a signal before may have ended it
                os.kill(pid, signal.Signals[f"SIG{name}"])


def signals(job: Job) -> None:
    """Each task's first process alone is signalled, before the ranks have handlers and after; then the batch one."""
    sent, first, job.commands = SIGNALS[job.launcher, job.name], job.first_processes(), job.command_lines()

    def early() -> None:
        send(first, *sent.get("before", ()))
        time.sleep(1.5 if "before" in sent else 0)
        job.tell("go")

    job.hear("before", early)
    job.hear("after", lambda: send(first, *sent["after"]))
    job.hear("finally", lambda: send(first, *sent["finally"]))
    job.hear("to the batch process", lambda: send(job.batch_process(), *sent["to the batch process"]))
    job.tell("end")


def loses_a_parent(job: Job) -> None:
    """What has started rank 1 is killed."""
    send([parent(job.rank(1)[0])], "KILL")


def loses_a_keeper(job: Job) -> None:
    """The first process on the second node is killed; on this machine, the job's."""
    send(job.first_processes()[-1:], "KILL")


def trains(job: Job) -> None:
    """Slurm's warning to all processes, before the script has a handler."""
    job.signal_all("USR1")
    time.sleep(1.5)
    job.tell("go")


EVENTS: dict[str, Callable[[Job], object]] = {
    "hears": signals,
    "stops": signals,
    "cancelled": lambda job: job.wait_for("ready-0", "ready-1") and job.cancel(),
    "ended": lambda job: send(job.first_processes(), "TERM"),
    "parent": loses_a_parent,
    "keeper": loses_a_keeper,
    "trains": trains,
    "lost": lambda job: job.lose_node(job.rank(1)[1]),
}


def play(jobs: list[Job], at_most_s: float) -> None:
    """Let happen to each job what happens to it; wait until all have ended."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(_happen, jobs))
        list(pool.map(lambda job: job.wait(lambda: False, at_most_s), jobs))


def _happen(job: Job) -> None:
    if job.name in EVENTS and job.wait_for("begun-0", "begun-1"):
        time.sleep(0.1)  # it may have made the file and not written it
        EVENTS[job.name](job)


def ancestry(pid: int, top: int | None = None) -> list[int]:
    """A process and those above it, up to its task's first, or up to `top`."""
    found = [pid]
    while found[-1] != top and not processes.name(above := parent(found[-1])).startswith("slurmstepd"):
        found.append(above)
    return found
