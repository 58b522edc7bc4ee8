"""The random number generators of a process: torch's on CPU and GPU, Python's and NumPy's."""

from __future__ import annotations

import random
from typing import Any, cast

import torch

from cluster_ddp.runtime.seeds import seed_all, stream_seed


def capture(device: torch.device) -> dict[str, Any]:
    """Their states, of types that torch.load takes with weights_only."""
    import numpy  # torch has it already

    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set them to what `capture` found. On a GPU, where the state is a CPU's, that GPU's generator is left as it is."""
    import numpy

    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def derive(states: list[dict[str, Any]], rank: int) -> None:
    """Seed them anew, for a rank that is one of another number of ranks than saved the states."""
    generator = torch.Generator()
    generator.set_state(states[0]["torch"])
    common = int(torch.randint(2**62, (), generator=generator))
    seed_all(stream_seed(common, rank))
