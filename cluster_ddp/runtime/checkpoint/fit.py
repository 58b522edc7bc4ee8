"""Whether a checkpoint is one of this training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def complaint(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Why a saved state is not one of this training, in words; None where it is.

    Args:
        saved: what was saved.
        ours: what would be saved now.
    """
    return (
        _other_array_task(saved["saved_by"], ours["saved_by"])
        or _other_identity(saved["identity"], ours["identity"])
        or _other_data(saved["shard"], ours["shard"])
        or _other_parts(saved["parts"], ours["parts"])
        or _other_meters(saved["ranks"][0]["meters"], ours["ranks"][0]["meters"])
    )


def _other_array_task(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    numbers = theirs["array_task"], ours["array_task"]
    if None in numbers or numbers[0] == numbers[1]:
        return None
    return f"it is array task {numbers[0]}'s (job {theirs['job']}), and this is array task {numbers[1]}"


def _other_identity(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    differing = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    told = (f"its {key} is {theirs.get(key)!r}, and here it is {ours.get(key)!r}" for key in differing)
    return "; ".join(told) or None


def _other_data(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    for key, what in (("size", "samples in the dataset"), ("seed", "as seed of the shuffle")):
        if theirs[key] != ours[key]:
            return f"it was saved with {theirs[key]} {what}, and here there are {ours[key]}"
    return None


def _other_parts(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    if set(theirs) != set(ours):
        return f"it holds {', '.join(theirs)}, and here there are {', '.join(ours)}"
    for name, state in ours.items():
        if _groups(theirs[name]) != _groups(state):
            return f"its {name} is of another kind, or has other groups of parameters"
        there = {key: value.shape for key, value in theirs[name].items() if isinstance(value, torch.Tensor)}
        here = {key: value.shape for key, value in state.items() if isinstance(value, torch.Tensor)}
        for key in {**there, **here}:
            if there.get(key) != here.get(key):
                shapes = (tuple(shape) if shape is not None else "missing" for shape in (there.get(key), here.get(key)))
                return "it is of another {}: {} is {} there and {} here".format(name, key, *shapes)
    return None


def _other_meters(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    if set(theirs) == set(ours):
        return None
    return f"its meters are {', '.join(theirs) or 'none'}, and here they are {', '.join(ours) or 'none'}"


def _groups(state: Mapping[str, Any]) -> list[tuple[frozenset[str], int]]:
    """Of an optimizer: what each group of parameters has set, and how many they are."""
    groups = state.get("param_groups", ())
    return [(frozenset(group), len(group["params"])) for group in groups if isinstance(group, Mapping)]
