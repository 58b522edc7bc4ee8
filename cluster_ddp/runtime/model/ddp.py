"""A model in DistributedDataParallel, with defaults for training that resumes exactly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.errors import SpecError, check_options
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.data.batch_iterator import BatchIterator

T = TypeVar("T")

_NEVER = 2**31 - 1
_UNCHANGING = (type(None), int, float, str, torch.dtype, torch.distributed.ProcessGroup, weakref.ref, Collectives)
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
        batch.is_accumulated = True
    # torch.compile's wrapper has the names of what it wraps, too.
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # of FSDP2
    if set_sync is None and not hasattr(model, "no_sync"):
        asked = f"Accumulating gradients of a {type(model).__name__}:"
        raise SpecError(asked, "it is not wrapped.", "model = world.wrap(model)")
    with ExitStack() as stack:
        if set_sync is not None:
            set_sync(is_last)
            stack.callback(set_sync, True)
        elif not is_last:
            stack.enter_context(model.no_sync())  # type: ignore[operator]
        yield is_last


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
