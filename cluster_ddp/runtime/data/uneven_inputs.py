"""What the ranks of a stream tell each other of their next batches, beside the steps: all stop together.

With it they compare the first items that they read in a pass: a stream that splits itself must not be split again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from cluster_ddp.errors import DataError
from cluster_ddp.runtime import process_group
from cluster_ddp.runtime.model.dtensor_pieces import content

log = logging.getLogger("cluster_ddp")

Split = Literal["items", "own"]
_MIXED = -1  # instead of a digest: the workers of a rank have read different first items


class NextBatch(NamedTuple):
    """What the ranks together know of their next batches."""

    ranks: int
    """How many have one."""
    samples: int
    """Of all ranks together."""
    full: int
    """How many ranks have one of the full size."""
    firsts: list[int]
    """For each rank, the digest of the item that it read first; 0 where there was none."""


class NextBatchAgreement:
    """One small all-reduce on the CPU for each batch, which runs during the step before."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._work: dist.Work | None = None
        self._values = torch.zeros(3, dtype=torch.int64)

    def begin(self, *, has_batch: bool, samples: int, is_full: bool, first: int) -> None:
        """Begin to exchange what this rank knows of its next batch. A collective."""
        firsts = [0] * self._world_size
        firsts[self._rank] = first  # a sum over the ranks keeps it: others have 0 there
        self._values = torch.tensor([has_batch, samples, is_full, *firsts], dtype=torch.int64)
        if self._world_size > 1:
            process_group.check()
            self._work = dist.all_reduce(self._values, async_op=True)

    def collect(self) -> NextBatch:
        """Return what was exchanged last; wait for the ranks that have not begun yet.

        Raises:
            RuntimeError: gloo: a rank did not begin in time or is gone.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        ranks, samples, full, *firsts = self._values.tolist()
        return NextBatch(ranks, samples, full, firsts)


class FirstItems:
    """The digests of the items that this rank's readers read first in a pass. Warnings are logged if `told`."""

    def __init__(self, split: Split, *, told: bool) -> None:
        self._split, self._told = split, told
        self._of_workers: dict[int, int] = {}

    def note(self, worker: int, first: int) -> None:
        """Note the digest of a worker, if it is not 0."""
        if first:
            self._of_workers[worker] = first

    @property
    def mine(self) -> int:
        """What this rank tells the others."""
        firsts = set(self._of_workers.values())
        return _MIXED if len(firsts) > 1 and self._split == "items" else min(firsts, default=0)

    def check(self, of_ranks: Sequence[int]) -> None:
        """Compare all ranks' `mine`.

        Raises:
            DataError: with split="items", they differ; on all ranks.
        """
        firsts = [first for first in of_ranks if first]
        if self._split == "items" and (len(set(firsts)) > 1 or _MIXED in firsts):
            raise DataError(
                "Dealing a stream's items to ranks and workers:",
                "they do not all read the same first item: the iterable takes a share of its own, or draws random "
                "numbers that differ.",
                'if it splits itself by rank and worker: split="own"; else seed its generators the same on all ranks',
            )
        of_workers = self._of_workers.values()
        is_twice = len(set(of_workers)) < len(of_workers) or (len(firsts) > 1 and len(set(firsts)) == 1)
        if self._split == "own" and is_twice and self._told:
            _warn_once()


@functools.cache
def _warn_once() -> None:
    log.warning(
        'The iterable gives several ranks or workers the same first item, with split="own": does it take another share '
        'in each? If not, each item is trained several times: use split="items". (This is said once.)'
    )


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first array, else of its first list."""
    if getattr(batch, "ndim", 0):
        return len(batch)
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else []
    arrays = [part for part in parts if getattr(part, "ndim", 0)]
    if arrays:
        return len(arrays[0])
    nested = [part for part in parts if isinstance(part, (list, tuple, Mapping))]
    return samples_in(nested[0]) if nested else max(1, len(parts))


def digest(item: Any) -> int:
    """Return what tells items apart, above 0; the same in other processes, of arrays, bytes and plain values."""
    found = hashlib.sha256()
    parts = [item]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += part.keys()
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
        elif isinstance(part, torch.Tensor):
            found.update(content(part))
        elif isinstance(part, (str, bytes, int, float)):
            found.update(repr(part).encode())
        else:  # NumPy's arrays and PIL's images have the method
            found.update(part.tobytes() if hasattr(part, "tobytes") else type(part).__name__.encode())
    return int.from_bytes(found.digest()[:7], "big") + 1
