"""The parts of a training: whatever has a state."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
import torch

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime import rng


class Stateful(Protocol):
    """Anything with a state: a model, an optimizer, a scheduler, a grad scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state, of tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state of `state_dict`."""


class ScriptVariables:
    """Variables of the script as a part, such as the best loss: what a namespace has.

    Numbers, texts, tensors, lists and dictionaries of them, a deque; NumPy's arrays; random number generators of torch,
    NumPy and Python. Arrays and tensors may grow. A resume fills the objects that the script has made, to which others
    may refer, such as the optimizer of a tensor that trains.
    """

    def __init__(self, namespace: SimpleNamespace) -> None:
        self.namespace = namespace
        """What the script has given."""

    def state_dict(self) -> dict[str, Any]:
        """Return them by name, of an array a tensor, and of a generator its state."""
        return {name: _saved(value) for name, value in vars(self.namespace).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set them to those of `state_dict`. One that is new in the script stays as it is."""
        now = vars(self.namespace)
        now.update({name: _loaded(now.get(name), value) for name, value in state_dict.items()})


def _saved(value: object) -> object:
    if isinstance(value, np.ndarray):
        with contextlib.suppress(TypeError, ValueError):  # else it is refused, as what torch.load does not read
            return torch.from_numpy(value.copy())
    if isinstance(value, deque):
        return list(value)
    return rng.state_of(value) if isinstance(value, rng.GENERATORS) else value


def _loaded(now: Any, value: Any) -> object:
    """The object that the script has made, with a saved value; or the value, where that can't be filled."""
    if isinstance(now, np.ndarray):
        array = value.numpy()
        if (now.shape, now.dtype) != (array.shape, array.dtype) or not now.flags.writeable:
            return array.copy()
        now[...] = array
    elif isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
        alike = (now.shape, now.dtype, now.layout) == (value.shape, value.dtype, value.layout)
        if not alike or not now.is_leaf:
            return value
        with torch.no_grad():
            now.copy_(value)
    elif isinstance(now, dict) and isinstance(value, dict):
        by_key = {key: _trained(now.get(key), one) for key, one in value.items()}
        now.clear()
        now.update(by_key)
    elif isinstance(now, set) and isinstance(value, set):
        now.clear()
        now.update(value)
    elif isinstance(now, deque) or (isinstance(now, list) and isinstance(value, list)):
        items = [_trained(one, other) for one, other in itertools.zip_longest(now, value)][: len(value)]
        now.clear()
        now.extend(items)
    elif isinstance(now, rng.GENERATORS):
        rng.set_state_of(now, value)
    else:
        return value
    return now


def _trained(now: Any, value: Any) -> object:
    """A saved value in a container; of a tensor that trains the script's own, which an optimizer has."""
    is_trained = isinstance(now, torch.Tensor) and now.requires_grad
    return _loaded(now, value) if is_trained or isinstance(now, dict | list) else value


def as_part(name: str, given: object) -> Stateful:
    """Return a part with its state.

    Raises:
        SpecError: it has none.
    """
    if isinstance(given, SimpleNamespace):
        return ScriptVariables(given)
    if not (hasattr(given, "state_dict") and hasattr(given, "load_state_dict")):
        found = f"it is a {type(given).__name__}, which has no state_dict() and load_state_dict(state)."
        hint = "keep variables of the script in a part: types.SimpleNamespace(best=0.0)"
        raise SpecError(f"Saving the part {name!r}:", found, hint)
    return cast(Stateful, given)
