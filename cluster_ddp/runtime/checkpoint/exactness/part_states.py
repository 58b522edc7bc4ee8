"""What changes in the parts of a training and their state_dict() lacks: counts, tensors, optimizers inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cluster_ddp.runtime.model.dtensor_pieces import is_sharded

_LOOKED_AT = 2  # tensors of an attribute, the smallest
_LARGEST_BYTES = 1 << 20


class PartStates:
    """Whole numbers and tensors in the attributes of parts, as they are now.

    Modules and classes of torch are left out.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        own = {name: part for name, part in parts.items() if not type(part).__module__.startswith("torch.")}
        own = {name: part for name, part in own.items() if not isinstance(part, torch.nn.Module)}
        self._parts = [*parts.values()]
        self._made = {name: (part, _counts(part), self._versions(part)) for name, part in own.items()}

    def unsaved(self) -> list[str]:
        """Return the places of those that have changed, and whose values are nowhere in the state of their part."""
        found = []
        for name, (part, counts, versions) in self._made.items():
            changed = {key: value for key, value in _counts(part).items() if counts.get(key) != value}
            others = [key for key, version in self._versions(part).items() if versions.get(key) != version]
            if changed or others:
                state = part.state_dict()
                saved, tensors = {*_numbers(state)}, [*_tensors(state)]
                found += [f"{name}.{key}" for key, value in changed.items() if value not in saved]
                found += [f"{name}.{key}" for key in others if not _are_in(_looked_at(vars(part)[key]), tensors, saved)]
        return found

    def _versions(self, part: Any) -> dict[str, list[tuple[int, int]]]:
        """Which tensors each attribute has that is no part itself, and how often they were changed in place."""
        own = {"state", "param_groups", "defaults"} if isinstance(part, torch.optim.Optimizer) else set()
        others = {key: value for key, value in getattr(part, "__dict__", {}).items() if key not in own}
        found = {
            key: _looked_at(value) for key, value in others.items() if not any(value is one for one in self._parts)
        }
        return {key: [(id(one), one._version) for one in tensors] for key, tensors in found.items() if tensors}


def _looked_at(value: Any) -> list[torch.Tensor]:
    """The smallest tensors of an attribute that do not train."""
    tensors = [one for one in _tensors(value) if not (one.requires_grad or one.is_inference() or is_sharded(one))]
    return sorted((one for one in tensors if 0 < one.nbytes <= _LARGEST_BYTES), key=lambda one: one.nbytes)[:_LOOKED_AT]


def _are_in(tensors: list[torch.Tensor], saved: list[torch.Tensor], numbers: set[float]) -> bool:
    """Whether all of these are saved, as tensors, or those of one element as numbers."""
    return all(
        any(_are_equal(one, other) for other in saved) or (one.numel() == 1 and one.item() in numbers)
        for one in tensors
    )


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    are_alike = (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
    return are_alike and not is_sharded(other) and torch.equal(one.cpu(), other.detach().cpu())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in a value: in containers, and in the state of an optimizer."""
    if isinstance(value, torch.optim.Optimizer):
        value = value.state
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _counts(part: Any) -> dict[str, int]:
    return {name: value for name, value in getattr(part, "__dict__", {}).items() if type(value) is int}


def _numbers(value: Any) -> Iterator[float]:
    """Those in a state, also as tensors of one element."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, int | float):
        yield value
