"""What is recorded of a model's constructor: the operations that made and changed its tensors (`empty_init`)."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_OVERWRITES = {
    *("normal_.default", "uniform_.default", "zero_.default", "fill_.Scalar", "fill_.Tensor", "copy_.default"),
    *("bernoulli_.float", "random_.default", "random_.from", "random_.to", "exponential_.default"),
    "_no_grad_trunc_normal_",
}
"""Operations that write their first argument, whatever it was."""


@dataclass(frozen=True)
class View:
    """A tensor of the body: where it lies in which storage, by number."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Operation:
    """One that makes or changes tensors. Of its arguments, tensors of the body are views; others are copies."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: tuple[tuple[int, View], ...]
    """Those of its results, by their place, that have a new storage."""
    is_random: bool = False
    fresh: tuple[tuple[int, int], ...] = ()
    """Storages that it writes whole without reading them, with their sizes in bytes."""
    begins_at: torch.Tensor | int | None = None
    """Of a random one: the generator's state before it, or the number of the operation that left it so."""

    def storages(self) -> set[int]:
        """Return the storages that it touches."""
        views = found([self.arguments, self.options], View)
        return {one.storage for one in views} | {view.storage for _, view in self.made}

    def update(self, digest: Any) -> None:
        """Add what it does to a digest, which is then the same on ranks that do the same."""
        digest.update(repr((self.function.__name__, self.made, type(self.begins_at).__name__)).encode())
        for one in found([self.arguments, self.options], object):
            digest.update(content(one) if isinstance(one, torch.Tensor) else repr(one).encode())


@dataclass
class Recording:
    """What the body did. `generator` is the state of the device's generator before it."""

    device: torch.device
    generator: torch.Tensor
    operations: list[Operation] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    """Of storages, by their id."""
    storages: list[Any] = field(default_factory=list)
    registered: dict[int, tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=dict)
    """Parameters and buffers, by their id, and how often each had been changed when the body ended."""
    ends_after: int | None = None
    """The random operation after which the body ended; None if it had set the generator's state itself."""
    states: dict[bytes, int] = field(default_factory=dict)
    """Random operations, by the state that stands for the one that the generator will have after it."""

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage; None if it was not made in the body."""
        return self.numbers.get(id(tensor.untyped_storage()))

    def view(self, tensor: torch.Tensor) -> View:
        """Return what describes a tensor on the meta device. A new storage gets a number."""
        storage = tensor.untyped_storage()
        if id(storage) not in self.numbers:
            self.numbers[id(storage)] = len(self.storages)
            self.storages.append(storage)  # kept: the id is no other's then
        number = self.numbers[id(storage)]
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def changed(self, tensor: torch.Tensor) -> bool:
        """Return whether a parameter or buffer was changed after the body."""
        one, version = self.registered.get(id(tensor), (None, 0))
        return one is not None and one() is tensor and tensor._version != version

    def is_alive(self) -> bool:
        """Return whether a model still has a parameter or buffer of the body."""
        return any((one := kept()) is not None and one.is_meta for kept, _ in self.registered.values())

    def digest(self) -> str:
        """Return a SHA-256 of what the body did, without the generator's states."""
        digest = hashlib.sha256()
        for operation in self.operations:
            operation.update(digest)
        return digest.hexdigest()

    def needed_for(self, storage: int) -> list[Operation]:
        """Return the operations that the content of a storage depends on, in order."""
        wanted, needed = {storage}, []
        for operation in reversed(self.operations):
            touched = operation.storages()
            if touched & wanted:  # one that only reads it is needless, and harmless
                wanted |= touched
                needed.append(operation)
        return needed[::-1]


def renamed(recording: Recording) -> tuple[list[Operation], dict[int, int]]:
    """Return the operations with another number for a storage whenever one of them writes it whole, and the last ones.

    A weight that the constructor makes, and later initializes anew, needs no memory in between.
    """
    operations: list[Operation] = []
    now = {number: number for number in range(len(recording.storages))}
    sizes = {number: storage.nbytes() for number, storage in enumerate(recording.storages)}

    def renumbered(value: Any) -> Any:
        return replace(value, storage=now[value.storage]) if isinstance(value, View) else value

    for one in recording.operations:
        arguments, options = mapped(one.arguments, renumbered), mapped(one.options, renumbered)
        fresh: tuple[tuple[int, int], ...] = ()
        written = one.arguments[0] if one.arguments and one.function.__name__ in _OVERWRITES else None
        if isinstance(written, View) and _is_whole(written, sizes[written.storage]):
            others = {view.storage for view in found([one.arguments[1:], one.options], View)}
            if written.storage not in others:
                now[written.storage] = new = len(sizes) + len(operations)
                fresh = ((new, sizes[written.storage]),)
                arguments = (renumbered(written), *arguments[1:])
        operations.append(replace(one, arguments=arguments, options=options, fresh=fresh))
    return operations, now


def _is_whole(view: View, size: int) -> bool:
    """Whether a tensor has all elements of its storage, each once."""
    strides = sorted((stride, length) for length, stride in zip(view.size, view.stride) if length > 1)
    expected = 1
    for stride, length in strides:
        if stride != expected:
            return False
        expected *= length
    return view.offset == 0 and expected * view.dtype.itemsize == size and 0 not in view.size


def order(operations: list[Operation]) -> list[int]:
    """Return an order in which few storages are alive at a time. On each storage, and of random ones, it stays.

    A random operation runs when it is its turn, what it needs just before it, and what needs nothing else after it.
    """
    before: list[set[int]] = []
    after: list[set[int]] = [set() for _ in operations]
    newest: dict[int, int] = {}
    for at, one in enumerate(operations):
        touched = one.storages()
        before.append({newest[number] for number in touched if number in newest})
        for earlier in before[at]:
            after[earlier].add(at)
        newest |= dict.fromkeys(touched, at)
    ordered: dict[int, None] = {}
    for at in (*(at for at, one in enumerate(operations) if one.is_random), *range(len(operations))):
        waiting = [at]
        while waiting:
            if waiting[-1] in ordered:
                waiting.pop()
            elif needed := [one for one in before[waiting[-1]] if one not in ordered]:
                waiting += needed
            else:
                ordered[waiting[-1]] = None
                follow = sorted(after[waiting.pop()], reverse=True)
                ready = [one for one in follow if all(other in ordered for other in before[one])]
                waiting += [one for one in ready if not operations[one].is_random]
    return list(ordered)


def found(value: Any, kind: type[T]) -> list[T]:
    """Return the leaves of this type in lists, tuples and dictionaries."""
    if isinstance(value, Mapping):
        return found(list(value.values()), kind)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [leaf for one in value for leaf in found(one, kind)]
    return [value] if isinstance(value, kind) else []


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return lists, tuples and dictionaries with the function's results in place of their leaves."""
    if isinstance(value, dict):
        return {name: mapped(one, function) for name, one in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)([mapped(one, function) for one in value])
    return function(value)


def content(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
