"""All that a training resumes from: its parts, the place in the data, and the state of each rank."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cluster_ddp._version import __version__
from cluster_ddp.runtime import rng
from cluster_ddp.runtime.checkpoint import checkpoint_file, compatibility
from cluster_ddp.runtime.checkpoint.exactness import optimizer_state, state_digest
from cluster_ddp.runtime.checkpoint.exactness.module_settings import ModuleSettings
from cluster_ddp.runtime.checkpoint.exactness.rank_differences import RankDifferences
from cluster_ddp.runtime.checkpoint.exactness.unsaved import Unsaved
from cluster_ddp.runtime.checkpoint.host_copy import HostCopy, tensors_in, with_tensors
from cluster_ddp.runtime.checkpoint.parts import ScriptVariables, Stateful
from cluster_ddp.runtime.checkpoint.sharded import resharding
from cluster_ddp.runtime.checkpoint.sharded.pieces_file import PARTS
from cluster_ddp.runtime.checkpoint.sharded.resharding import SavedPieces
from cluster_ddp.runtime.collectives import PerRank
from cluster_ddp.runtime.data.batch_iterator import BatchIterator
from cluster_ddp.runtime.model.ddp import unwrapped
from cluster_ddp.runtime.non_finite import FiniteState
from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

_WITH_SETTINGS = torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler


class TrainingState:
    """The current state of the training: of its parts, of the shards, of each rank's `meters`, and the `identity`.

    A part whose state can't be saved is a CheckpointError.
    """

    def __init__(
        self,
        world: World,
        shards: Sequence[BatchIterator],
        *,
        identity: Mapping[str, Any],
        meters: Mapping[str, PerRank],
        parts: Mapping[str, Stateful],
    ) -> None:
        self.world, self.shards = world, list(shards)
        self.steps = self.epoch = 0
        self.is_finished = False
        """Whether the training has ended before all its epochs or steps, and is not to be continued."""
        self.left_at: list[int] | None = None
        """The step in its epoch of each shard where the loop of the epoch before was left; None at its last batch."""
        self.run_key = ""
        """On rank 0: the key of this run, which each of its checkpoints has."""
        self._identity, self._meters = dict(identity), dict(meters)
        self.parts = {name: unwrapped(part) for name, part in parts.items()}
        """Its parts, of a DDP model the module."""
        self._optimizers = {name: part for name, part in self.parts.items() if isinstance(part, torch.optim.Optimizer)}
        for name, optimizer in self._optimizers.items():
            optimizer_state.check(name, optimizer)
        stepped = {name: part for name, part in self.parts.items() if isinstance(part, _WITH_SETTINGS)}
        self._made_with = {name: compatibility.settings(part.state_dict()) for name, part in stepped.items()}
        self._rng: Callable[[], object] | None = None  # loads that of random numbers
        self._epoch_rng = rng.capture(world.devices)  # those at the epoch's beginning
        self._reload: Callable[[], object] = lambda: None  # loads once more what the training was resumed from
        self._is_inside = False  # a resume began inside this epoch, and no batch was read since
        self.host_copy = HostCopy(world.device, whole=world.is_main)
        states = self._states()
        self.sharded = resharding.check(world, self.parts, states)  # fail now if something can't be saved
        """A sharded tensor of the state; None if no tensor is sharded."""
        with_tensors({"parts": states, "meters": self._of_meters()}, "state", lambda tensor, _: tensor)
        self._settings = ModuleSettings(self.parts)
        self.unsaved = Unsaved(parts, meters.values(), self.shards, self._settings)
        self._differences = RankDifferences(world, self.parts)
        if self._is_copied_here:
            world.synchronize()
            self._finite = FiniteState(self.parts)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has pieces of its tensors, and copies them."""
        return self.sharded is not None

    @property
    def _is_copied_here(self) -> bool:
        return self.world.is_main or self.is_sharded

    def count_step(self) -> None:
        """Count a step."""
        self.steps += 1

    def finish(self) -> None:
        """Note that the training has ended before all its epochs or steps."""
        self.is_finished = True

    def note_left_at(self, steps: list[int] | None) -> None:
        """Note where the loop of this epoch was left; see `left_at`."""
        self.left_at = steps

    def name_run(self, key: str) -> None:
        """On rank 0: note the key of this run."""
        self.run_key = key

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the current epoch, from 0, which shuffles the data."""
        self._is_inside &= epoch == self.epoch
        self.epoch = epoch
        for shard in self.shards:
            shard.set_epoch(epoch)

    def begin_loop(self) -> None:
        """Call it when the loop begins: what a resume has set in modules holds, whatever the script has set since."""
        self._settings.reload()
        if self.world.is_main:
            self.unsaved.begin()

    def begin_epoch(self) -> bool:
        """Call it before the script's code of an epoch: on resume, too, it has the epoch's first random numbers.

        Returns whether a resume began inside the epoch, so that the code before its first batch runs again.
        """
        if self._is_inside:
            rng.restore(self._epoch_rng, self.world.devices)
            self._digests = self._own_digests()  # before the script's code
        else:
            self.restore_rng()
            self._epoch_rng = rng.capture(self.world.devices)
        return self._is_inside

    def begin_pass(self) -> None:
        """Call it before a pass. If a resume began inside the epoch, undo what the script's code of it has done again.

        That is the code between the loops over epochs and batches, such as a scheduler's step: the checkpoint has its
        effects. A collective.
        """
        if self._is_inside:
            if any(self.world.gather(self._own_digests() != self._digests)):
                self._reload()
            self._settings.reload()
            self._is_inside = False
            self.restore_rng()

    def _own_digests(self) -> dict[str, str]:
        meters = {f"meters.{name}": state for name, state in self._of_meters().items()}
        return state_digest.of_rank(self.world, {**self._states(), **meters})

    def reserve(self) -> None:
        """Allocate the memory for copies of the current state, so that no save has to."""
        if self._is_copied_here:
            self.host_copy.reserve(self._states(), PARTS)

    def gather(self) -> list[dict[str, Any]] | None:
        """Return the states that differ between ranks, in order, on rank 0; None on other ranks. A collective.

        What differs and must not, or is saved nowhere, is said once.
        """
        buffers, differing = self._differences.unlike_main()
        mine: dict[str, Any] = {
            "rng": rng.capture(self.world.devices),
            "epoch_rng": self._epoch_rng,
            "buffers": buffers,
            "meters": self._of_meters(),
            "settings": self._settings.changed(),
            "first_settings": self._settings.first_steps.noted,
            "arrays": dict(self.unsaved.anew.arrays),
            "shards": [shard.place_of_rank() for shard in self.shards],
            "differing": differing,
            "data": [place["fingerprint"] for place in self._places() if "stream" not in place],  # those may differ
        }
        ranks = self.world.gather_to_main(mine)
        if ranks is not None:
            self.unsaved.tell(self.steps)
            self._differences.tell_of_data(self.steps, [rank.pop("data") for rank in ranks])
            self._differences.tell(self.steps, [rank.pop("differing") for rank in ranks])
        return ranks

    def _places(self) -> list[dict[str, Any]]:
        return [shard.place() for shard in self.shards]

    def copy(self, ranks: list[dict[str, Any]] | None, **more: Any) -> dict[str, Any]:
        """Return a copy of this rank's part of the state, valid until the next copy, with `more` entries.

        On rank 0 that is the whole state, but of a sharded tensor its own piece. Other ranks have only pieces. The
        tensors in `ranks`, from `gather`, are not copied: nothing else may use them. What can't be saved is a
        CheckpointError.
        """
        copied = {
            **self._frame(),
            **more,
            "devices": {name: optimizer_state.elsewhere(one) for name, one in self._optimizers.items()},
            "parts": self.host_copy.of(self._states(), PARTS),
            "ranks": with_tensors(ranks, "state['ranks']", lambda tensor, _: tensor),
        }
        self.world.synchronize()
        return copied

    def non_finite(self, copied: Mapping[str, Any]) -> list[str]:
        """Return the names of the entries of a `copy` that are non-finite and must not be."""
        return self._finite.non_finite(copied["parts"])

    def complaint(self, saved: Mapping[str, Any]) -> str | None:
        """Return why a saved state does not belong to this training, in words; None if it does."""
        states = self._states()
        for name, part in self.parts.items():
            there = saved["parts"].get(name, {})
            if isinstance(part, ScriptVariables):  # their shapes may change in the training
                states[name] = there
            elif isinstance(part, torch.nn.Module):  # as those of buffers: its load_state_dict decides
                buffers = {key for key, _ in part.named_buffers()}
                states[name] = {
                    **states[name],
                    **{key: there[key] for key in buffers & states[name].keys() & there.keys()},
                }
        return compatibility.complaint(
            saved, {**self._frame(), "parts": states, "ranks": [{"meters": self._of_meters()}]}
        )

    def load(self, read: Callable[[], dict[str, Any]], saved_pieces: SavedPieces) -> None:
        """Load a saved state that fits, part by part. Then call `restore_rng` for the random number generators.

        `read` returns the saved state, mapped anew by each call, so that memory is freed after each part.

        Raises:
            CheckpointError: a part does not accept its state.
            DataError: too few samples are left in the epoch for this number of ranks.
        """
        saved = read()
        made_with = saved.get("made_with")
        position, places = saved["position"], saved["shards"]
        ranks = with_tensors(saved["ranks"], "ranks", lambda tensor, _: checkpoint_file.taken(tensor))
        rank, world_size = self.world.rank, self.world.world_size
        same_size = len(ranks) == world_size
        own_names = self._parameter_names()
        for name, part in self.parts.items():
            own_buffers = ranks[rank]["buffers"].get(name, {}) if same_size else {}
            content, devices = read()["parts"][name], saved["devices"].get(name, {})
            if names := own_names.get(name):
                optimizer_state.regroup(self._optimizers[name], names, content, saved["parameters"][name])
            dtypes = _dtypes(content)
            resharding.load(name, part, content, saved_pieces, own_buffers=own_buffers, devices=devices)
            self._tell_of_casts(name, dtypes, _dtypes(part.state_dict()))
        for name, meter in self._meters.items():
            meter.load_state_dicts([one["meters"][name] for one in ranks[rank::world_size]])
        self._made_with = made_with or self._made_with
        self.steps, self.epoch = position["steps"], position["epoch"]
        self.left_at = position.get("left_at")
        for i, (shard, place) in enumerate(zip(self.shards, places, strict=True)):
            shard.resume_at(self.epoch, place, [one["shards"][i] if "shards" in one else None for one in ranks])
        self._rng = functools.partial(rng.derive, [one["rng"] for one in ranks], rank)
        if same_size:
            self._rng = functools.partial(rng.restore, ranks[rank]["rng"], self.world.devices)
            self._epoch_rng = ranks[rank]["epoch_rng"]
        self._is_inside = any(shard.seen for shard in self.shards)
        self._reload = functools.partial(self.load, read, saved_pieces)

    def load_settings(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """Load what the script of this run had set in its modules, now and in its first steps, of each rank.

        And what arrays it had.
        """
        same_size = len(of_ranks) == self.world.world_size
        mine = of_ranks[self.world.rank if same_size else 0]
        self._settings.load(mine["settings"])
        self._settings.first_steps.resume(mine["first_settings"], inside=self._is_inside or not self.shards)
        self.unsaved.anew.resume(mine["arrays"] if same_size else {})

    def restore_rng(self) -> None:
        """Set this rank's random number generators to the loaded state, once after each load."""
        if self._rng is not None:
            self._rng()
            self._rng = None
            self._reload = lambda: None  # it keeps a checkpoint open

    def place_in_words(self) -> str:
        """Return the place in the training, as "step 30, epoch 2, 20 of its 40 samples seen"."""
        if self.shards and self.epoch and not any(shard.seen for shard in self.shards):
            return f"step {self.steps}, after epoch {self.epoch}"
        # The first epoch of a stream has no known size.
        sizes = ["" if shard.size is None else f" of its {shard.size}" for shard in self.shards]
        seen = [f"{shard.seen}{size} samples seen" for shard, size in zip(self.shards, sizes)]
        return ", ".join([f"step {self.steps}", *([f"epoch {self.epoch + 1}"] if seen else []), *seen])

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the permitted differences between a saved state that fits and this training, one line each."""
        return compatibility.differences(saved, self._frame())

    def _states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def _tell_of_casts(self, name: str, saved: Mapping[str, torch.dtype], loaded: Mapping[str, torch.dtype]) -> None:
        """Say that a part, which has a load_state_dict of its own, has cast its state."""
        cast = [place for place, dtype in saved.items() if loaded.get(place, dtype) != dtype]
        if cast and self.world.is_main:
            words = "The load_state_dict of %s casts its state: %s is %s in the checkpoint, and %s now. Not exact."
            log.warning(words, name, cast[0], saved[cast[0]], loaded[cast[0]])

    def _parameter_names(self) -> dict[str, list[str] | None]:
        """Of each optimizer; None if they are unknown."""
        return {name: optimizer_state.names(one, self.parts) for name, one in self._optimizers.items()}

    def _of_meters(self) -> dict[str, Any]:
        return {name: _on_cpu(meter.state_dict()) for name, meter in self._meters.items()}

    def _frame(self) -> dict[str, Any]:
        """The small entries: who saves, identity, and the place in the data."""
        topology = self.world.topology
        return {
            "saved_by": {
                "job": topology.job_label,
                "run": self.run_key,
                "array_task": topology.array_task_id,
                "world_size": topology.world_size,
                "cluster_ddp": __version__,
                "torch": str(torch.__version__),
                "time": time.time(),
            },
            "identity": self._identity,
            "position": {
                "steps": self.steps,
                "epoch": self.epoch,
                "finished": self.is_finished,
                "left_at": self.left_at,
            },
            "shards": self._places(),
            "made_with": self._made_with,
            "parameters": self._parameter_names(),
        }


def _dtypes(state: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {place: tensor.dtype for place, tensor in tensors_in(state, "")}


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
