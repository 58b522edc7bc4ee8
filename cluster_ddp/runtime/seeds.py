"""Random seeds: one for each stream of random numbers of a run."""

from __future__ import annotations

import random

import torch


def seed_all(seed: int) -> None:
    """Seed torch (all devices), Python's random and NumPy.

    Args:
        seed: 0 … 2**63 - 1.
    """
    import numpy  # torch has it already

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def stream_seed(seed: int, stream: int) -> int:
    """Return the seed of one stream of a run, 0 … 2**63 - 1, such that neighbouring seeds and streams are unrelated.

    It is the mixing function of splitmix64 (Steele, Lea, Flood 2014).

    Args:
        seed: the random seed of the run.
        stream: number of the stream, such as an epoch or a rank.
    """
    x = (seed * 0x9E3779B97F4A7C15 + stream + 1) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> 1
