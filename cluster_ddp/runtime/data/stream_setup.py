"""From what `World.stream` is given to a `Stream`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch.utils.data import DataLoader

from cluster_ddp.errors import DataError, SpecError, check_options, nearest
from cluster_ddp.runtime.data.data_loader import MAX_WORKERS, with_defaults
from cluster_ddp.runtime.data.device_dataset import fingerprint
from cluster_ddp.runtime.data.stream import Stream
from cluster_ddp.runtime.data.stream_reader import Split, StreamReader

_SPLIT_THEMSELVES = ("datasets", "streaming", "webdataset")  # packages whose iterables look for their worker
_ORDERED = "the stream has the iterable's order."
_SHUFFLE = "let the iterable shuffle: by set_epoch(epoch), or with torch's, Python's or NumPy's generators"
_CHOSEN = {
    "dataset": ("the iterable is the dataset.", "give it first: world.stream(iterable, …)"),
    **dict.fromkeys(("shuffle", "sampler", "batch_sampler"), (_ORDERED, _SHUFFLE)),
    "in_order": ("the batches must come in order.", "leave it out"),
}


def make(
    iterable: Any,
    *,
    batch_size: int | None,
    split: Split | None,
    seed: int,
    drop_last: bool,
    replay: bool,
    rank: int,
    world_size: int,
    device: torch.device | None,
    cpus: int,
    options: dict[str, Any],
) -> Stream:
    """Return the stream, with the defaults of `World.stream`. `device` is the GPU that batches are copied to.

    Raises:
        DataError, SpecError: as `World.stream`.
    """
    check_options(options, "world.stream(…, {}=…)", DataLoader, chosen=_CHOSEN)
    _check(iterable, batch_size, split)
    split = split or ("own" if batch_size is None or splits_itself(iterable) else "items")
    _check_shares(iterable, split, world_size)
    _check_workers(iterable, options)
    # With split="items" each worker reads all items: more than one would read them once more.
    usable = 0 if device is None or batch_size is None else 1 if split == "items" else min(cpus - 1, MAX_WORKERS)
    with_defaults(options, workers=min(usable, cpus - 1), is_gpu=device is not None)
    collate = options.pop("collate_fn", None)
    place: dict[str, Any] = {"split": split, "batch_size": batch_size, "seed": seed, "rank": rank}
    place["world_size"] = world_size
    reader = StreamReader(iterable, collate=collate, drop_last=drop_last, replay=replay, **place)
    return Stream(reader, device=device, fingerprint=fingerprint(iterable), **place, **options)


def splits_itself(iterable: object) -> bool:
    """Whether an iterable is of a library whose iterables give each worker a share of its own."""
    return any(base.__module__.partition(".")[0] in _SPLIT_THEMSELVES for base in type(iterable).__mro__)


def _check(iterable: Any, batch_size: int | None, split: str | None) -> None:
    asked = f"Streaming a {type(iterable).__name__}:"
    if not hasattr(iterable, "__iter__"):
        raise DataError(asked, "it can't be iterated over.", "give an object with __iter__; with an index: world.shard")
    if isinstance(iterable, Iterator):
        hint = "give an object whose __iter__ begins anew, such as an IterableDataset"
        raise DataError(asked, "it can be read once only, and each epoch and each resume reads it anew.", hint)
    if batch_size is not None and batch_size < 1:
        raise DataError(f"Batches of {batch_size} samples:", "a batch has 1 or more.", "batch_size=64")
    if isinstance(iterable, DataLoader) and batch_size is not None:
        raise DataError(f"{asked[:-1]} with batch_size={batch_size}:", "it makes batches itself.", "batch_size=None")
    if split not in (None, *get_args(Split)):
        found = f"there is no such way.{nearest(str(split), get_args(Split))}"
        raise SpecError(f"Streaming with split={split!r}:", found, 'split="items" or split="own"')
    if batch_size is None and split == "items":
        found = "the iterable gives batches, not items that could be dealt."
        raise SpecError('Streaming with batch_size=None and split="items":', found, "give a batch_size")


def _check_shares(iterable: Any, split: Split, world_size: int) -> None:
    """A dataset of Hugging Face gives each worker a share by itself, but each rank only if it was told to."""
    if split == "own" and world_size > 1 and getattr(iterable, "_distributed", iterable) is None:
        raise DataError(
            f"Streaming a {type(iterable).__name__} on {world_size} ranks:",
            "it was not split by rank: each rank would train on all samples.",
            "datasets.distributed.split_dataset_by_node(dataset, rank=world.rank, world_size=world.world_size)",
        )


def _check_workers(iterable: Any, options: dict[str, Any]) -> None:
    if isinstance(iterable, DataLoader) and options.get("num_workers"):
        found = "a loader has its own workers, and a worker can't have any."
        hint = f"{type(iterable).__name__}(…, num_workers={options['num_workers']})"
        raise SpecError(f"Streaming a loader with num_workers={options['num_workers']}:", found, hint)
