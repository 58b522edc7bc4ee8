"""Modules that are no part of the Checkpointer, and change in the training: an average of weights, a loss with a state.

A resume begins with them as they were made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from cluster_ddp.runtime.contents import plain_tensor
from cluster_ddp.runtime.model.dtensor_pieces import content, local_part

_LOOKED_AT = 4  # tensors of each module, the smallest: an average changes all of them
_LARGEST_BYTES = 1 << 20


class OtherModules:
    """Keeps a few small tensors of modules, and their numbers, to see later whether they have changed."""

    def __init__(self) -> None:
        self._numbers: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module], dict[str, object]]] = []
        self._first: list[tuple[weakref.ref[nn.Module], weakref.ref[torch.Tensor], bytes]] = []
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def note(self, modules: Iterable[nn.Module], saved: Iterable[nn.Module]) -> None:
        """Note those of these modules that no saved one has, as they are now."""
        saved = list(saved)
        known = {id(tensor) for one in saved for tensor in _own_tensors(one)} | {id(one) for one in saved}
        modules = [one for one in modules if id(one) not in known]
        inner = {id(child) for one in modules for child in one.children()}
        for one in modules:
            if id(one) in inner or one in self._seen:
                continue
            self._seen.add(one)
            self._numbers += [(weakref.ref(one), weakref.ref(module), _numbers(module)) for module in one.modules()]
            tensors = [tensor for module in one.modules() for tensor in _own_tensors(module) if id(tensor) not in known]
            tensors = [tensor for tensor in tensors if not (tensor.is_meta or nn.parameter.is_lazy(tensor))]
            small = sorted((local_part(tensor).nbytes, number) for number, tensor in enumerate(tensors))[:_LOOKED_AT]
            self._first += [
                (weakref.ref(one), weakref.ref(tensors[number]), _copy(tensors[number]))
                for size, number in small
                if size <= _LARGEST_BYTES
            ]

    def changed(self) -> set[str]:
        """Return the names of the classes of those that have changed since."""
        found = set()
        for module, tensor, first in self._first:
            owner, now = module(), tensor()
            if owner is not None and now is not None and _copy(now) != first:
                found.add(type(owner).__name__)
        for module, inner, numbers in self._numbers:
            owner, holder = module(), inner()
            if owner is not None and holder is not None and _numbers(holder) != numbers:
                found.add(type(owner).__name__)
        return found


def _numbers(module: nn.Module) -> dict[str, object]:
    """Its numbers, and its small tensors that do not train and are no buffers."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, float | torch.Tensor)}
    return {name: value if isinstance(value, float) else plain_tensor(value) for name, value in found.items()}


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _copy(tensor: torch.Tensor) -> bytes:
    """Its bytes: NaN is equal to NaN."""
    return content(local_part(tensor)).tobytes()
