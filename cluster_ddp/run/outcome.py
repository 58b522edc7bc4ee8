"""How a start of a job ended, and what failed first: the `end` events of the journal.

The job's agent writes one at the end of each start. The next start, `status`, `report` and the log's last lines read
it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cluster_ddp.errors import one_line
from cluster_ddp.run.names import Kind, Then

STATES = ("COMPLETED", "STOPPED", "FAILED", "CANCELLED", "TIMEOUT")
"""How a start ends. STOPPED is stopped in time: to be resumed."""

AGENT_KILLED = "its agent was killed"
FOR_MEMORY = "killed by the kernel for memory"

TERM, KILL = 128 + signal.SIGTERM, 128 + signal.SIGKILL
"""Statuses of a process that these signals ended."""


class Failure(NamedTuple):
    """What failed first."""

    rank: int | None
    """None for a task that has several."""
    host: str
    """Empty if unknown."""
    status: int
    words: str
    """Why; empty if only its status is known."""
    kind: str = ""
    """One of `Kind`; empty if unknown."""

    @property
    def text(self) -> str:
        """In words: "rank 1 on node2: ValueError: x"."""
        who = " on ".join(filter(None, ["" if self.rank is None else f"rank {self.rank}", self.host]))
        return ": ".join(filter(None, [who, self.words]))


class Outcome(NamedTuple):
    """How one start of a job ended."""

    job: str
    """Its label: 12, or 12_3 for an array task."""
    start: int
    """Number of starts before it: restarts and requeues."""
    state: str
    """One of `STATES`."""
    status: int
    """Exit status of the job."""
    first: Failure | None = None
    """What failed first; None if nothing did."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes that are lost: their agents are gone and Slurm's daemon does not answer, or srun says so."""
    then: str = Then.END
    """What followed: one of `Then`."""
    time: float = 0.0
    """When it ended, in seconds of UNIX time; 0 if unknown."""

    @property
    def starts_again(self) -> bool:
        """Whether the job starts again."""
        return self.then != Then.END

    @property
    def failure(self) -> str:
        """What failed first and which nodes were lost, in words; empty if nothing failed."""
        lost, first = in_words(self.lost_nodes), self.first
        if first is not None and lost:  # what ended because of it is no news
            is_lost = first.host in self.lost_nodes and first.kind == Kind.NODE
            first = None if is_lost or first.words == by_signal(TERM) else first
        return "; ".join(filter(None, (first.text if first is not None else "", lost)))


def of_record(record: Mapping[str, Any]) -> Outcome | None:
    """Return what an `end` event says; None if it is damaged."""
    first, lost, state, then = (record.get(name) for name in ("first", "lost_nodes", "state", "then"))
    try:
        return Outcome(
            job=one_line(str(record["job"])),
            start=_whole(record["start"], 10**9),
            state=STATES[STATES.index(state)],
            status=_whole(record["status"], 255),
            first=None if first is None else _failure(first),
            lost_nodes=tuple(one_line(str(name)) for name in lost or ()),
            then=then if then in (Then.RESTART, Then.REQUEUE) else Then.END,
            time=record["time"],
        )
    except (KeyError, TypeError, ValueError):
        return None


def by_signal(status: int) -> str:
    """Which signal ended a process without a word; empty if none did: SIGABRT speaks itself."""
    numbers = {*signal.Signals} - {signal.SIGABRT}
    return f"killed by {signal.Signals(status - 128).name}" if status - 128 in numbers else ""


def in_words(lost: Sequence[str]) -> str:
    """Return which nodes are lost, in words; empty if none."""
    names = ", ".join(filter(None, lost)) or "a node of the job"
    return f"{names} {'is' if len(lost) == 1 else 'are'} lost (node failure)" if lost else ""


def _failure(record: Mapping[str, Any]) -> Failure:
    rank = None if record["rank"] is None else _whole(record["rank"], 10**9)
    host, words = one_line(str(record["host"])), one_line(str(record["words"]))
    return Failure(rank, host, _whole(record["status"], 255), words, one_line(str(record.get("kind") or "")))


def _whole(value: object, most: int) -> int:
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is no whole number of 0 to {most}")
    return value
