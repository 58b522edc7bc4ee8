"""The random number generators of a process: torch's on CPU and GPU, Python's and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import numpy.random  # here, since at the first save no file descriptor may be left
import torch

from cluster_ddp.runtime.seeds import seed_all, stream_seed


def capture(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of all generators, in types that torch.load reads with weights_only.

    Args:
        devices: the devices of this rank.
    """
    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)),
    }
    if devices[0].type == "cuda":
        state["cuda"] = [torch.cuda.get_rng_state(device) for device in devices]
    return state


def restore(state: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Set all generators to a state of `capture`. If that has no GPU's state, the GPU's generator stays as it is."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if devices[0].type == "cuda":
        for device, of_device in zip(devices, state.get("cuda", [])):
            torch.cuda.set_rng_state(of_device, device)


def derive(states: list[dict[str, Any]], rank: int) -> None:
    """Seed all generators anew, for a run with another number of ranks than saved the states.

    Args:
        states: of `capture`, one of each rank that saved.
        rank: this rank.
    """
    generator = torch.Generator()
    generator.set_state(states[0]["torch"])
    common = int(torch.randint(2**62, (), generator=generator))
    seed_all(stream_seed(common, rank))
