"""Whether a checkpoint belongs to this training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch

from cluster_ddp.errors import counted, first_of

START_ANEW = 'start anew here: Checkpointer(resume="never") (of cluster-ddp train: --resume never)'
"""A hint for a checkpoint that does not fit."""
_TOLD = 8  # most lines about settings
_MISSING = object()

# Required content of a checkpoint, with types.
_FORM: Mapping[str, Any] = {
    "saved_by": {"job": object, "array_task": (int, NoneType), "world_size": int, "run": str},
    "identity": {},
    "position": {"steps": int, "epoch": int},
    "shards": list,
    "metrics_bytes": int,
    "bests": {},
    "parts": {},
    "parameters": {},
    "devices": {},
    "ranks": list,
}
_NUMBER = (int, NoneType)  # None of a stream
_SHARD: Mapping[str, Any] = {"size": _NUMBER, "seed": _NUMBER, "global_batch": int, "step": int, "seen": int}
_RNG: Mapping[str, Any] = {"torch": torch.Tensor, "python": tuple, "numpy": tuple}
_RANK: Mapping[str, Any] = {
    "rng": _RNG,
    "epoch_rng": _RNG,
    "buffers": {},
    "meters": {},
    "settings": {},
    "arrays": {},
}


def malformed(state: Any) -> str | None:
    """Return what a saved state lacks or has of a wrong type, in words; None if its form is right."""
    if words := _other_form(state, _FORM, "its content"):
        return words
    if not state["ranks"]:
        return "it has no rank's state"
    forms: list[tuple[Any, Any, str]] = [
        (shard, _SHARD, f"the place in shard {number}") for number, shard in enumerate(state["shards"])
    ]
    forms += [(rank, _RANK, f"the state of rank {number}") for number, rank in enumerate(state["ranks"])]
    forms += [(part, {}, f"the state of its {name}") for name, part in state["parts"].items()]
    forms += [(names, (list, NoneType), f"the parameters of its {part}") for part, names in state["parameters"].items()]
    forms += [(places, {}, f"the devices of its {part}") for part, places in state["devices"].items()]
    return next(filter(None, (_other_form(*form) for form in forms)), None) or _impossible(state)


def _impossible(state: Mapping[str, Any]) -> str | None:
    """A place that no training can be in, or an optimizer without groups for its parameters."""
    for part, names in state["parameters"].items():
        if names and len(names) != sum(_sizes_of_groups(state["parts"].get(part, {}))):
            return f"its {part} has {len(names)} parameters, and other groups"
    for number, shard in enumerate(state["shards"]):
        seen, size = shard["seen"], shard["size"]
        if seen < 0 or shard["step"] < 0 or (size is not None and seen > size):
            return f"the place in shard {number} is batch {shard['step']}, sample {seen} of {size}"
    counts = {"metrics_bytes": state["metrics_bytes"], **{name: state["position"][name] for name in ("steps", "epoch")}}
    return next((f"its {name} is {count}" for name, count in counts.items() if count < 0), None)


def _other_form(value: Any, form: Any, name: str) -> str | None:
    if not isinstance(form, Mapping):
        return None if isinstance(value, form) else f"{name} is a {type(value).__name__}"
    if not isinstance(value, Mapping):
        return f"{name} is a {type(value).__name__}"
    if missing := [key for key in form if key not in value]:
        return f"{name} has no {missing[0]}"
    found = (_other_form(value[key], inner, f"{name}[{key!r}]") for key, inner in form.items())
    return next(filter(None, found), None)


def settings(state: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the settings of an optimizer or a scheduler: the plain values of its state before the first step."""
    found: dict[str, str] = {}
    for key, value in state.items():
        if key in ("params", "state") or (str(key).startswith("_") and key != "_schedulers"):
            continue
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inner, Mapping) and all(isinstance(item, Mapping) for item in inner.values()):
            for number, item in inner.items():
                found |= settings(item, f"{prefix}{key}[{number}].")
        else:
            found[f"{prefix}{key}"] = repr(value)
    return found


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return the permitted differences between a saved state that fits and ours (without parts), one line each."""
    lines = []
    before, now = saved["saved_by"]["world_size"], ours["saved_by"]["world_size"]
    if before != now:
        same = "same weights and place in the data, new streams of random numbers"
        lines.append(f"{counted(now, 'rank')} instead of {before}: {same}")
    for theirs, shard in zip(saved["shards"], ours["shards"], strict=True):
        before, now = theirs["global_batch"], shard["global_batch"]
        if before != now:
            lines.append(f"a global batch of {now} samples instead of {before} (the batch size is per rank)")
        before, now = theirs.get("fingerprint"), shard.get("fingerprint")
        if before and now and before != now:
            words = f"the dataset has the fingerprint {now[:12]}, instead of {before[:12]}"
            lines.append(f"{words}: is it the same data?")
    told = [
        f"{name}: {key} is {now.get(key)} in the script; {before.get(key)}, from the start of this training, is used"
        for name, now in ours["made_with"].items()
        for before in [saved.get("made_with", {}).get(name, now)]
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    more = [f"and {len(told) - _TOLD} more settings"] if len(told) > _TOLD else []
    return lines + told[:_TOLD] + more


def complaint(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Return why a saved state does not belong to this training, whose state is ours, in words; None if it does."""
    return (
        _other_array_task(saved["saved_by"], ours["saved_by"])
        or _other_identity(saved["identity"], ours["identity"])
        or _other_data(saved["shards"], ours["shards"])
        or _other_parameters(saved["parameters"], ours["parameters"])
        or _other_parts(saved["parts"], ours["parts"], ours["parameters"])
        or _other_meters(saved["ranks"][0]["meters"], ours["ranks"][0]["meters"])
    )


def _other_parameters(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """An optimizer of other parameters, by their names; where both have the same, the groups may differ."""
    for name in theirs.keys() & ours.keys():
        if theirs[name] and ours[name] and set(theirs[name]) != set(ours[name]):
            more = [one for one in theirs[name] if one not in ours[name]]
            fewer = [one for one in ours[name] if one not in theirs[name]]
            words = f"its {name} also has {first_of(more)}" if more else f"its {name} lacks {first_of(fewer)}"
            cure = "give the optimizer all its parameters before you make the Checkpointer, with lr=0 until they train"
            return f"{words}: {cure}"
    return None


def _other_array_task(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    before, now = theirs["array_task"], ours["array_task"]
    if None in (before, now) or before == now:
        return None
    return f"it is array task {before}'s (job {theirs['job']}), and this is array task {now}"


def _other_identity(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    differing = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    told = (f"its {key} is {theirs.get(key)!r}, and here it is {ours.get(key)!r}" for key in differing)
    return "; ".join(told) or None


def _other_data(theirs: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> str | None:
    if len(theirs) != len(ours):
        return f"its number of shards is {len(theirs)}, and here it is {len(ours)}"
    for there, here in zip(theirs, ours):
        if (kind := there.get("stream")) != here.get("stream"):
            kinds = ["a shard" if one is None else f"a stream with split={one!r}" for one in (kind, here.get("stream"))]
            return "its data is {}, and here it is {}".format(*kinds)
        for key, what in (("size", "number of samples in the dataset"), ("seed", "seed of the shuffle")):
            if there[key] != here[key]:
                return f"its {what} is {there[key]}, and here it is {here[key]}"
    return None


def _other_parts(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], parameters: Mapping[str, Sequence[str] | None]
) -> str | None:
    if set(theirs) != set(ours):
        return f"it holds {', '.join(theirs)}, and here there are {', '.join(ours)}"
    for name, state in ours.items():
        if _settings_of_groups(theirs[name]) != _settings_of_groups(state):
            return f"its {name} is of another type"
        if not parameters.get(name) and _sizes_of_groups(theirs[name]) != _sizes_of_groups(state):
            return f"its {name} has other parameter groups"
        for key in {**theirs[name], **state}:
            if found := _unlike(theirs[name].get(key, _MISSING), state.get(key, _MISSING)):
                return "it has another {}: {} is {} there and {} here".format(name, key, *found)
    return None


def _unlike(there: Any, here: Any) -> tuple[str, str] | None:
    """How two values of a part's state differ that should be alike. A value that is not a tensor may be missing."""
    kinds = _kind(there), _kind(here)
    if isinstance(there, torch.Tensor) and isinstance(here, torch.Tensor):
        kinds = kinds if kinds[0] != kinds[1] else (str(there.dtype), str(here.dtype))
    elif there is None or here is None or ("missing" in kinds and not any(kind[0] == "(" for kind in kinds)):
        return None
    return None if kinds[0] == kinds[1] else kinds


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape))
    if value is _MISSING:
        return "missing"
    kinds: dict[str, Any] = {"a number": (int, float), "a dictionary": Mapping, "a list": (list, tuple)}
    return next((name for name, types in kinds.items() if isinstance(value, types)), type(value).__name__)


def _other_meters(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    if set(theirs) == set(ours):
        return None
    return f"its meters are {', '.join(theirs) or 'none'}, and here they are {', '.join(ours) or 'none'}"


def _settings_of_groups(state: Mapping[str, Any]) -> set[str]:
    """Of an optimizer: the names of its parameter groups' settings."""
    return {key for group in _groups(state) for key in group}


def _sizes_of_groups(state: Mapping[str, Any]) -> list[int]:
    """Of an optimizer: the number of parameters of each parameter group."""
    return [len(group.get("params", ())) for group in _groups(state)]


def _groups(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [group for group in state.get("param_groups", ()) if isinstance(group, Mapping)]
