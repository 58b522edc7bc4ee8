"""How a start of a job ended, and what failed first: outcome.json in the run directory, one record.

The job's agent writes it at the end of each start. The next start, `status`, `report` and the log's last lines read it.
The ranks' supervisors report what failed (`End`). Only if they are silent, logs count (`first_failure`).
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.agent.rank_notes import one_line
from cluster_ddp.run.files import atomic_write, read_regular
from cluster_ddp.run.names import File

VERSION = 1
STATES = ("COMPLETED", "STOPPED", "FAILED", "CANCELLED", "TIMEOUT")
"""How a start ends. STOPPED is stopped in time: to be resumed."""

AGENT_KILLED = "its agent was killed"
FOR_MEMORY = "killed by the kernel for memory"

TERM, KILL = 128 + signal.SIGTERM, 128 + signal.SIGKILL
"""Statuses of a process that these signals ended."""

_BYTES = 1024 * 1024


class End(NamedTuple):
    """How a rank ended, as its supervisor says."""

    rank: int | None
    """None for the parent of several ranks."""
    host: str
    status: int
    """Its exit status; 128 + N if signal N ended it."""
    words: str = ""
    """Why it failed, as it has noted itself."""
    is_consequence: bool = False
    """Whether it failed because another rank did, or was gone."""
    is_oom: bool = False
    """Whether the kernel has killed a process beside it for memory."""
    was_stopped: bool = False
    """Whether it has noted that it was stopped in time."""
    step: int | None = None
    """Number of steps of the training that were done, as it has noted itself; None if unknown."""
    waits: bool = False
    """Whether it has waited for others in vain."""

    @property
    def how(self) -> str:
        """In words: "ended with status 3", "was killed by SIGKILL"."""
        if self.status - 128 in {*signal.Signals}:
            return f"was killed by {signal.Signals(self.status - 128).name}"
        return f"ended with status {self.status}"


class Failure(NamedTuple):
    """What failed first."""

    rank: int | None
    """None for the parent of several ranks, or a task that has several."""
    host: str
    """Empty if unknown."""
    status: int
    words: str
    """Why; empty if only its status is known."""

    @property
    def text(self) -> str:
        """In words: "rank 1 on node2: ValueError: x"."""
        who = " on ".join(filter(None, ["" if self.rank is None else f"rank {self.rank}", self.host]))
        return ": ".join(filter(None, [who, self.words]))


class Outcome(NamedTuple):
    """How one start of a job ended."""

    job: str
    """Its label: 12, or 12_3 for an array task."""
    restart: int
    """Number of restarts before this start."""
    state: str
    """One of `STATES`."""
    status: int
    """Exit status of the job."""
    first: Failure | None = None
    """What failed first; None if nothing did."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes that are lost, as `lost_nodes` names them."""
    requeued: bool = False
    """Whether the job starts again."""
    time: float = 0.0
    """When it ended, in seconds of UNIX time; 0 if unknown."""

    @property
    def failure(self) -> str:
        """What failed first and which nodes were lost, in words; empty if nothing failed."""
        lost, first = in_words(self.lost_nodes), self.first
        if first is not None and lost:  # what ended because of it is no news
            is_lost = first.host in self.lost_nodes and first.words == AGENT_KILLED
            first = None if is_lost or first.words == by_signal(TERM) else first
        return "; ".join(filter(None, (first.text if first is not None else "", lost)))


def write(folder: Path | None, outcome: Outcome, *, shared: bool = False) -> None:
    """Write outcome.json, whole or not at all: a full disk must not cost the job's status, nor its requeue.

    Args:
        folder: the run directory; None if there is none.
        outcome: its time is now, if it has none.
        shared: whether the group may read the file.
    """
    if folder is None:
        return
    first = None if outcome.first is None else outcome.first._asdict()
    now = {"time": round(outcome.time or time.time(), 3)}
    text = json.dumps({"version": VERSION, **outcome._asdict(), "first": first, **now}) + "\n"
    with contextlib.suppress(OSError), atomic_write(folder / File.OUTCOME, shared=shared) as file:
        file.write(text.encode())


def read(folder: Path) -> Outcome | None:
    """Read outcome.json; None if there is none. It may be of an earlier start: compare `job` and `restart`.

    Raises:
        OSError: it can't be read, or is not a regular file.
        ValueError: it is damaged, or of a newer version.
    """
    try:
        record = json.loads(read_regular(folder / File.OUTCOME, _BYTES))
        if record.get("version") != VERSION:
            raise ValueError(f"it has version {record.get('version')!r:.20}, and {VERSION} is known")
        first, time_s = record.get("first"), float(record.get("time", 0))
        outcome = Outcome(
            job=one_line(str(record["job"])),
            restart=_whole(record["restart"], 10**9),
            state=record["state"],
            status=_whole(record["status"], 255),
            first=None if first is None else _failure(first),
            lost_nodes=tuple(one_line(str(name)) for name in list(record.get("lost_nodes", []))),
            requeued=record.get("requeued") is True,
            time=time_s,
        )
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if outcome.state not in STATES or not math.isfinite(time_s):
        raise ValueError("it has no state that a start ends in, or no time")
    return outcome


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
    return Failure(rank, host, _whole(record["status"], 255), words)


def _whole(value: object, most: int) -> int:
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is no whole number of 0 to {most}")
    return value
