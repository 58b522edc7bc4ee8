"""The CUDA streams that a rank uses."""

from __future__ import annotations

import torch

_watched: list[torch.cuda.Stream] = []


def watch(stream: torch.cuda.Stream) -> None:
    """Also watch this stream for unfinished work; see `World.watch_stream`."""
    _watched.append(stream)


def is_busy(device: torch.device) -> bool:
    """Return whether a device has unfinished work on its default stream or a watched one. Callable from any thread."""
    try:
        return not all(stream.query() for stream in (torch.cuda.default_stream(device), *_watched))
    except RuntimeError:  # after an error of the device every call fails
        return True
