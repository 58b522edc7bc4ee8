"""What a training has and no checkpoint has: that is said once, since a resume begins without it.

The state of a communication hook of DDP, such as PowerSGD's errors; gradients that no optimizer has used; and what
takes part in the training and was not given to its Checkpointer: optimizers, schedulers, shards, DataLoaders.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime import non_finite
from cluster_ddp.runtime.data.batch_iterator import BatchIterator, being_read
from cluster_ddp.runtime.data.shard import DistributedBatchSampler
from cluster_ddp.runtime.data.stream import Stream
from cluster_ddp.runtime.data.stream_reader import StreamReader
from cluster_ddp.runtime.model import ddp
from cluster_ddp.runtime.model.dtensor_pieces import local_part

log = logging.getLogger("cluster_ddp")

_STEPPED = torch.optim.Optimizer, LRScheduler
_OF_HOOK = "give the hook a state that is also in meters: an object with state_dict() and load_state_dicts(states)"
_OF_PART = "give it to the Checkpointer, by a name: Checkpointer(world, …, {name}={name})"
_OF_SHARD = "give all shards to the Checkpointer: shard=[one, another]"
_OF_LOADER = "read it by world.shard(dataset, …), or if it has no length by world.stream(loader, batch_size=None)"
_OF_LATE = "in the loop: optimizer.step(), scheduler.step(), checkpoint.step(), in this order"
_OF_GRADIENTS = (
    "call checkpoint.step() only after the optimizer's step; "
    "`with world.accumulate(model, shard, every=4) as is_last:` says after which batch that is"
)


class Unsaved:
    """Finds that in the parts of a training. Make it before the first step."""

    def __init__(self, parts: Mapping[str, Any], meters: Iterable[object], shards: Sequence[BatchIterator]) -> None:
        self._parts, self._saved, self._shards = dict(parts), [*parts.values(), *meters], shards
        optimizers = [one for one in parts.values() if isinstance(one, torch.optim.Optimizer)]
        self._gradients, self._steps = _Gradients(optimizers), _OptimizerSteps()
        self._schedulers = {name: part for name, part in parts.items() if isinstance(part, LRScheduler)}
        self._scheduled: dict[str, int] | None = None  # at the last step, until the loop's body has run
        self._has_looked = False
        self._averages: list[tuple[weakref.ref[AveragedModel], int]] = []  # how many updates each had in the first step
        self._told: set[str] = set()

    @property
    def optimizer_steps(self) -> int:
        """Number of steps that all optimizers of this process have made."""
        return self._steps.count

    def note_step(self) -> None:
        """Call it in each step, and `tell_of_late` once the loop's body has run."""
        self._scheduled = {name: _last_epoch(part) for name, part in self._schedulers.items()}

    def tell_of_late(self, step: int) -> None:
        """Say which schedulers have stepped after this step was counted."""
        before, self._scheduled = self._scheduled or {}, None
        for name, last_epoch in before.items():
            if _last_epoch(self._schedulers[name]) != last_epoch:
                self._say(step, f"{name!r} stepped after checkpoint.step().", _OF_LATE)

    def tell(self, step: int) -> None:
        """Say what this step's checkpoint lacks, each once. Call it on rank 0, when its device has done its work."""
        if not self._has_looked:
            self._has_looked = True
            self._look(step)
        for average, before in self._averages:
            one = average()
            if one is not None and int(one.n_averaged) != before:
                found = f"{type(one).__name__} averages weights, and is no part of the Checkpointer."
                self._say(step, found, _OF_PART.format(name="ema"))
        for optimizer in set(self._steps.optimizers) - self._inside_parts():
            if optimizer.state:
                found = f"{type(optimizer).__name__} makes steps, and is no part of the Checkpointer."
                self._say(step, found, _OF_PART.format(name="optimizer"))
        for name, part in self._parts.items():
            for state in ddp.hook_states(part):
                if not any(state is one for one in self._saved):
                    found = f"{name!r} has a communication hook with a state, {type(state).__name__}."
                    self._say(step, found, _OF_HOOK)
        if self._gradients.are_unused():
            self._say(step, "there are gradients that no optimizer has used.", _OF_GRADIENTS)

    def _look(self, step: int) -> None:
        """Look for schedulers, averages and data that take part in the training. Once: it goes through all objects."""
        for one in being_read - set(self._shards):
            self._say(step, f"a {type(one).__name__.lower()} is read that is not the Checkpointer's.", _OF_SHARD)
        objects, parts = gc.get_objects(), self._inside_parts()
        kinds = {type(one) for one in objects}
        schedulers = {kind for kind in kinds if issubclass(kind, LRScheduler)}
        averages = {kind for kind in kinds if issubclass(kind, AveragedModel)}
        loaders = {kind for kind in kinds if issubclass(kind, _BaseDataLoaderIter)}
        for one in objects:
            if type(one) in schedulers and one.optimizer in parts and one not in parts:
                found = f"{type(one).__name__} is a scheduler of a part, and is no part of the Checkpointer."
                self._say(step, found, _OF_PART.format(name="scheduler"))
            elif type(one) in averages and not any(one is saved for saved in self._saved_modules()):
                self._averages.append((weakref.ref(one), int(one.n_averaged)))
            elif type(one) in loaders and _is_under_way(one) and not any(_reads(s, one._dataset) for s in self._shards):
                self._say(step, "a DataLoader is read whose place is not saved.", _OF_LOADER)

    def _saved_modules(self) -> Iterator[torch.nn.Module]:
        """The modules among what is saved, in it, and in its attributes."""
        for saved in self._saved:
            for one in (saved, *getattr(saved, "__dict__", {}).values()):
                if isinstance(one, torch.nn.Module):
                    yield from one.modules()

    def _inside_parts(self) -> set[object]:
        """The optimizers and schedulers among the parts, and in their attributes, such as SequentialLR's list."""
        found: set[object] = set()
        left = list(self._parts.values())
        while left:
            part = left.pop()
            if isinstance(part, _STEPPED):
                found.add(part)
            kinds = LRScheduler if isinstance(part, LRScheduler) else _STEPPED  # its state has none of its optimizer's
            for value in getattr(part, "__dict__", {}).values():
                inside = value if isinstance(value, list | tuple) else (value,)
                left += [one for one in inside if isinstance(one, kinds) and one not in found]
        return found

    def _say(self, step: int, found: str, hint: str) -> None:
        if found not in self._told:
            self._told.add(found)
            lost = "No checkpoint has that, and a resume begins without it: it will not be exact."
            log.error("%s\nTraining continues.", CheckpointError(f"Saving step {step}:", f"{found} {lost}", hint))


def _last_epoch(scheduler: Any) -> int:
    """How often a scheduler has stepped; ChainedScheduler does not know, but those in it do."""
    one = scheduler if hasattr(scheduler, "last_epoch") else scheduler._schedulers[0]
    return int(one.last_epoch)


def _is_under_way(iterator: Any) -> bool:
    """Whether a DataLoader's iterator, not one of a shard or a stream, is in the midst of its pass."""
    if isinstance(iterator._index_sampler, DistributedBatchSampler) or isinstance(iterator._dataset, StreamReader):
        return False
    size = len(iterator) if hasattr(iterator._index_sampler, "__len__") else None
    return size is None or 0 < iterator._num_yielded < size


def _reads(shard: BatchIterator, dataset: object) -> bool:
    """Whether a stream's iterable is a loader of this dataset, or has such a loader or the dataset."""
    if not isinstance(shard, Stream):
        return False
    inside = [shard.iterable, *getattr(shard.iterable, "__dict__", {}).values()]
    return any(dataset is one or dataset is getattr(one, "dataset", None) for one in inside)


class _OptimizerSteps:
    """Counts the steps of all optimizers in this process, and notes which ones they are."""

    def __init__(self) -> None:
        self._count = [0]
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        count, optimizers = self._count, self.optimizers  # not this object: torch keeps the hook

        def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
            count[0] += 1
            optimizers.add(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(note).remove)

    @property
    def count(self) -> int:
        return self._count[0]


class _Gradients:
    """Whether a backward pass has come since the last step of any of these optimizers.

    It looks at the gradient of one parameter of each, after each of their steps. Without an optimizer it finds nothing.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        trained = [[one for group in optimizer.param_groups for one in group["params"]] for optimizer in optimizers]
        self._all = [one for of_one in trained for one in of_one]
        # The smallest one: its gradient is kept until the next step.
        self._watched = [min(of_one, key=torch.Tensor.numel) for of_one in trained if of_one]
        self._used: list[Any] = [_version(one) for one in self._watched]
        used, watched = self._used, self._watched  # not this object: the optimizers may outlive it

        def note(*_: object) -> None:
            used[:] = map(_version, watched)

        for optimizer in optimizers:
            optimizer.register_step_post_hook(note)

    def are_unused(self) -> bool:
        """Whether there are such gradients, all of them finite, and not all zeros: a bad step may have been skipped."""
        found = [_version(one) for one in self._watched]
        new = [now[0] for now, used in zip(found, self._used) if now[0] is not used[0] or now[1] != used[1]]
        if not any(bool(local_part(one).any()) for one in new if one is not None):
            return False
        return bool(non_finite.are_finite([one.grad for one in self._all if one.grad is not None]))


def _version(parameter: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """A parameter's gradient, and how often it has been changed."""
    gradient = parameter.grad
    return gradient, 0 if gradient is None else gradient._version
