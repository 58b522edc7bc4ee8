"""What a script sets in a dataset as it trains, such as the level of a curriculum: no checkpoint has the dataset."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from cluster_ddp.errors import DataError, first_of

log = logging.getLogger("cluster_ddp")

_PLAIN = bool, int, float, str
_SET_AGAIN = "set it for each epoch, before the loop over the shard: dataset.level = level_of(epoch)"


def attributes(dataset: object) -> dict[str, object]:
    """Return the attributes of a dataset, and of the datasets in them as in a Subset's, by their places."""
    found: dict[str, object] = {}
    left, seen = {"dataset": dataset}, set[int]()
    while left:
        prefix, one = left.popitem()
        if id(one) in seen:
            continue
        seen.add(id(one))
        own = {f"{prefix}.{name}": value for name, value in getattr(one, "__dict__", {}).items()}
        found |= own
        left |= {place: value for place, value in own.items() if isinstance(value, Dataset)}
    return found


def are_same(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether each is the same object, or as a plain value equal."""
    return before.keys() == now.keys() and all(_is_same(before[place], now[place]) for place in before)


def _is_same(before: object, now: object) -> bool:
    return before is now or (isinstance(before, _PLAIN) and isinstance(now, _PLAIN) and before == now)


class PlainAttributes:
    """The numbers, flags and texts among a dataset's attributes, from its shard's making to a resume."""

    def __init__(self, dataset: object) -> None:
        self._dataset, self._made = dataset, self._now(dataset)
        self._saved: Mapping[str, Any] = {}

    def changed(self) -> dict[str, Any]:
        """Return those that are other ones than when this was made, or before a resume, until `tell`."""
        now = self._now(self._dataset)
        return {**self._saved, **{place: value for place, value in now.items() if self._made.get(place) != value}}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Begin again with those that `changed` had returned."""
        self._saved = saved

    def tell(self, epoch: int) -> None:
        """Say once after `resume` which the script has not set again. Call it in the epoch's loop."""
        now, saved, self._saved = self._now(self._dataset), self._saved, {}
        lost = [f"{place} = {value!r}" for place, value in saved.items() if now.get(place) != value]
        if lost:
            asked = f"Resuming in epoch {epoch + 1}:"
            found = f"the dataset had other attributes before the resume: {first_of(lost)}."
            log.error("%s\nTraining continues.", DataError(asked, found, _SET_AGAIN))

    @staticmethod
    def _now(dataset: object) -> dict[str, Any]:
        return {place: value for place, value in attributes(dataset).items() if isinstance(value, _PLAIN)}
