"""failures.jsonl: what has failed in the starts of a run's last job, and what followed. The job's agent writes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.protocol import File, Then
from cluster_ddp.run_files import json_lines

_THEN = {Then.RESTART: "Restarted in the allocation", Then.REQUEUE: "Requeued"}
_MOST = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A start that has failed."""

    time: float
    """When, in seconds of UNIX time."""
    node: str
    """Where it failed first; empty if unknown."""
    rank: int | None
    """Which rank failed first; None if unknown, or a whole node."""
    words: str
    """Why; empty if unknown."""
    lost_s: float | None
    """Seconds of training that were lost; None if unknown."""
    then: str
    """What followed: one of `protocol.Then`."""
    without: tuple[str, ...]
    """Nodes that were left out from then on."""

    @property
    def when(self) -> str:
        """When, in the local time of this machine."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))

    @property
    def text(self) -> str:
        """What failed and what followed, in words."""
        where = f" on {self.node}" if self.node else ""
        who = self.node or "Unknown rank" if self.rank is None else f"Rank {self.rank}{where}"
        then = _THEN.get(self.then, "The job ended")
        without = f", without {', '.join(self.without)}" if self.without else ""
        lost = "" if self.lost_s is None else f" Lost: {self.lost_s:.0f} s."
        return f"{who}: {self.words or 'no reason is known'}. {then}{without}.{lost}"


def read(run_dir: Path) -> list[Failure]:
    """Return the failures of a run's last job, in their order. Records without a time are left out."""
    return [_failure(one) for one in json_lines(run_dir / File.FAILURES) if _seconds(one.get("time")) is not None]


def restarts(failures: Sequence[Failure]) -> int:
    """Return how many of them were followed by a restart in the allocation."""
    return sum(one.then == Then.RESTART for one in failures)


def lost_s(failures: Sequence[Failure]) -> float:
    """Return the seconds of training that were lost, as far as they are known."""
    return sum(one.lost_s or 0.0 for one in failures)


def _failure(record: dict[str, Any]) -> Failure:
    rank, lost, without = record.get("rank"), record.get("lost_s"), record.get("without")
    return Failure(
        time=_seconds(record["time"]) or 0.0,
        node=_text(record.get("node")),
        rank=rank if type(rank) is int else None,
        words=_text(record.get("words")).rstrip("."),
        lost_s=_seconds(lost),
        then=_text(record.get("then")),
        without=tuple(filter(None, map(_text, without))) if isinstance(without, list) else (),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < _MOST else None
