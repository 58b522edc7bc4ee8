"""Values that each step changes and a resume begins again: they repeat those of the first two steps of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_STEPS = 2


class FirstSteps:
    """Keeps plain values after the first steps of a run, and compares those after the first steps since a resume.

    A value that follows from the number of the step or the epoch, or from the batch, does not repeat them.
    """

    def __init__(self) -> None:
        self.of_run: Sequence[Mapping[str, Any]] = ()
        """After the first and the second step of the run: for the checkpoint."""
        self._now: list[Mapping[str, Any]] = []
        self._is_resumed = self._compares = False

    @property
    def are_over(self) -> bool:
        """Whether enough is noted."""
        return len(self._now) == _STEPS

    def resume(self, of_run: Sequence[Mapping[str, Any]], *, inside: bool) -> None:
        """Begin again with those of the run. `inside` an epoch: at its beginning, they may rightly be those again."""
        self.of_run, self._now, self._is_resumed, self._compares = of_run, [], True, inside

    def note(self, values: Mapping[str, Any]) -> None:
        """Note the values after a step, until `are_over`."""
        self._now.append(values)
        if not self._is_resumed:
            self.of_run = [*self._now]

    def repeated(self) -> list[str]:
        """Return, once, the names of values that change in each step, and repeat those of the run's first steps."""
        if not (self._compares and self.are_over and len(self.of_run) == _STEPS):
            return []
        self._compares = False
        (first, second), (one, other) = self.of_run, self._now
        names = first.keys() & second.keys() & one.keys() & other.keys()
        return [
            name
            for name in sorted(names)
            if first[name] != second[name] and (one[name], other[name]) == (first[name], second[name])
        ]
