"""What takes a shard's batches on their way to the loop: `enumerate`, `zip`, generators of the script, a bar."""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterable, Iterator, Sequence, Sized
from types import FrameType, GeneratorType

from cluster_ddp.runtime.data.batch_iterator import BatchIterator
from cluster_ddp.runtime.failure.stacks import is_users
from cluster_ddp.runtime.live_objects import objects_of


def frames(objects: Iterable[object], shards: Sequence[BatchIterator]) -> list[FrameType]:
    """Return the frames of those of the script's generators among objects that take batches of these shards."""
    own = [one for one in objects if isinstance(one, GeneratorType) and is_users(one.gi_code.co_filename)]
    reading = [one for one in own if any(reaches(one, shard, 4) for shard in shards)]
    return [one.gi_frame for one in reading if one.gi_frame is not None]


def are_numbered(shards: Sequence[BatchIterator]) -> bool:
    """Whether `enumerate` counts the batches of a shard, and has begun with 0 and its first batch in this process."""
    counts = [one for one in objects_of(enumerate) if one.__reduce__()[1][1] == 1]
    return any(reaches(one, shard, 4) for one in counts for shard in shards)


def is_zipped(shard: BatchIterator, shards: Iterable[BatchIterator]) -> bool:
    """Whether `zip` takes batches of a shard, and beside each something of more than is left of the epoch."""
    if not isinstance(shard, Sized):
        return False
    left = len(shard) - shard.step - 1
    for one in objects_of(zip):
        inside = [inner for group in gc.get_referents(one) if isinstance(group, tuple) for inner in group]
        others = [inner for inner in inside if not any(reaches(inner, other, 4) for other in shards)]
        if len(others) < len(inside) and any(_is_longer(other, left) for other in others):
            return True
    return False


def _is_longer(iterator: object, left: int) -> bool:
    return isinstance(iterator, Iterator) and operator.length_hint(iterator, 0) > left


def reaches(iterator: object, shard: BatchIterator, depth: int) -> bool:
    """Whether an iterator takes from a shard, also through others such as a progress bar's."""
    if iterator is shard or not depth:
        return iterator is shard
    if isinstance(iterator, GeneratorType):
        inside = [*iterator.gi_frame.f_locals.values()] if iterator.gi_frame else []
    else:
        inside = gc.get_referents(iterator)
    return any(reaches(one, shard, depth - 1) for one in inside)
