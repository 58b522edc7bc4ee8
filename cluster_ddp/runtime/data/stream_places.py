"""How far a rank's readers of a stream are, in the batches that the training has taken, and the states to resume from.

Readers are a loader's workers, or the rank itself. With split="items" all of them read the same items, so there is one
place for all.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster_ddp.runtime.checkpoint.host_copy import tensors_in
from cluster_ddp.runtime.data.stream_reader import PassStart, WorkerBatch
from cluster_ddp.runtime.data.uneven_inputs import Split


@dataclass(slots=True)
class _Place:
    taken: int = 0
    """Items that were read in this epoch."""
    is_ended: bool = False
    """Whether no batch is left in it."""
    state: bytes | None = None
    """Pickled, after the last of the batches that the training has taken; None of an iterable without one."""


class StreamPlaces:
    """The places of a number of readers, which take turns."""

    def __init__(self, readers: int, split: Split) -> None:
        self.readers, self._split = readers, split
        self.turn = 0
        """The reader whose batch is next; with split="items" always the first one."""
        self._places = [_Place() for _ in range(readers if split == "own" else 1)]
        self._is_left = [False] * len(self._places)
        self._has_ended = [False] * readers
        self._is_loaded = self._is_checked = False

    def starts(self, epoch: int, seen: int) -> list[PassStart]:
        """Return where each reader begins the next pass, after `seen` items of the epoch. Call it once for a pass."""
        starts = [
            PassStart(
                epoch=epoch,
                seen=seen if self._split == "items" else place.taken,
                is_ended=place.is_ended,
                state=place.state if self._is_loaded else None,
                is_anew=is_left,
            )
            for place, is_left in zip(self._places, self._is_left)
        ]
        self._has_ended = [start.is_ended for start in starts] if self._split == "own" else [False] * self.readers
        self._is_loaded = False
        return starts if self._split == "own" else starts * self.readers

    def take(self, record: WorkerBatch) -> None:
        """Note that the training takes a batch.

        Raises:
            CheckpointError: the iterable's state can't be saved.
        """
        place = self._place_of(record)
        place.taken += record.taken
        place.state = record.state or place.state
        if self._split == "own":
            self.turn = (record.worker + 1) % self.readers
        if record.state and not self._is_checked:
            self._is_checked = True  # now, rather than at the first save
            tensors_in(_unpickled(record.state), "the stream's state")

    def note_end(self, record: WorkerBatch) -> bool:
        """Note that a reader has no more batches, once the training has taken all of them. Return whether all have."""
        self._has_ended[record.worker] = True
        if self._split == "own" or all(self._has_ended):
            place = self._place_of(record)
            place.is_ended, place.state = True, record.state or place.state
        return all(self._has_ended)

    def to_beginning(self, *, is_begun: bool) -> None:
        """Go to the beginning of an epoch. A reader that was left before the end of a pass begins anew."""
        self._is_left = [is_begun and not place.is_ended for place in self._places]
        self._places = [_Place(state=place.state if place.is_ended else None) for place in self._places]
        self.turn = 0

    def saved(self) -> dict[str, Any]:
        """Return the places for a checkpoint."""
        return {
            "readers": self.readers,
            "turn": self.turn,
            "taken": [place.taken for place in self._places],
            "is_ended": [place.is_ended for place in self._places],
            "states": [_unpickled(place.state) for place in self._places],
        }

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Load places of `saved`, of as many readers; None: begin anew."""
        self._is_loaded, self.turn, count = True, 0, len(self._places)
        self._places = [_Place() for _ in range(count)]
        if saved is not None:
            self.turn = saved["turn"]
            states = [None if state is None else pickle.dumps(state) for state in saved["states"]]
            self._places = [_Place(*values) for values in zip(saved["taken"], saved["is_ended"], states)]

    def _place_of(self, record: WorkerBatch) -> _Place:
        return self._places[record.worker if self._split == "own" else 0]


def _unpickled(state: bytes | None) -> Any:
    return None if state is None else pickle.loads(state)  # this rank's own worker has pickled it
