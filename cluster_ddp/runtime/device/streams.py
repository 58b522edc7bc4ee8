"""The CUDA streams that a rank works on."""

from __future__ import annotations

import torch

_watched: list[torch.cuda.Stream] = []


def watch(stream: torch.cuda.Stream) -> None:
    """Count work on a stream of the training's own; see `World.watch_stream`."""
    _watched.append(stream)


def is_busy(device: torch.device) -> bool:
    """Whether a device has work to do, on its default stream or a watched one. May be called from any thread."""
    try:
        return not all(stream.query() for stream in (torch.cuda.default_stream(device), *_watched))
    except RuntimeError:  # after an error of the device nothing works there any more
        return True
