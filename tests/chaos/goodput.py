"""The share of the allocation's time that went into steps that were kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_HELD = ("RUNNING", "COMPLETING")
"""The states of a job that has its nodes."""


class HeldTime:
    """How long a job had its nodes, as far as was seen: between two looks it was as at the first one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before: tuple[str, float] | None = None

    def saw(self, state: str, now_s: float) -> None:
        """A state, and when it was seen, in seconds of any clock."""
        if self._before is not None and self._before[0] in _HELD:
            self.seconds += now_s - self._before[1]
        self._before = state, now_s


class Training(NamedTuple):
    """One that has completed, with the same steps as the undisturbed one."""

    way: str
    """How it was started again: the options of the job."""
    held_s: float
    faults: int
    steps_s: float
    """How long its steps take undisturbed."""


def summary(trainings: Sequence[Training]) -> dict[str, Any]:
    """Goodput, and the mean seconds between two faults, of completed trainings and for each way; empty without any."""
    if not trainings:
        return {}
    ways = sorted({one.way for one in trainings})
    groups = {"all": trainings, **{way: [one for one in trainings if one.way == way] for way in ways}}
    return {name: _of(group) for name, group in groups.items()}


def _of(group: Sequence[Training]) -> dict[str, Any]:
    held_s, faults = sum(one.held_s for one in group), sum(one.faults for one in group)
    steps_s = sum(one.steps_s for one in group)
    between_s = round(held_s / faults, 1) if faults else None
    return {"goodput": round(steps_s / held_s, 3), "s_between_faults": between_s, "trainings": len(group)}
