"""Loading the state of an optimizer bit for bit.

`torch.optim.Optimizer.load_state_dict` casts each tensor but "step" to the dtype and the device of its parameter, and
makes a new string of each string (`_process_value_according_to_param_policy` and `_cast` in torch/optim/optimizer.py,
2.10 to 2.14). Float32 moments of bfloat16 weights would be rounded. So torch loads the groups only, and the state of
each parameter is set here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer

from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.checkpoint.host_copy import tensors_in, with_tensors

_HOST = torch.device("cpu")


def check(name: str, optimizer: Optimizer) -> None:
    """Check whether an optimizer's state can be saved.

    Raises:
        CheckpointError: it is a ZeroRedundancyOptimizer: each rank has the state of its share only. Or its class does
            not call torch's constructor, which makes what torch's own methods need; or has a state of another form.
    """
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        found = f"{name} is a {type(optimizer).__name__}, which has not called torch.optim.Optimizer's constructor."
        raise CheckpointError("Saving a checkpoint:", found, "in its __init__: super().__init__(params, defaults)")
    if lacking := [key for key in ("state", "param_groups") if key not in optimizer.state_dict()]:
        found = f"{name} is a {type(optimizer).__name__}, whose state_dict() lacks {', '.join(map(repr, lacking))}."
        hint = "give the optimizer inside it as a part, optimizer=lookahead.optimizer; what else it keeps, as another"
        raise CheckpointError("Saving a checkpoint:", found, hint)
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        found = f"{name} is a ZeroRedundancyOptimizer, whose state is spread over the ranks in a way of its own."
        hint = 'shard the model and its optimizer with world.wrap(model, strategy="fsdp"), and use a plain optimizer'
        raise CheckpointError("Saving a checkpoint:", found, hint)


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return its parameters, in the order of the numbers in its state."""
    return [parameter for parameter, _ in _with_groups(optimizer)]


def names(optimizer: Optimizer, parts: Mapping[str, Any]) -> list[str] | None:
    """Return the names of its parameters, such as "model.head.weight", in the order of the numbers in its state.

    None if one belongs to no module of these parts.
    """
    modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    known = {id(one): f"{name}.{key}" for name, module in modules.items() for key, one in module.named_parameters()}
    found = [known.get(id(parameter), "") for parameter in parameters(optimizer)]
    return found if all(found) else None


def regroup(optimizer: Optimizer, own_names: list[str], saved: Mapping[str, Any], saved_names: list[str]) -> None:
    """Give an optimizer the parameter groups of a saved one with the same parameters; `load` brings their settings."""
    by_name = dict(zip(own_names, parameters(optimizer)))
    following = iter(saved_names)
    groups = [
        {**group, "params": [by_name[name] for name in islice(following, len(group["params"]))]}
        for group in saved["param_groups"]
    ]
    _fill(optimizer, groups)


def elsewhere(optimizer: Optimizer) -> dict[str, str]:
    """Return the device types of the tensors that are not where torch would load them to, by their place.

    Such as moments that the optimizer keeps in the host's memory.
    """
    return {
        place: tensor.device.type
        for number, (parameter, group) in enumerate(_with_groups(optimizer))
        for key, value in optimizer.state.get(parameter, {}).items()
        for place, tensor in tensors_in(value, _place(number, key))
        if tensor.device.type != _loaded_to(parameter, group, key).type
    }


def load(optimizer: Optimizer, state: dict[str, Any], devices: Mapping[str, str]) -> None:
    """Load a state: each value is what it was when it was saved. The optimizer's own hooks see that state, too.

    Args:
        optimizer: with the parameters of the one that was saved, in the same order and groups. If its class has a
            `load_state_dict` that does not call torch's, that one decides.
        state: of `state_dict`; the optimizer keeps its tensors.
        devices: what `elsewhere` returned at the save.
    """
    of_parameters: list[Any] = []

    def take(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        others = dict(state_dict["state"])
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        of_parameters.extend(others.pop(number, {}) for number in numbers)
        return {**state_dict, "state": others}

    def put_back(_: Optimizer) -> None:
        for number, ((parameter, group), entries) in enumerate(zip(_with_groups(optimizer), of_parameters)):
            for key, value in entries.items():
                device = _loaded_to(parameter, group, key)
                to_device = functools.partial(_moved, device=device, devices=devices)
                optimizer.state[parameter][key] = with_tensors(value, _place(number, key), to_device)

    hooks = [
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(put_back, prepend=True),
    ]
    own = [*optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
    finally:
        for hook in hooks:
            hook.remove()
    loaded, optimizer.param_groups[:] = [*optimizer.param_groups], own
    _fill(optimizer, loaded)


def _fill(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give an optimizer these parameter groups, in its own dictionaries: a script may have them, as head."""
    for own, group in zip(optimizer.param_groups, groups):
        own.clear()
        own.update(group)
    optimizer.param_groups[:] = [*optimizer.param_groups[: len(groups)], *groups[len(optimizer.param_groups) :]]


def _with_groups(optimizer: Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Its parameters, each with its group, in the order of the numbers in its state."""
    return [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]


def _place(number: int, key: Any) -> str:
    return f"[{number}][{key!r}]"


def _loaded_to(parameter: torch.Tensor, group: Mapping[str, Any], key: Any) -> torch.device:
    """The device to which torch loads an entry of a parameter's state."""
    is_host_step = key == "step" and not (group.get("capturable") or group.get("fused"))
    return _HOST if is_host_step else parameter.device


def _moved(tensor: torch.Tensor, place: str, *, device: torch.device, devices: Mapping[str, str]) -> torch.Tensor:
    """The tensor on the device that it was saved from; `device` unless it was elsewhere."""
    return tensor.to(devices.get(place, device))
