"""Which rank failed first, and why: one record for each start of a job, outcome.json in its run directory.

The job's agent writes it at the end of each start. The next start, `status`, `report` and the log's last lines read it.
What failed is told by the ranks' keepers (`End`). Only where they are silent, logs count (`log_words`).
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.agent.notes import one_line, read_regular
from cluster_ddp.files import atomic_write
from cluster_ddp.protocol import EXIT_STOPPED, File

VERSION = 1
STATES = ("COMPLETED", "STOPPED", "FAILED", "CANCELLED", "TIMEOUT")
"""How a start ends. STOPPED is stopped in time: to be resumed."""

AGENT_KILLED = "its agent was killed"
ENDED_EARLY = "ended with status 0 while other ranks still computed"
FOR_MEMORY = "killed by the kernel for memory"

LOST_WORDS = ("connection closed by peer", "connection reset", "broken pipe", "connection refused", "failed to recv")
"""What gloo (transport/tcp: pair.cc, error.cc) and torch's store say, in small letters, if another rank is gone."""

TERM, KILL = 128 + signal.SIGTERM, 128 + signal.SIGKILL
"""Statuses of a process that these signals ended."""

_BYTES = 1024 * 1024
# Errors of torch.distributed are RuntimeErrors; a ConnectionError is of a library that talks to another machine.
_OF_RANKS = re.compile(r"(RuntimeError|torch\.distributed\.Dist\w+Error|ncclRemoteError)\b")
_NCCL_WORDS = "remote process exit"  # exited, exiting (2.18 to 2.21)


class End(NamedTuple):
    """How a rank ended, as its keeper says."""

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
    status: int
    words: str
    """Why; empty if only its status is known."""

    @property
    def text(self) -> str:
        """In words: "rank 1 on node2: ValueError: x"."""
        return failure_text(self.rank, self.host, self.words)


def failure_text(rank: int | None, host: str, words: str) -> str:
    """Say what failed; see `Failure.text`. An empty host is unknown."""
    who = " on ".join(filter(None, ["" if rank is None else f"rank {rank}", host]))
    return ": ".join(filter(None, [who, words]))


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
            first = None if is_lost or first.words == _by_signal(TERM) else first
        return "; ".join(filter(None, (first.text if first is not None else "", lost)))


def write(folder: Path | None, outcome: Outcome, *, shared: bool = False) -> None:
    """Write outcome.json, whole or not at all: a full disk must not cost the job's status, nor its requeue.

    Args:
        folder: the run directory, if there is one.
        outcome: what to write. Its time is now, if it has none.
        shared: whether the group may read it, else its owner only.
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


WordsOf = Callable[[End], str]


def first_failure(
    ends: Sequence[End], gone: Sequence[End] = (), silent: Failure | None = None, *, words_of: WordsOf = lambda end: ""
) -> Failure | None:
    """Return what failed first: the first cause that was told; else what looks most like one.

    Args:
        ends: in the order in which they were told.
        gone: ranks whose agent ended before it told how they ended.
        silent: what failed first by srun's word, of tasks that have not even told that they begin.
        words_of: says why a rank failed that has not noted it, such as the last error in its log, or nothing. It is
            called only until a cause is found.

    Returns:
        None if nothing failed: status 75 is no failure, nor any other of a rank that was stopped in time.
    """
    failed = [one for one in ends if one.status not in (0, EXIT_STOPPED) and not one.was_stopped]
    killed: list[End] = []  # by KILL, after others failed: perhaps with them
    consequences: list[End] = []
    ended: list[End] = []  # by TERM, or by KILL after it
    for one in failed:
        end = _with_words(one, words_of)
        was_killed = end.status == KILL and not end.is_oom and not end.words
        if end.is_consequence:
            consequences.append(end)
        elif (end.status == TERM and not end.words) or (was_killed and ended):
            ended.append(end)
        elif was_killed and consequences:
            killed.append(end)
        else:
            return _named(end)
    if silent is not None and silent.status != TERM:
        return silent
    if gone:
        return _named(gone[0]._replace(status=KILL, words=AGENT_KILLED))
    if consequences and (early := _ended_early(ends, consequences[0])) is not None:
        return _named(early._replace(status=consequences[0].status, words=ENDED_EARLY))
    return next((_named(one) for one in (*killed, *consequences, *ended)), None)


def _with_words(end: End, words_of: WordsOf) -> End:
    """Say why a rank failed, if that is not known, and no signal ended it without a word."""
    if end.words or _by_signal(end.status):
        return end
    words = one_line(words_of(end))
    return end._replace(words=words, is_consequence=end.is_consequence or has_lost_another(words))


def _ended_early(ends: Sequence[End], consequence: End) -> End | None:
    if consequence.rank is None:  # it failed after its ranks
        return None
    before = ends[: next(index for index, one in enumerate(ends) if one.rank == consequence.rank)]
    return next((one for one in before if one.status == 0 and not one.was_stopped), None)


def _named(end: End) -> Failure:
    words = end.words or _by_signal(end.status)
    if end.rank is None and not words:
        words = f"the parent of its ranks {end.how}"
    if end.is_oom:
        words = for_memory(words, end.status)
    return Failure(end.rank, end.host, end.status, words)


def _by_signal(status: int) -> str:
    """Which signal ended a process without a word; empty if none did: SIGABRT speaks itself."""
    numbers = {*signal.Signals} - {signal.SIGABRT}
    return f"killed by {signal.Signals(status - 128).name}" if status - 128 in numbers else ""


def for_memory(words: str, status: int) -> str:
    """Say of a failure that the kernel has killed a process for memory; not of one that TERM ended."""
    if status == TERM or FOR_MEMORY in words:
        return words
    if words in (_by_signal(KILL), AGENT_KILLED):
        return FOR_MEMORY
    return f"{words} (the kernel has killed a process for memory)".strip()


def has_lost_another(words: str) -> bool:
    """Whether an error says that another rank is gone: then that one's failure is the cause."""
    return bool(_OF_RANKS.match(words)) and any(part in words.lower() for part in (*LOST_WORDS, _NCCL_WORDS))


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
