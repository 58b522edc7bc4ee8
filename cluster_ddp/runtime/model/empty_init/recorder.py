"""A model's constructor without memory for its tensors: what it does to them is recorded, and replayed by `replay`.

In the body of `World.empty_init`, tensors are on torch's meta device: they have a shape, and no values. Each operation
that makes or changes one is recorded, below autograd, where torch has the same ones as for any device.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents it under this name, for extending torch

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime import rng
from cluster_ddp.runtime.model.empty_init.recording import Operation, Recording, content, found, mapped
from cluster_ddp.runtime.model.empty_init.replay import Replay

_ASKED = "Building a model in world.empty_init():"
_HINT = "build that part of the model outside of the body"
_META = torch.device("meta")
_TRUNC_NORMAL = torch.nn.init._no_grad_trunc_normal_
_STAND_INS = 0x5EED0000  # seeds
# Functions that make a tensor from numbers. Those that take data (torch.tensor, as_tensor) make a real one.
_NAMES = (
    *("empty", "empty_permuted", "empty_strided", "zeros", "ones", "full", "eye", "arange", "range", "linspace"),
    *("logspace", "rand", "randn", "randint", "randperm", "tril_indices", "triu_indices", "bartlett_window"),
    *("blackman_window", "hamming_window", "hann_window", "kaiser_window"),
)
_FACTORIES = {*(getattr(torch, name) for name in _NAMES), torch.fft.fftfreq, torch.fft.rfftfreq}
_ITEM, _COPY = torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default


recordings: list[Recording] = []
"""Of bodies whose models may still be wrapped."""


@contextmanager
def recorded(device: torch.device) -> Iterator[None]:
    """Record the body as `World.empty_init` describes."""
    recordings[:] = [one for one in recordings if one.is_alive()]
    if torch.nn.init._no_grad_trunc_normal_ is not _TRUNC_NORMAL:
        raise SpecError(_ASKED, "it is in the body of another one.", "use one for the whole model")
    recording = Recording(device, rng.of_device(device))
    registered: list[weakref.ref[torch.Tensor]] = []

    def note(_: torch.nn.Module, __: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.device == _META:  # is_meta is False in the body
            registered.append(weakref.ref(tensor))

    operations = _Operations(recording)
    with ExitStack() as stack:
        for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            stack.callback(register(note).remove)
        # It draws again while values are out of bounds, which nobody can record: so its calls are (torch 2.10 to 2.14).
        stack.callback(setattr, torch.nn.init, "_no_grad_trunc_normal_", _TRUNC_NORMAL)
        torch.nn.init._no_grad_trunc_normal_ = functools.partial(operations.whole, _TRUNC_NORMAL)
        try:
            with operations, _Factories():
                yield
        finally:
            recording.ends_after = recording.states.get(_digest(rng.of_device(device)))
            if recording.ends_after is not None or not recording.states:
                rng.set_of_device(device, recording.generator)
    recording.registered = {id(tensor): (one, tensor._version) for one in registered if (tensor := one()) is not None}
    recordings.append(recording)


class _Factories(TorchFunctionMode):
    """Puts new tensors on the meta device, unless the call names another one.

    torch.nn.init leaves out some of its work for tensors there (`is_meta`), so it does not learn of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META:  # each access makes an object of its own
            return False
        if func in _FACTORIES and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": _META}
        return func(*args, **kwargs)


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class _Operations(TorchDispatchMode):
    """Records the operations on tensors of the meta device, and runs them there."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = found([args, kwargs], torch.Tensor)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not any(tensor.device == _META for tensor in tensors) and kwargs.get("device") != _META:
            if is_random and _digest(rng.of_device(self._recording.device)) in self._recording.states:
                raise SpecError(
                    _ASKED, f"{func} draws real numbers after those of weights.", "draw them before the body"
                )
            return func(*args, **kwargs)
        if func is _ITEM or (func is _COPY and kwargs.get("device") not in (None, _META)):
            return self._read(func, args, kwargs)
        return self._run(func, args, kwargs, is_random)

    def whole(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record a call of a function that changes a tensor, as one operation."""
        if tensor.device != _META:
            return function(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        self._note(function, *self._described((tensor, *args), kwargs), made=[], is_random=True)
        return tensor

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], is_random: bool) -> Any:
        for argument, given in zip(func._schema.arguments, args):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(given, torch.Tensor) and given.device != _META:
                raise SpecError(_ASKED, f"{func} writes values of a weight into a real tensor.", _HINT)
        arguments, options = self._described(args, kwargs)
        known = set(self._recording.numbers)
        try:
            results = func(*_on_meta(args), **_on_meta(kwargs))
        except NotImplementedError as error:
            raise SpecError(_ASKED, f"{func} can't be recorded: {error}", _HINT) from error
        flat = found([results], torch.Tensor)
        made = [
            (at, one) for at, one in enumerate(flat) if one.device == _META and id(one.untyped_storage()) not in known
        ]
        if made or func._schema.is_mutable:
            self._note(func, arguments, options, made=made, is_random=is_random)
        return results

    def _note(
        self, func: Any, arguments: Any, options: Any, *, made: list[tuple[int, torch.Tensor]], is_random: bool
    ) -> None:
        recording, begins_at = self._recording, None
        views = tuple((at, recording.view(one)) for at, one in made)
        if is_random:
            if options.get("generator") is not None:
                raise SpecError(_ASKED, f"{func} draws from a generator of its own.", "torch.manual_seed instead")
            state = rng.of_device(recording.device)
            begins_at = recording.states.get(_digest(state), state)
        recording.operations.append(Operation(func, arguments, options, views, is_random, begins_at=begins_at))
        if is_random:  # the generator's state after it is not known yet: another one stands for it
            stand_in = torch.Generator(recording.device).manual_seed(_STAND_INS + len(recording.states)).get_state()
            recording.states[_digest(stand_in)] = len(recording.operations) - 1
            rng.set_of_device(recording.device, stand_in)

    def _described(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments, with views in place of tensors of the body, and copies of others: they may change later."""

        def described(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.device != _META:
                return value.detach().clone()
            if self._recording.number(value) is None:
                raise SpecError(_ASKED, "it uses a tensor on the meta device that was made before.", _HINT)
            if value.is_conj() or value.is_neg():
                raise SpecError(_ASKED, "a view of a complex tensor can't be recorded.", _HINT)
            return self._recording.view(value)

        return mapped(args, described), mapped(kwargs, described)

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Let the body read values, as by .item(), if they follow from numbers alone, as torch.linspace's."""
        recording = self._recording
        number = recording.number(args[0])
        needed = [] if number is None else recording.needed_for(number)
        if number is None or any(one.is_random for one in needed):
            why = "a value of a random tensor is read (.item(), .tolist(), .cpu(), .to(device), if tensor: …)."
            raise SpecError(_ASKED, why, "leave that out: world.wrap moves the model; or " + _HINT)
        replay = Replay(recording.device)
        for operation in needed:
            replay.run(operation)
        return func(replay.tensor(recording.view(args[0])), *args[1:], **kwargs)


def _on_meta(value: Any) -> Any:
    return mapped(value, lambda one: one.to(_META) if isinstance(one, torch.Tensor) else one)


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(content(state), digest_size=16).digest()
