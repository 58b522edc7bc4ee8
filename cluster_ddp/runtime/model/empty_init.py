"""`World.empty_init`: a model's constructor without memory for its tensors. What it does to them is recorded.

In the body, tensors are on torch's meta device: they have a shape, and no values. Each operation that makes or changes
one is recorded, below autograd, where torch has the same ones as for any device. `World.wrap` has `replay` run them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents it under this name, for extending torch
from torch.utils._pytree import tree_leaves, tree_map_only

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime import rng
from cluster_ddp.runtime.model.dtensor_pieces import content
from cluster_ddp.runtime.model.materialize import META, Operation, Owner, Recording, Replay, View

_ASKED = "Building a model in world.empty_init():"
_HINT = "build that part of the model outside of the body"
_TRUNC_NORMAL = torch.nn.init._no_grad_trunc_normal_
_STAND_INS = 0x5EED0000  # seeds
# Functions that make a tensor from numbers. Those that take data (torch.tensor, as_tensor) make a real one.
_NAMES = """
    empty empty_permuted empty_strided zeros ones full eye arange range linspace logspace rand randn randint randperm
    tril_indices triu_indices bartlett_window blackman_window hamming_window hann_window kaiser_window
"""
_FACTORIES = {*(getattr(torch, name) for name in _NAMES.split()), torch.fft.fftfreq, torch.fft.rfftfreq}
_ITEM, _COPY = torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default
# They write their first argument, whatever it was.
_OVERWRITES = {
    *("normal_.default", "uniform_.default", "zero_.default", "fill_.Scalar", "fill_.Tensor", "copy_.default"),
    *("bernoulli_.float", "random_.default", "random_.from", "random_.to", "exponential_.default"),
    _TRUNC_NORMAL.__name__,
}

recordings: list[Recording] = []
"""Of bodies whose models may still be wrapped."""


@contextmanager
def recorded(device: torch.device) -> Iterator[None]:
    """Record the body as `World.empty_init` describes."""
    recordings[:] = [one for one in recordings if any(map(_is_unmade, one.registered.values()))]
    if torch.nn.init._no_grad_trunc_normal_ is not _TRUNC_NORMAL:
        raise SpecError(_ASKED, "it is in the body of another one.", "use one for the whole model")
    recording = Recording(device, rng.of_device(device))
    registered: list[weakref.ref[torch.Tensor]] = []

    def note(_: torch.nn.Module, __: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.device == META:  # is_meta is False in the body
            registered.append(weakref.ref(tensor))

    operations = _Operations(recording)
    with ExitStack() as stack:
        for kind in ("parameter", "buffer"):
            stack.callback(getattr(hooks, f"register_module_{kind}_registration_hook")(note).remove)
        # It draws again while values are out of bounds, which nobody can record: so its calls are (torch 2.10 to 2.14).
        stack.callback(setattr, torch.nn.init, "_no_grad_trunc_normal_", _TRUNC_NORMAL)
        torch.nn.init._no_grad_trunc_normal_ = operations.trunc_normal
        try:
            with operations, _Factories():
                yield
        finally:
            recording.end(after=operations.last_random())
            if recording.ends_after is not None or not operations.ends:
                rng.set_of_device(device, recording.generator)
    recording.register(registered)
    recordings.append(recording)


def owners(model: torch.nn.Module) -> list[tuple[Recording, list[Owner]]]:
    """Return who has which parameter or buffer on the meta device, by the recording of the body that made it.

    Raises:
        SpecError: one was not made in the body of `World.empty_init`, or was changed after it.
    """
    by_recording: list[tuple[Recording, list[Owner]]] = [(recording, []) for recording in recordings]
    asked = "world.wrap(model):"
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for what, tensor in ((name, tensor) for name, tensor in named if tensor.is_meta):
        for recording, found in by_recording:
            if recording.number(tensor) is not None:
                path, _, name = what.rpartition(".")
                found.append((model.get_submodule(path), name, tensor))
                break
        else:
            why = f"{what} is on the meta device and was not made in the body of world.empty_init()."
            raise SpecError(asked, why, "build the whole model there, conversions of dtype, too")
        kept, version = recording.registered.get(id(tensor), (lambda: None, 0))
        if tensor._version != version and kept() is tensor:
            why = f"{what} was changed after the body of world.empty_init(), where no tensor has values."
            raise SpecError(asked, why, "change it in the body, or after world.wrap")
    return [(recording, found) for recording, found in by_recording if found]


def _is_unmade(registered: tuple[weakref.ref[torch.Tensor], int]) -> bool:
    return (tensor := registered[0]()) is not None and tensor.is_meta


class _Factories(TorchFunctionMode):
    """Puts new tensors on the meta device, unless the call names another one.

    torch.nn.init leaves out some of its work for tensors there (`is_meta`), so it does not learn of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META:  # each access makes an object of its own
            return False
        if func in _FACTORIES and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": META}
        return func(*args, **kwargs)


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class _Operations(TorchDispatchMode):
    """Records the operations on tensors of the meta device, and runs them there."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self.ends: dict[bytes, int] = {}
        """Random operations, by a digest of the state that stands for the one that the generator will have after it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_ours = any(isinstance(one, torch.Tensor) and one.device == META for one in tree_leaves([args, kwargs]))
        if not is_ours and kwargs.get("device") != META:
            if is_random and self.last_random() is not None:
                found = f"{func} draws real numbers after those of weights."
                raise SpecError(_ASKED, found, "draw them before the body")
            return func(*args, **kwargs)
        if func is _ITEM or (func is _COPY and kwargs.get("device") not in (None, META)):
            return self._read(func, args, kwargs)
        return self._run(func, args, kwargs, is_random)

    def trunc_normal(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record a call of torch.nn.init._no_grad_trunc_normal_ as one operation."""
        if tensor.device != META:
            return _TRUNC_NORMAL(tensor, *args, **kwargs)
        self._note(_TRUNC_NORMAL, *self._described((tensor, *args), kwargs), made=[], is_random=True)
        return tensor

    def last_random(self) -> int | None:
        """Return the random operation after which the generator is now; None if its state was set since."""
        return self.ends.get(_digest(rng.of_device(self._recording.device)))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], is_random: bool) -> Any:
        for argument, given in zip(func._schema.arguments, args):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(given, torch.Tensor) and given.device != META:
                raise SpecError(_ASKED, f"{func} writes values of a weight into a real tensor.", _HINT)
        arguments, options = self._described(args, kwargs)
        try:
            args, kwargs = tree_map_only(torch.Tensor, lambda one: one.to(META), (args, kwargs))
            results = func(*args, **kwargs)
        except NotImplementedError as error:
            raise SpecError(_ASKED, f"{func} can't be recorded: {error}", _HINT) from error
        made = [
            (at, one)
            for at, one in enumerate(tree_leaves(results))
            if isinstance(one, torch.Tensor) and one.device == META and self._recording.number(one) is None
        ]
        if made or func._schema.is_mutable:
            self._note(func, arguments, options, made=made, is_random=is_random)
        return results

    def _note(
        self, func: Any, arguments: Any, options: Any, *, made: list[tuple[int, torch.Tensor]], is_random: bool
    ) -> None:
        recording, device = self._recording, self._recording.device
        views = tuple((at, recording.view(one)) for at, one in made)
        begins_at: torch.Tensor | int | None = None
        if is_random:
            if options.get("generator") is not None:
                raise SpecError(_ASKED, f"{func} draws from a generator of its own.", "torch.manual_seed instead")
            begins_at = self.last_random()
            if begins_at is None:
                begins_at = rng.of_device(device)
            elif begins_at == next(reversed(self.ends.values())):
                begins_at = None
        fresh, arguments = self._renewed(func, arguments, options)
        recording.operations.append(Operation(func, arguments, options, views, is_random, begins_at, fresh))
        if is_random:  # the generator's state after it is not known yet: another one stands for it
            stand_in = torch.Generator(device).manual_seed(_STAND_INS + len(self.ends)).get_state()
            self.ends[_digest(stand_in)] = len(recording.operations) - 1
            rng.set_of_device(device, stand_in)

    def _renewed(self, func: Any, arguments: Any, options: Any) -> tuple[tuple[int, int] | None, Any]:
        """`Operation.fresh`, and the arguments: a new content has a number of its own.

        So a weight that the constructor makes, and later initializes anew, needs no memory in between.
        """
        written, *others = arguments or [None]
        if func.__name__ not in _OVERWRITES or not isinstance(written, View):
            return None, arguments
        storage = self._recording.storages[written.number]
        is_read = any(isinstance(one, View) and one.number == written.number for one in tree_leaves([others, options]))
        if is_read or not written.is_whole(storage.nbytes()):
            return None, arguments
        written = replace(written, number=self._recording.renew(storage))
        return (written.number, storage.nbytes()), (written, *others)

    def _described(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """The arguments, with views in place of tensors of the body, and copies of others: they may change later."""

        def described(value: torch.Tensor) -> View | torch.Tensor:
            if value.device != META:
                return value.detach().clone()
            if self._recording.number(value) is None:
                raise SpecError(_ASKED, "it uses a tensor on the meta device that was made before.", _HINT)
            if value.is_conj() or value.is_neg():
                raise SpecError(_ASKED, "a view of a complex tensor can't be recorded.", _HINT)
            return self._recording.view(value)

        return tree_map_only(torch.Tensor, described, (args, kwargs))

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Let the body read values, as by .item(), if they follow from numbers alone, as torch.linspace's."""
        number = self._recording.number(args[0])
        wanted, needed = {number}, []
        for operation in reversed(self._recording.operations):
            if (touched := operation.touched()) & wanted:  # one that only reads it is needless, and harmless
                wanted |= touched
                needed.append(operation)
        if number is None or any(one.is_random for one in needed):
            why = "a value of a random tensor is read (.item(), .tolist(), .cpu(), .to(device), if tensor: …)."
            raise SpecError(_ASKED, why, "leave that out: world.wrap moves the model; or " + _HINT)
        replay = Replay(self._recording.device)
        for operation in reversed(needed):
            replay.run(operation)
        return func(replay.tensor(self._recording.view(args[0])), *args[1:], **kwargs)


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(content(state), digest_size=16).digest()
