"""What a tracker does: it takes the records of metrics.jsonl, and hands their numbers to a library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster_ddp.protocol import GLOBAL_STEP, OF_FIRST_RECORD


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The run that is tracked."""

    name: str
    """Name of the run directory."""
    project: str
    """What the run is one of: the job's name."""
    folder: Path
    """The tracker's own folder, absolute. It exists."""
    id: str
    """The run's id, the same in each start; letters and digits."""
    config: Mapping[str, Any]
    """Configuration, command and versions, by name; the values are numbers or text."""


class Tracker(Protocol):
    """Hands the numbers of records to a library. All methods are called in one thread, and may raise anything."""

    upload: str
    """After `begin`: the command that uploads the run from a machine with a network; empty if nothing is to upload."""

    def begin(self, run: Run) -> None:
        """Begin the run, or begin it anew: what the folder has of an earlier start goes. Imports the library.

        Args:
            run: the run.
        """

    def log(self, points: Sequence[Point]) -> None:
        """Take points, in the order of their records, and write them out.

        Args:
            points: the numbers of some records.
        """

    def close(self) -> None:
        """Write what is left, and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The numbers of a record."""

    step: int
    """Steps since the training began. Without a `Checkpointer`, how many records there were before."""
    time_s: float
    """When it was logged, in seconds of UNIX time."""
    values: Mapping[str, float]
    """Each number by its tag, such as train/loss."""

    @staticmethod
    def of(record: Mapping[str, Any], number: int) -> Point:
        """Return the numbers of a record.

        Args:
            record: of metrics.jsonl.
            number: how many records were before it.
        """
        step, time_s, kind = record.get(GLOBAL_STEP), record.get("time"), record.get("kind")
        values = {f"{kind}/{name}": float(value) for name, value in _numbers(record)}
        return Point(
            step=step if isinstance(step, int) else number,
            time_s=float(time_s) if isinstance(time_s, (int, float)) else 0.0,
            values=values,
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield the values of nested dictionaries by names such as topology/rank. Lists become text, None is left out.

    Args:
        values: the dictionary.
        prefix: of the names.
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, (str, int, float)):
            yield prefix + name, value
        elif value is not None:
            yield prefix + name, str(value)


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    for name, value in record.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and name not in ("time", GLOBAL_STEP, *OF_FIRST_RECORD):
            yield name, value
