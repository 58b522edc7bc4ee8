"""Batches on a GPU: copied from pinned memory, one batch ahead of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch


def copied(batches: Iterable[Any], device: torch.device, *, ahead: bool) -> Iterator[Any]:
    """Yield the batches with their tensors on a GPU.

    Args:
        batches: nested lists, tuples and dicts of tensors, pinned, and of anything else. What has a method `to` of its
            own, such as a PackedSequence or a BatchEncoding, is moved by that.
        device: the GPU.
        ahead: copy the next batch's tensors while the training works on this one, in a stream of their own.
    """
    if not ahead:
        for batch in batches:
            yield moved(batch, device)
        return
    stream = torch.cuda.Stream(device)
    waiting: tuple[Any, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            following = _changed(batch, lambda part: _tensor(part, device)), stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting, device)
        waiting = following
    if waiting is not None:
        yield _arrived(*waiting, device)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on a device."""
    return _changed(batch, lambda part: _object(_tensor(part, device), device))


def _arrived(batch: Any, copied: torch.cuda.Event, device: torch.device) -> Any:
    """Let the training's stream wait for the copy; its memory is not reused before that stream is done with it.

    Objects with a method `to` move now, in the training's stream: nobody could tell whether all their tensors are
    recorded.
    """
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)

    def received(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            part.record_stream(current)
        return _object(part, device)

    return _changed(batch, received)


def _tensor(part: Any, device: torch.device) -> Any:
    return part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part


def _object(part: Any, device: torch.device) -> Any:
    return part.to(device) if hasattr(part, "to") and not isinstance(part, torch.Tensor) else part


def _changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the nested lists, tuples and dicts with each part that is none of these, or has a `to`, changed."""
    if hasattr(batch, "to"):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_changed(part, change) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_changed(part, change) for part in batch)
    if isinstance(batch, Mapping):
        return {key: _changed(part, change) for key, part in batch.items()}
    return change(batch)
