"""Counts in the parts of a training that their state_dict() lacks, such as steps that an optimizer counts itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class PartCounts:
    """Whole numbers in the attributes of parts, as they are now. Modules and classes of torch are left out."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        own = {name: part for name, part in parts.items() if not type(part).__module__.startswith("torch.")}
        self._made = {
            name: (part, _counts(part)) for name, part in own.items() if not isinstance(part, torch.nn.Module)
        }

    def unsaved(self) -> list[str]:
        """Return the places of those that have changed, and whose values are nowhere in the state of their part."""
        found = []
        for name, (part, made) in self._made.items():
            if changed := {key: value for key, value in _counts(part).items() if made.get(key) != value}:
                saved = {*_whole_numbers(part.state_dict())}
                found += [f"{name}.{key}" for key, value in changed.items() if value not in saved]
        return found


def _counts(part: Any) -> dict[str, int]:
    return {name: value for name, value in getattr(part, "__dict__", {}).items() if type(value) is int}


def _whole_numbers(value: Any) -> Iterator[int]:
    """Those in a state, also as tensors of one element."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, list | tuple):
        for one in value:
            yield from _whole_numbers(one)
    elif isinstance(value, int | float) and value == value // 1:
        yield int(value)
