"""A model in DistributedDataParallel, with defaults for training that resumes exactly."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.errors import SpecError, check_options
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.data.batch_iterator import BatchIterator
from cluster_ddp.runtime.failure import last_progress

T = TypeVar("T")
log = logging.getLogger("cluster_ddp")

_NEVER = 2**31 - 1
_UNCHANGING = (type(None), int, float, str, torch.dtype, dist.ProcessGroup, weakref.ref, Collectives)
_HINT = "leave it out; for a model on several devices: world.wrap(model, place=False)"
_CHOSEN = dict.fromkeys(("module", "device_ids", "output_device"), ("world.wrap chooses it.", _HINT))


def wrap(
    model: torch.nn.Module,
    device: torch.device,
    *,
    place: bool,
    options: Mapping[str, Any],
    synchronize: Callable[[], object],
) -> DistributedDataParallel:
    """Wrap a model as `World.wrap` describes, with its errors. `synchronize` waits for the device."""
    check_options(options, "world.wrap(model, {}=…)", DistributedDataParallel, chosen=_CHOSEN)
    device_ids = [device.index] if place and device.type == "cuda" else None
    model = model.to(device) if place else model
    options = {"gradient_as_bucket_view": True, **options}
    # Without a static graph, DDP with find_unused_parameters keeps its first buckets, which are in the right order.
    sorts_later = options.get("static_graph") or not options.get("find_unused_parameters")
    kind = _LastFirst if sorts_later else DistributedDataParallel
    wrapped = kind(model, device_ids=device_ids, **options)
    wrapped.__class__ = DistributedDataParallel
    if device.type == "cuda":
        # In every hundredth step DDP would measure times: it waits for the device then, and no graph can capture that.
        wrapped._set_ddp_runtime_logging_sample_rate(_NEVER)
    prebuild_ddp_buckets(wrapped, synchronize)
    return wrapped


class _LastFirst(DistributedDataParallel):
    """Lists parameters from the last one to the first, as a backward pass usually reaches them."""

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], are_sparse[::-1]


def prebuild_ddp_buckets(model: DistributedDataParallel, synchronize: Callable[[], object]) -> None:
    """Give DDP's buckets their final order, that of its list of parameters. A collective.

    After the first backward pass (with static_graph the second) DDP would sort parameters into buckets by the order in
    which it reached them: a resumed training would begin with other buckets than it had. With more than two ranks, a
    gradient's place in its bucket decides the order in which the ranks' values are added.

    DDP would sort them in the next forward pass, in which rank 0 broadcasts the order: a wait in C++, on GPUs without
    our time limit. So it sorts them now, when all ranks are known to be here. No backward pass is needed: with a static
    graph, DDP would take its first one for the graph.

    Raises:
        DeviceTimeoutError, PeerFailedError: as `World.synchronize`.
    """
    synchronize()  # DDP has compared the parameters of all ranks: once that has ended, all have come
    model.reducer._push_all_rebuilt_params()  # as DDP's join hook does (torch 2.10 to 2.14)
    model._has_rebuilt_buckets = model.reducer._rebuild_buckets()  # as DDP's own forward does


def unwrapped(part: T) -> T:
    """Return the module inside DistributedDataParallel and torch.compile, in whatever order; others unchanged.

    Its state has the plain names of the parameters, without "module." and "_orig_mod.".
    """
    inner = part
    while True:
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        elif "_orig_mod" in getattr(inner, "_modules", {}):  # torch.compile's OptimizedModule
            inner = inner._orig_mod  # type: ignore[attr-defined]
        else:
            return inner


def hook_states(part: object) -> list[object]:
    """Return the states of the communication hooks that a script has registered with a model; none of other parts."""
    model = getattr(part, "_orig_mod", part)
    hooks = model._comm_hooks if isinstance(model, DistributedDataParallel) else []
    # DDP's own hooks, for mixed_precision and for optimizers in the backward pass, refer to it.
    return [state for _, state in hooks if not isinstance(state, _UNCHANGING) and not hasattr(state, "ddp_weakref")]


@contextmanager
def accumulate(model: torch.nn.Module, batch: BatchIterator | int, *, every: int | None) -> Iterator[bool]:
    """Run forward and backward in the body as `World.accumulate` describes, with its errors."""
    is_last = _is_last(batch, every)
    if not isinstance(batch, int):
        batch.note_accumulation()
    # torch.compile's wrapper has the names of what it wraps, too.
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # of FSDP2
    if set_sync is None and not hasattr(model, "no_sync"):
        asked = f"Accumulating gradients of a {type(model).__name__}:"
        raise SpecError(asked, "it is not wrapped.", "model = world.wrap(model)")
    with ExitStack() as stack:
        if set_sync is not None:
            set_sync(is_last)
            stack.callback(set_sync, True)
        else:
            stack.enter_context(_sum_of(model).adding(_update(batch, every), is_last=is_last))
            if not is_last:
                stack.enter_context(model.no_sync())  # type: ignore[operator]
        yield is_last
    last_progress.note_micro_batch(None)  # not if an error leaves the body: that says it


class _SumOfBatches:
    """Says once if zero_grad is called within an update of a DDP model. (It harms none of FSDP2: the sum is elsewhere.)

    It looks at one gradient before each backward pass. That waits for a GPU only if the gradient was changed in place.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameter = min((one for one in model.parameters() if one.requires_grad), key=torch.Tensor.numel)
        self._parameter.register_hook(self._before_pass)
        self._update, self._is_adding, self._has_told = -1, False, dist.get_rank() != 0
        self._sum: tuple[torch.Tensor, int, torch.Tensor] | None = None  # the gradient, its version, and a copy of it

    @contextmanager
    def adding(self, update: int, *, is_last: bool) -> Iterator[None]:
        """Add the gradients of a batch of this update in the body."""
        if update != self._update:
            self._update, self._sum = update, None
        self._is_adding = True
        try:
            yield
        finally:
            self._is_adding = False
        gradient = self._parameter.grad
        self._sum = None if is_last or gradient is None else (gradient, gradient._version, gradient.clone())

    def _before_pass(self, _: torch.Tensor) -> None:
        if self._sum is None or not self._is_adding or self._has_told:
            return
        (before, version, copy), self._sum = self._sum, None
        gradient = self._parameter.grad
        if gradient is before and before._version == version:
            return
        if gradient is None or (not gradient.any() and copy.any()):
            self._has_told = True
            asked = f"Accumulating gradients in update {self._update + 1} of the epoch:"
            found = "zero_grad was called within the update: the gradients of its batches before are lost."
            hint = "call it only after the optimizer's step: `if is_last: optimizer.step(); optimizer.zero_grad()`"
            log.error("%s\nTraining continues.", SpecError(asked, found, hint))


_sums: weakref.WeakKeyDictionary[torch.nn.Module, _SumOfBatches] = weakref.WeakKeyDictionary()


def _sum_of(model: torch.nn.Module) -> _SumOfBatches:
    if model not in _sums:
        _sums[model] = _SumOfBatches(model)
    return _sums[model]


def _update(batch: BatchIterator | int, every: int | None) -> int:
    """The number of a batch's update in its epoch, from 0."""
    number = batch if isinstance(batch, int) else batch.step
    return number if every is None else number // every


def _is_last(batch: BatchIterator | int, every: int | None) -> bool:
    """Whether a batch is the last one of its update."""
    asked = f"Accumulating {'the' if every is None else every} batches of an update:"
    if every is None:
        if isinstance(batch, int):
            raise SpecError(asked, f"without a shard, batch {batch} may be the last one or not.", "every=4")
        return batch.ends_update
    if every < 1:
        raise SpecError(asked, "an update needs 1 or more.", "every=4")
    if not isinstance(batch, int) and batch.accumulates:
        raise SpecError(asked, "the shard's global_batch has chosen their number.", "leave every= out")
    step, is_end = (batch, False) if isinstance(batch, int) else (batch.step, batch.is_at_end)
    return is_end or (step + 1) % every == 0
