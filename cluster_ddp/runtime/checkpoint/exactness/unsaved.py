"""What a training has and no checkpoint has: that is said once, since a resume begins without it.

The state of a communication hook of DDP, such as PowerSGD's errors; gradients that no optimizer has used; buffers that
are not persistent; flags and counts in modules; and what takes part in the training and was not given to its
Checkpointer: optimizers, schedulers, scalers, parameters, shards, DataLoaders.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import GeneratorType, SimpleNamespace
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cluster_ddp.errors import CheckpointError, counted, first_of
from cluster_ddp.runtime.checkpoint.exactness import optimizer_state, shard_iterators
from cluster_ddp.runtime.checkpoint.exactness.gradients import LOOKED_AT, Gradients
from cluster_ddp.runtime.checkpoint.exactness.made_anew import MadeAnew
from cluster_ddp.runtime.checkpoint.exactness.module_settings import OF_TORCH, ModuleSettings
from cluster_ddp.runtime.checkpoint.exactness.other_modules import OtherModules
from cluster_ddp.runtime.checkpoint.exactness.part_states import PartStates
from cluster_ddp.runtime.checkpoint.exactness.script_state import ScriptState, classes_of_script, has_own_state
from cluster_ddp.runtime.checkpoint.host_copy import tensors_in
from cluster_ddp.runtime.collectives import Meter
from cluster_ddp.runtime.data.batch_iterator import BatchIterator, being_read
from cluster_ddp.runtime.data.shard import DistributedBatchSampler
from cluster_ddp.runtime.data.stream import Stream
from cluster_ddp.runtime.data.stream_reader import StreamReader
from cluster_ddp.runtime.live_objects import objects_of
from cluster_ddp.runtime.model import ddp

log = logging.getLogger("cluster_ddp")

_LOOKS = 2  # a script may make parts of its training in its second epoch
_SMALL_BYTES = 1 << 20
_STEPPED = torch.optim.Optimizer, LRScheduler
_OF_HOOK = "give the hook a state that is also in meters: an object with state_dict() and load_state_dicts(states)"
_OF_PART = "give it to the Checkpointer, by a name: Checkpointer(world, …, {name}={name})"
_OF_METER = "give it to the Checkpointer, by a name: Checkpointer(world, …, meters={'loss': meter})"
_OF_COUNT = "if the training depends on it: return it in state_dict(), and take it back in load_state_dict(state)"
_OF_SHARD = "give all shards to the Checkpointer: shard=[one, another]"
_OF_LOADER = "read it by world.shard(dataset, …), or if it has no length by world.stream(loader, batch_size=None)"
_OF_GRADIENTS = (
    "call checkpoint.step() only after the optimizer's step, or optimizer.zero_grad() if a step is skipped; "
    "`with world.accumulate(model, shard, every=4) as is_last:` says after which batch that is"
)
_OF_PARAMETER = (
    "wrap their module, too, and name it in the Checkpointer: Checkpointer(world, …, head=head); keep a tensor of no "
    "module in a part: kept = types.SimpleNamespace(log_alpha=log_alpha)"
)
_OF_BUFFER = "let the checkpoint have it: register_buffer(name, value), without persistent=False"
_OF_ATTRIBUTE = "if the training depends on it: register_buffer(name, torch.tensor(value)), or a float"
_OF_MODEL = "change the model before you make the Checkpointer; a dropout's p, or which layers train, may change later"
_OF_MODE = "call model.train() after each evaluation"
_OF_GROUPS = "give all parameter groups to the optimizer before you make the Checkpointer, with lr=0 until they train"
_OF_SCRIPT = (
    "if the training depends on that, keep it in a part: kept = types.SimpleNamespace(best=0.0), then kept.best, and "
    "Checkpointer(world, …, kept=kept). An object with state_dict() and load_state_dict(state) is a part, too"
)
_OF_ARRAYS = (
    "make them before the Checkpointer, which loads the weights; or keep them in a part: "
    "kept = types.SimpleNamespace(center=center)"
)
_OF_FLAG = "let the checkpoint have the flag: register_buffer('is_initialized', torch.tensor(False))"
_OF_ZIP = "take the rest of them: zip(shard, values[shard.step + 1 :])"
_OF_GENERATOR = "draw them without a generator of its own: torch.rand, numpy.random, random"
_AS_MADE = "No checkpoint has that: a resume begins with what the script makes."
_OF_NUMBERS = "take the batch's number in its epoch: shard.step"
_OF_ZEROS = "in the loop: optimizer.zero_grad(), loss.backward(), optimizer.step(), in this order"


class Unsaved:
    """Finds that in the parts of a training. Make it before the first step."""

    def __init__(
        self,
        parts: Mapping[str, Any],
        meters: Iterable[object],
        shards: Sequence[BatchIterator],
        settings: ModuleSettings,
    ) -> None:
        self._parts, self._shards = dict(parts), shards
        self._saved = [*parts.values(), *meters]
        optimizers = [one for one in parts.values() if isinstance(one, torch.optim.Optimizer)]
        self._gradients, self._steps = Gradients(optimizers), _OptimizerSteps()
        self._groups = {optimizer: len(optimizer.param_groups) for optimizer in optimizers}
        self._looks = 0
        self._others, self._own_states = OtherModules(), PartStates(parts)
        inner = {name: ddp.unwrapped(part) for name, part in parts.items()}  # an evaluation may know only that
        self._modules = {name: part for name, part in inner.items() if isinstance(part, torch.nn.Module)}
        self._trained: set[str] = set()  # those in training mode in the first step
        self._buffers: list[tuple[str, torch.Tensor]] = []  # that are not persistent, as they were then
        self._settings, self._meters = settings, _OtherMeters()
        self._script = ScriptState(
            functools.partial(_is_restored, self._saved, shards)
        )  # this object would never be freed
        self._told: set[str] = set()
        self._has_told_attributes = self._has_told_replaced = False
        self._used_before: dict[int, int] = {}
        self.anew = MadeAnew(self._modules, self._script)
        """What the script makes anew after a resume."""

    @property
    def optimizer_steps(self) -> int:
        """Number of steps that all optimizers of this process have made."""
        return self._steps.count

    def note_step(self, step: int, *, begins_epoch: bool) -> None:
        """Call it in each step."""
        self._settings.note_step(begins_epoch=begins_epoch)
        self._meters.note_step()
        if not self._looks:
            self._trained = {name for name, one in self._modules.items() if one.training and self._is_trained(one)}
        for name in self._trained:
            if not self._modules[name].training:
                self._say(step, f"{name!r} is trained in eval mode, and was in training mode before.", _OF_MODE)
        if self._gradients.are_added_up:
            self._say(
                step,
                "an optimizer's step used the gradients of the step before, too: they were not set to zero.",
                _OF_ZEROS,
            )
        for optimizer, groups in self._groups.items():
            if len(optimizer.param_groups) > groups:
                found = f"{type(optimizer).__name__} has another parameter group since the Checkpointer was made."
                self._say(step, found, _OF_GROUPS, lost="A resume whose optimizer begins without it is refused.")

    def _is_trained(self, module: torch.nn.Module) -> bool:
        """Whether an optimizer has parameters of it: an average of weights only takes part in evaluations."""
        trained = self._trained_by_parts()
        return any(id(one) in trained for one in module.parameters())

    def _trained_by_parts(self) -> set[int]:
        """The ids of the parameters that the parts' optimizers have."""
        return {id(one) for optimizer in self._groups for one in optimizer_state.parameters(optimizer)}

    def begin(self) -> None:
        """Call it when the loop begins, in it, on rank 0."""
        self._script.begin(self._objects())
        self.anew.begin()
        self._used_before = {id(one): _uses(one) for one in objects_of(GradScaler, _BaseDataLoaderIter)}

    def leave(self) -> None:
        """Call it when the loop has ended: its objects are not kept."""
        self._script.leave()
        self.anew.leave()

    def _tell_of_resume(self, step: int) -> None:
        """Say what the script has made otherwise than when the training began."""
        if others := self.anew.others():
            found = f"arrays that the loop reads were others when the training began: {first_of(others)}."
            self._say(step, found, _OF_ARRAYS, lost="The script has made them anew.")
        if flags := self.anew.initialized():
            found = f"modules have initialized themselves again after the resume: {first_of(flags)}."
            self._say(step, found, _OF_FLAG, lost="Their weights are not those of the checkpoint.")

    def tell(self, step: int) -> None:
        """Say what this step's checkpoint lacks, each once. Call it on rank 0, when its device has done its work."""
        for (_, first), (name, buffer) in zip(self._buffers, self._temporary_buffers()):  # none: no state is made
            if not torch.equal(buffer.cpu(), first):
                self._say(step, f"{name} changes, and is a buffer that is not persistent.", _OF_BUFFER)
        if lost := self._settings.lost():
            found = f"attributes of modules had other values before the resume: {first_of(lost)}."
            self._say(step, found, _OF_ATTRIBUTE, lost="They are as the script has made them.")
        if (changed := self._settings.unsaved()) and not self._has_told_attributes:
            self._has_told_attributes = True
            self._say(step, f"attributes of modules change: {first_of(changed)}.", _OF_ATTRIBUTE)
        if (replaced := self._settings.replaced()) and not self._has_told_replaced:
            self._has_told_replaced = True
            self._say(step, f"layers, their hooks or parameters were replaced: {first_of(replaced)}.", _OF_MODEL)
        if self._meters.are_in_loop:
            self._say(step, "a Meter adds up the steps of the loop, and is not in meters.", _OF_METER)
        if changed := self._script.changed():
            found = f"objects of the script change: {', '.join(changed)}."
            self._say(step, found, _OF_SCRIPT, lost=_AS_MADE, level=logging.WARNING)
        for place in self._own_states.unsaved():
            self._say(step, f"{place} changes, and the state_dict() of that part lacks it.", _OF_COUNT)
        for kind in self._others.changed():
            found = f"{kind} has weights, buffers or numbers that change, and is no part of the Checkpointer."
            self._say(step, found, _OF_PART.format(name="other"))
        for name, part in self._parts.items():
            for state in ddp.hook_states(part):
                if not any(state is one for one in self._saved):
                    found = f"{name!r} has a communication hook with a state, {type(state).__name__}."
                    self._say(step, found, _OF_HOOK)
        self._tell_of_optimizers(step)

    def _tell_of_optimizers(self, step: int) -> None:
        trained = self._trained_by_parts()
        in_place_of_part = False
        for optimizer in set(self._steps.optimizers) - self._inside_parts():
            replaces = any(id(parameter) in trained for parameter in optimizer_state.parameters(optimizer))
            in_place_of_part |= replaces
            if optimizer.state or replaces:
                found = f"{type(optimizer).__name__} makes steps, and is no part of the Checkpointer."
                self._say(step, found, _OF_PART.format(name="optimizer"))
        if self._gradients.are_unused() and not in_place_of_part:
            self._say(step, "there are gradients that no optimizer has used.", _OF_GRADIENTS)

    def look(self, step: int) -> None:
        """Look for schedulers, averages and data that take part in the training. Call it in an epoch's first step.

        It looks twice only, since it goes through all objects.
        """
        self._looks += 1
        if self._looks > _LOOKS:
            return
        self._look_at_data(step)
        self._tell_of_resume(step)
        objects = objects_of(torch.nn.Module, LRScheduler, GradScaler, _BaseDataLoaderIter, Meter, GeneratorType)
        if carried := self._script.look(self._objects(), shard_iterators.frames(objects, self._shards)):
            found = f"the script carries variables from step to step: {', '.join(carried)}."
            self._say(step, found, _OF_SCRIPT, lost=_AS_MADE, level=logging.WARNING)
        if not self._buffers:
            self._buffers = [(name, buffer.detach().cpu().clone()) for name, buffer in self._temporary_buffers()]
        self._look_for_parameters(step)
        parts = self._inside_parts()
        self._meters.note([one for one in objects if isinstance(one, Meter) and not self._is_saved(one)])
        self._others.note([one for one in objects if isinstance(one, torch.nn.Module)], self._saved_modules())
        for one in objects:
            if isinstance(one, LRScheduler):
                if one.optimizer in parts and one not in parts:
                    found = f"{type(one).__name__} is a scheduler of a part, and is no part of the Checkpointer."
                    self._say(step, found, _OF_PART.format(name="scheduler"))
            elif isinstance(one, GradScaler):
                if one.is_enabled() and self._is_used(one) and not self._is_saved(one):
                    found = "GradScaler scales the loss, and is no part of the Checkpointer."
                    self._say(step, found, _OF_PART.format(name="scaler"))
            elif (
                isinstance(one, _BaseDataLoaderIter)
                and self._is_used(one)
                and _is_under_way(one)
                and not any(_reads(shard, one._dataset) for shard in self._shards)
            ):
                self._say(step, "a DataLoader is read whose place is not saved.", _OF_LOADER)

    def _look_at_data(self, step: int) -> None:
        """Look for shards that are not the training's, for what counts batches anew, and for generators of datasets."""
        for one in being_read - set(self._shards):
            self._say(step, f"a {type(one).__name__.lower()} is read that is not the Checkpointer's.", _OF_SHARD)
        resumed = [shard for shard in self._shards if shard.seen_in_pass < shard.seen]
        if resumed and shard_iterators.are_numbered(self._shards):
            found = "this epoch began before the resume, and enumerate counts its batches from 0 again."
            lost = "If the training depends on them, it differs from one without a stop."
            self._say(step, found, _OF_NUMBERS, lost=lost, level=logging.WARNING)
        if any(shard_iterators.is_zipped(shard, self._shards) for shard in resumed):
            found = "this epoch began before the resume, and zip takes what stands beside the shard from its beginning."
            lost = "The training differs from one without a stop."
            self._say(step, found, _OF_ZIP, lost=lost)
        for shard in self._shards:
            for place in shard.own_generators():
                self._say(step, f"{place} draws random numbers, and is in no checkpoint.", _OF_GENERATOR)

    def _look_for_parameters(self, step: int) -> None:
        """Look for parameters that an optimizer trains and no part has. Of another kind of part, shapes are enough."""
        known = {id(one) for module in self._saved_modules() for one in module.parameters(recurse=False)}
        others = [part for part in self._parts.values() if not isinstance(part, (torch.nn.Module, *_STEPPED))]
        shapes = {tensor.shape for part in others for _, tensor in tensors_in(part.state_dict(), "")}
        for name, optimizer in self._parts.items():
            if isinstance(optimizer, torch.optim.Optimizer):
                trained = [one for one in optimizer_state.parameters(optimizer) if one.requires_grad]
                lost = [one for one in trained if id(one) not in known and one.shape not in shapes]
                if lost:
                    what = counted(len(lost), "parameter")
                    self._say(step, f"{name!r} trains {what} of no part, of shape {[*lost[0].shape]}.", _OF_PARAMETER)

    def _temporary_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The small buffers of modules that are not saved with them."""
        for name, module in self._modules.items():
            saved = module.state_dict().keys()
            for key, buffer in module.named_buffers():
                if key not in saved and buffer.nbytes <= _SMALL_BYTES:
                    yield f"{name}.{key}", buffer

    def _objects(self) -> dict[str, object]:
        """The functions that modules, parameters and optimizers among the parts call, by words for them.

        And the objects in the attributes of modules, what makes batches of samples, and the script's classes.
        """
        found: list[tuple[str, object]] = []
        inside: dict[str, object] = {}
        for name, part in self._modules.items():
            for path, module in part.named_modules():
                hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
                of_parameters = [one._backward_hooks for one in module.parameters(recurse=False) if one._backward_hooks]
                place = ".".join(filter(None, (name, path)))
                found += [(place, hook) for some in (*hooks, *of_parameters) for hook in some.values()]
                inside |= {f"{place}.{key}": one for key, one in vars(module).items() if key not in OF_TORCH}
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer):
                of_steps = [*part._optimizer_step_pre_hooks.values(), *part._optimizer_step_post_hooks.values()]
                found += [(name, hook) for hook in of_steps]
        hooks_by_words = {f"{place}'s hook {getattr(one, '__name__', type(one).__name__)}": one for place, one in found}
        own = {place: one for place, one in inside.items() if has_own_state(one)}
        numbered = enumerate(self._shards, start=1)
        collating = {f"collate_fn of shard {n}": one for n, shard in numbered if (one := shard.collate_fn) is not None}
        return {**hooks_by_words, **own, **collating, **classes_of_script()}

    def _saved_modules(self) -> Iterator[torch.nn.Module]:
        """The modules among what is saved, in it, and in its attributes."""
        for one in _with_attributes(self._saved):
            if isinstance(one, torch.nn.Module):
                yield from one.modules()

    def _is_used(self, one: GradScaler | _BaseDataLoaderIter) -> bool:
        """Whether it was used in this loop: it may be of an earlier training in this process."""
        return _uses(one) not in (0, self._used_before.get(id(one)))

    def _is_saved(self, one: object) -> bool:
        return any(one is saved for saved in _with_attributes(self._saved))

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

    def _say(
        self,
        step: int,
        found: str,
        hint: str,
        *,
        lost: str = "No checkpoint has that: a resume begins without it.",
        level: int = logging.ERROR,
    ) -> None:
        if found not in self._told:
            self._told.add(found)
            log.log(level, "%s\nTraining continues.", CheckpointError(f"Saving step {step}:", f"{found} {lost}", hint))


def _with_attributes(saved: Iterable[object]) -> Iterator[object]:
    """What is saved, its attributes and what a namespace in one has, but nothing of modules; an optimizer's groups."""
    for one in saved:
        yield one
        if not isinstance(one, torch.nn.Module):
            for value in getattr(one, "__dict__", {}).values():
                yield value
                if isinstance(value, SimpleNamespace):
                    yield from vars(value).values()
        if isinstance(one, torch.optim.Optimizer):
            yield from one.param_groups


def _is_restored(saved: Iterable[object], shards: Iterable[BatchIterator], one: object) -> bool:
    """Whether an object is saved, is a shard, or takes its items from one."""
    depth = 4 if isinstance(one, Iterator) else 0
    return any(one is other for other in _with_attributes(saved)) or any(
        shard_iterators.reaches(one, shard, depth) for shard in shards
    )


def _uses(one: GradScaler | _BaseDataLoaderIter) -> int:
    """How often a scaler was updated, or how many batches an iterator has given."""
    if isinstance(one, GradScaler):
        tracker = one._growth_tracker if one.is_enabled() else None
        return 0 if tracker is None else 1 + tracker._version
    return int(one._num_yielded)


def _is_under_way(iterator: Any) -> bool:
    """Whether a DataLoader's iterator, not one of a shard or a stream, is in the midst of its pass."""
    if isinstance(iterator._index_sampler, DistributedBatchSampler) or isinstance(iterator._dataset, StreamReader):
        return False
    try:
        return 0 < int(iterator._num_yielded) < len(iterator)
    except TypeError:  # of an IterableDataset without a length
        return bool(iterator._num_yielded)


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


class _OtherMeters:
    """Meters that are not saved, and whether one grows in each step: one of an evaluation does not."""

    def __init__(self) -> None:
        self._counts: list[tuple[weakref.ref[Meter], list[int]]] = []

    def note(self, meters: Iterable[Meter]) -> None:
        """Note these, which the next steps may change."""
        known = [meter() for meter, _ in self._counts]
        self._counts += [(weakref.ref(one), [one.count]) for one in meters if not any(one is other for other in known)]

    def note_step(self) -> None:
        """Call it in each step."""
        for meter, counts in self._counts:
            if len(counts) < LOOKED_AT and (one := meter()) is not None:
                counts.append(one.count)

    @property
    def are_in_loop(self) -> bool:
        """Whether one has grown in two steps, one after the other."""
        known = [counts for _, counts in self._counts if len(counts) == LOOKED_AT]
        return any(first < second < third for first, second, third in known)
