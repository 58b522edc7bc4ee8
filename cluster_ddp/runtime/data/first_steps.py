"""Values that each step changes and a resume begins again: they repeat those of the first two steps of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_STEPS = 2

Steps = Sequence[Mapping[str, Any]]


class FirstSteps:
    """Keeps plain values after the first steps of a run, and compares those after the first steps since a resume.

    A value that follows from the number of the step or the epoch, or from the batch, does not repeat them. One that
    each epoch begins again does so rightly after a resume between two epochs: the newest epoch's first steps show it.
    """

    def __init__(self) -> None:
        self._of_run: Steps = ()
        self._of_epoch: Steps = ()  # the newest one, but not the run's first
        self._now: list[Mapping[str, Any]] = []
        self._is_of_run, self._compares, self._is_inside = True, False, False
        self._repeated: list[str] = []

    @property
    def are_over(self) -> bool:
        """Whether enough is noted."""
        return len(self._now) == _STEPS

    @property
    def noted(self) -> tuple[Steps, Steps]:
        """What is noted of the run's first steps, and of those of its newest epoch: for the checkpoint."""
        return self._of_run, self._of_epoch

    def resume(self, noted: tuple[Steps, Steps], *, inside: bool) -> None:
        """Begin again with what was `noted` in the run. `inside`: an epoch began before the resume."""
        self._of_run, self._of_epoch = noted
        self._now, self._is_of_run, self._compares, self._is_inside = [], False, True, inside

    def begin_epoch(self) -> None:
        """Call it with the first step of an epoch, before `note`, and with the first one after a resume."""
        if self._now:
            self._now, self._is_of_run, self._compares = [], False, False

    def note(self, values: Mapping[str, Any]) -> None:
        """Note the values after a step, until `are_over`."""
        self._now.append(values)
        if self._is_of_run:
            self._of_run = [*self._now]
        elif not self._compares:
            self._of_epoch = [*self._now]
        elif self.are_over:
            self._repeated = self._compared()

    def repeated(self) -> list[str]:
        """Return, once, the names of values that change in each step, and repeat those of the run's first steps."""
        found, self._repeated = self._repeated, []
        return found

    def _compared(self) -> list[str]:
        if len(self._of_run) < _STEPS:
            return []
        everywhere = set.intersection(*({*step} for step in (*self._of_run, *self._now)))
        found = []
        for name in sorted(everywhere):
            first, second = before = _values(self._of_run, name)
            is_of_each_epoch = not self._is_inside and _values(self._of_epoch, name) == before
            if first != second and _values(self._now, name) == before and not is_of_each_epoch:
                found.append(name)
        return found


def _values(steps: Steps, name: str) -> list[Any]:
    return [step.get(name) for step in steps]
