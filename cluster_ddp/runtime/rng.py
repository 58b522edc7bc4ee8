"""The random number generators of a process, torch's on CPU and GPU, Python's and NumPy's: their seeds and states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy.random  # here, since at the first save no file descriptor may be left
import torch

GENERATORS = torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random
"""What a script may have beside the global ones."""


def seed_all(seed: int) -> None:
    """Seed torch (all devices), Python's random and NumPy with 0 … 2**63 - 1."""
    torch.manual_seed(seed)
    seed_cpu(seed)


def stream_seed(seed: int, stream: int) -> int:
    """Return the seed of one stream of a run (an epoch, a rank), 0 … 2**63 - 1; neighbouring ones are unrelated.

    It is the mixing function of splitmix64 (Steele, Lea, Flood 2014).
    """
    x = (seed * 0x9E3779B97F4A7C15 + stream + 1) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> 1


def of_device(device: torch.device) -> torch.Tensor:
    """Return the state of torch's generator for a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_of_device(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of torch's generator for a device."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def seed_cpu(seed: int) -> None:
    """Do the same as `seed_all`, but leave the generators of GPUs alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def of_cpu() -> tuple[Any, ...]:
    """Return the states of all generators of the CPU, as they are: `capture` is four times as slow."""
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=True)


def set_of_cpu(states: tuple[Any, ...]) -> None:
    """Set all generators of the CPU to states of `of_cpu`."""
    of_torch, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)


def state_of(generator: Any) -> Any:
    """Return the state of one of `GENERATORS`, in types that torch.load reads with weights_only."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    is_old = isinstance(generator, numpy.random.RandomState)
    return _with_tensors(generator.get_state(legacy=False) if is_old else generator.bit_generator.state)


def set_state_of(generator: Any, state: Any) -> None:
    """Set a generator to a state of `state_of`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(_with_arrays(state))
    else:
        generator.bit_generator.state = _with_arrays(state)


def _with_tensors(state: Any) -> Any:
    """The state of a generator of NumPy, its unsigned arrays as signed tensors. Whole numbers may have 128 bits."""
    if isinstance(state, dict):
        return {key: _with_tensors(value) for key, value in state.items()}
    if isinstance(state, numpy.ndarray):
        return torch.from_numpy(state.copy().view(numpy.dtype(f"i{state.itemsize}")))
    return hex(state) if isinstance(state, int) else state


def _with_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: value if key == "bit_generator" else _with_arrays(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.numpy().view(numpy.dtype(f"u{state.itemsize}"))
    return int(state, 16) if isinstance(state, str) else state


def capture(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of all generators, in types that torch.load reads with weights_only."""
    of_torch, of_python, (name, keys, position, has_gauss, cached) = of_cpu()
    state: dict[str, Any] = {
        "torch": of_torch,
        "python": of_python,
        "numpy": (str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)),
    }
    if devices[0].type == "cuda":
        state["cuda"] = [torch.cuda.get_rng_state(device) for device in devices]
    return state


def restore(state: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Set all generators to a state of `capture`. If that has no GPU's state, the GPU's generator stays as it is."""
    name, keys, *rest = state["numpy"]
    set_of_cpu((state["torch"], state["python"], (name, keys.numpy().astype("uint32"), *rest)))
    if devices[0].type == "cuda":
        for device, of_device in zip(devices, state.get("cuda", [])):
            torch.cuda.set_rng_state(of_device, device)


def derive(states: list[dict[str, Any]], rank: int) -> None:
    """Seed all generators of a rank anew, from the states of another number of ranks, of `capture`."""
    generator = torch.Generator()
    generator.set_state(states[0]["torch"])
    common = int(torch.randint(2**62, (), generator=generator))
    seed_all(stream_seed(common, rank))
