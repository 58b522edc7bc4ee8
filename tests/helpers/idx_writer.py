"""Files of the IDX format, of bytes: those of MNIST (cluster_ddp/mnist/data.py says what is in them)."""

from __future__ import annotations

from collections.abc import Sequence


def idx(sizes: Sequence[int], values: bytes) -> bytes:
    """The content of a file with an array of these sizes."""
    return bytes((0, 0, 8, len(sizes))) + b"".join(size.to_bytes(4, "big") for size in sizes) + values
