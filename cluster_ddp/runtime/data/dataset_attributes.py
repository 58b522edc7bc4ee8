"""What a script sets in a dataset as it trains, such as the level of a curriculum: no checkpoint has the dataset."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from cluster_ddp.errors import DataError, first_of
from cluster_ddp.runtime import rng
from cluster_ddp.runtime.contents import content_of
from cluster_ddp.runtime.data.first_steps import FirstSteps

log = logging.getLogger("cluster_ddp")

_PLAIN = bool, int, float, str
_MOST_ITEMS = 1000
_SET_AGAIN = (
    "set them for each epoch, before the loop over the shard, by the epoch's number; "
    "what depends on the training: from a part, kept = types.SimpleNamespace(level=0)"
)


def attributes(dataset: object, name: str = "dataset") -> dict[str, object]:
    """Return the attributes of a dataset, and of the datasets in them as in a Subset's, by their places: `name` first.

    Of another object in them, such as a transform, only the plain ones.
    """
    found: dict[str, object] = {}
    left, seen = {name: dataset}, set[int]()
    while left:
        prefix, one = left.popitem()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for place, value in _own(prefix, one).items():
            found[place] = value
            if isinstance(value, Dataset):
                left[place] = value
            elif not isinstance(value, type):
                found |= {inner: part for inner, part in _own(place, value).items() if isinstance(part, _PLAIN)}
    return found


def _own(prefix: str, owner: object) -> dict[str, object]:
    """The attributes of an object; of a small dictionary, what it has; of a partial function, its arguments."""
    if isinstance(owner, functools.partial):
        arguments: dict[object, object] = dict(enumerate(owner.args))
        owner = arguments | owner.keywords
    if isinstance(owner, dict):
        return {f"{prefix}[{key!r}]": value for key, value in owner.items()} if len(owner) <= _MOST_ITEMS else {}
    return {f"{prefix}.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}


def are_same(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether each is the same object, or as a plain value equal."""
    return before.keys() == now.keys() and all(_is_same(before[place], now[place]) for place in before)


def _is_same(before: object, now: object) -> bool:
    return before is now or (isinstance(before, _PLAIN) and isinstance(now, _PLAIN) and before == now)


class PlainAttributes:
    """What a dataset's attributes have, from its shard's making to a resume: see `_plain`."""

    def __init__(self, dataset: object) -> None:
        self._dataset, self._made = dataset, self._now(dataset)
        self._saved: Mapping[str, Any] = {}
        self._at_start: Mapping[str, Any] = {}
        self._saved_then: Mapping[str, Any] = {}
        self.first_steps = FirstSteps()
        """Those that had changed after the first batches of the run."""

    def changed(self) -> dict[str, Any]:
        """Return those that are other ones than when this was made, or before a resume, until `tell`."""
        now = self._now(self._dataset)
        changed = {place: value for place, value in now.items() if self._made.get(place) != value}
        return {**self._saved, **{place: value for place, value in changed.items() if not self._is_new_item(place)}}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Begin again with those that `changed` had returned."""
        self._saved = self._saved_then = saved

    def begin_pass(self) -> None:
        """Call it before the first batch of a pass."""
        self.first_steps.begin_epoch()
        self._at_start = self._now(self._dataset) if self._saved else {}

    def tell(self, epoch: int) -> None:
        """Say once after `resume` which the script has not set: they are as they were made, or change as at first.

        Call it in the loop, after each batch.
        """
        if self.first_steps.are_over and not self._saved:  # to look takes time
            return
        now, saved, self._saved = self._now(self._dataset), self._saved, {}
        # The loop may refine a tensor from its first batch on; a number that it sets then, may follow from the batch.
        held = {**now, **{place: value for place, value in self._at_start.items() if isinstance(value, bytes)}}
        lost = [place for place, value in saved.items() if held.get(place) == self._made.get(place) != value]
        if not self.first_steps.are_over:
            self.first_steps.note({place: value for place, value in now.items() if self._made.get(place) != value})
            lost += self.first_steps.repeated()
        lost = [f"{place}{_shown(self._saved_then[place])}" for place in lost if place in self._saved_then]
        if lost:
            asked = f"Resuming in epoch {epoch + 1}:"
            found = f"the dataset had other attributes before the resume: {first_of(lost)}."
            log.error("%s\nTraining continues.", DataError(asked, found, _SET_AGAIN))

    def generators(self) -> list[str]:
        """Return the places of random number generators in the dataset, and in the objects in it as a transform."""
        return generators("dataset", self._dataset)

    def _is_new_item(self, place: str) -> bool:
        """Whether it is one that a dictionary had not at first, as that of a cache grows."""
        return place.endswith("]") and place not in self._made

    @staticmethod
    def _now(dataset: object) -> dict[str, Any]:
        found = {place: _plain(value) for place, value in attributes(dataset).items()}
        return {place: value for place, value in found.items() if value is not None}


def kept(name: str, owner: object) -> dict[str, object]:
    """Return what lists, small tensors and arrays, and generators of random numbers, in an object have, by places."""
    values = attributes(owner, name).items()
    found = {place: [content_of(one)] if isinstance(one, rng.GENERATORS) else _plain(one) for place, one in values}
    return {place: one for place, one in found.items() if isinstance(one, bytes | list)}


def generators(name: str, owner: object) -> list[str]:
    """Return the places of random number generators in an object by that name, and in the objects in it."""
    found = set[str]()
    for place, value in attributes(owner, name).items():
        inner = _own(place, value) if not isinstance(value, type) else {}
        found |= {inside for inside, one in {place: value, **inner}.items() if isinstance(one, rng.GENERATORS)}
    return sorted(found)


def _plain(value: object) -> object:
    """A plain value; the digest of a small tensor, array or list; of another object its class, or a function's name."""
    if isinstance(value, _PLAIN):
        return value
    if value is None or isinstance(value, (dict, *rng.GENERATORS)):  # what a dictionary has, is looked at
        return None
    is_array = isinstance(value, torch.Tensor | np.ndarray)
    if not is_array and not isinstance(value, list | tuple | set | deque):
        return f"a {getattr(value, '__qualname__', type(value).__qualname__)}"
    found = content_of(value.detach() if isinstance(value, torch.Tensor) else value)
    digest = hashlib.sha256(repr(found).encode())
    return None if found is None else digest.digest() if is_array else [digest.hexdigest()]


def _shown(value: object) -> str:
    return f" = {value!r}" if isinstance(value, _PLAIN) else ""
