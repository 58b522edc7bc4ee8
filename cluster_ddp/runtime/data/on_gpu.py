"""Batches on a GPU: copied from pinned memory, one batch ahead of the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def copied(batches: Iterable[Any], device: torch.device, *, ahead: bool) -> Iterator[Any]:
    """Yield the batches with their tensors on a GPU.

    Args:
        batches: nested lists, tuples and dicts of tensors, pinned, and of anything else.
        device: the GPU.
        ahead: copy the next batch while the training works on this one, in a stream of its own.
    """
    if not ahead:
        for batch in batches:
            yield moved(batch, device)
        return
    stream = torch.cuda.Stream(device)
    waiting: tuple[Any, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            following = moved(batch, device), stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting, device)
        waiting = following
    if waiting is not None:
        yield _arrived(*waiting, device)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on a device; what has a method `to`, such as a BatchEncoding, as well."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(part, device) for part in batch)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(part, device) for key, part in batch.items()}
    return batch


def _arrived(batch: Any, copied: torch.cuda.Event, device: torch.device) -> Any:
    """Let the training's stream wait for the copy; its memory is not reused before that stream is done with it."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    _record(batch, current)
    return batch


def _record(batch: Any, stream: torch.cuda.Stream) -> None:
    if isinstance(batch, torch.Tensor):
        batch.record_stream(stream)
    elif isinstance(batch, Mapping):
        for part in batch.values():
            _record(part, stream)
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            _record(part, stream)
