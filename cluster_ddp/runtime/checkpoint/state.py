"""All that a training continues from: the parts, the place in the data, and what every rank has for itself."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp._version import __version__
from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.checkpoint import compatibility, file, rng
from cluster_ddp.runtime.checkpoint.host_copy import HostCopy, with_tensors
from cluster_ddp.runtime.data.shard import Shard
from cluster_ddp.runtime.meter import PerRank
from cluster_ddp.runtime.world import World

_WITH_SETTINGS = torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, a grad scaler: whatever has a state to resume from."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, of tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take that state on."""


class TrainingState:
    """The training as it stands.

    Args:
        world: of the ranks.
        shard: the training data.
        identity: what must be the same for another state to fit.
        meters: what each rank has for itself.
        parts: everything with a state, by name.

    Raises:
        CheckpointError: some part's state can't be saved.
    """

    def __init__(
        self,
        world: World,
        shard: Shard,
        *,
        identity: Mapping[str, Any],
        meters: Mapping[str, PerRank],
        parts: Mapping[str, Stateful],
    ) -> None:
        self.world, self.shard = world, shard
        self.steps = self.epoch = 0
        self._identity, self._meters = dict(identity), dict(meters)
        self._parts = {name: _bare(part) for name, part in parts.items()}
        self._made_with = {
            name: compatibility.settings(part.state_dict())
            for name, part in self._parts.items()
            if isinstance(part, _WITH_SETTINGS)
        }
        self._rng: dict[str, Any] | None = None
        self._host_copy = HostCopy(world.device)
        if world.is_main:  # what can't be saved is told now; the memory for copies comes when a checkpoint is loaded
            with_tensors(self._states(), "state['parts']", lambda tensor: tensor)

    def reserve(self) -> None:
        """Get the memory for copies of the state as it is now, so that no save has to."""
        if self.world.is_main:
            self._host_copy.reserve(self._states(), "state['parts']")

    def gather(self) -> list[dict[str, Any]] | None:
        """What each rank has for itself, in the order of ranks, on rank 0. A collective."""
        return self.world.gather_to_main(
            {"rng": rng.capture(self.world.device), "buffers": self._own_buffers(), "meters": self._of_meters()}
        )

    def copy(self, ranks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """All of it in memory of its own, valid until the next copy.

        Args:
            ranks: of each rank what it has for itself, as gathered: nobody else has these objects.
            more: what else is to be saved.
        """
        whole = {
            **self._frame(),
            **more,
            "parts": self._host_copy.of(self._states(), "state['parts']"),
            "ranks": with_tensors(ranks, "state['ranks']", lambda tensor: tensor),
        }
        self.world.synchronize()
        return whole

    def complaint(self, saved: Mapping[str, Any]) -> str | None:
        """Why a saved state is not one of this training, in words; None where it is."""
        return compatibility.complaint(
            saved, {**self._frame(), "parts": self._states(), "ranks": [{"meters": self._of_meters()}]}
        )

    def load(self, read: Callable[[], dict[str, Any]]) -> None:
        """Take on a saved state that fits, part by part. The random numbers follow with `restore_rng`.

        Args:
            read: the saved state, mapped anew by each call; with its end the memory that it took is free again.
        """
        saved = read()
        made_with = saved.get("made_with")
        position, ranks = saved["position"], with_tensors(saved["ranks"], "ranks", file.taken)
        rank, world_size = self.world.rank, self.world.world_size
        same_size = len(ranks) == world_size
        for name, part in self._parts.items():
            saved = read()
            state = saved["parts"][name]
            copies_itself = _parameters_and_buffers(part)
            for key, value in state.items():
                if key not in copies_itself:
                    state[key] = with_tensors(value, key, file.taken)
            if same_size:
                state.update(ranks[rank]["buffers"].get(name, {}))
            try:
                part.load_state_dict(state)
            except Exception as error:  # whatever it does with what it finds there, or does not find
                words = f"{type(error).__name__}: {str(error)[:300]}."
                found = f"it does not take the state that the checkpoint has of it: {words}"
                hint = "is it made as it was when that was saved? To start anew: --resume never"
                raise CheckpointError(f"Loading {name!r}:", found, hint) from error
        for name, meter in self._meters.items():
            meter.load_state_dicts([one["meters"][name] for one in ranks[rank::world_size]])
        self._made_with = made_with or self._made_with
        self.steps, self.epoch = position["steps"], position["epoch"]
        self.shard.resume(self.epoch, step=position["step"], seen=position["seen"])
        self._rng = {"same": ranks[rank]["rng"]} if same_size else {"anew": [one["rng"] for one in ranks]}

    def restore_rng(self) -> None:
        """Set this rank's random number generators to what was loaded, once, right before training continues."""
        if self._rng is not None:
            if "same" in self._rng:
                rng.restore(self._rng["same"], self.world.device)
            else:
                rng.derive(self._rng["anew"], self.world.rank)
            self._rng = None

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What is not as it was, and yet may be, in words."""
        return compatibility.differences(saved, self._frame())

    def _states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def _of_meters(self) -> dict[str, Any]:
        return {name: _on_cpu(meter.state_dict()) for name, meter in self._meters.items()}

    def _own_buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """Those of this rank's buffers that are not as rank 0's, which are saved with the module. A collective."""
        buffers = self._buffers()
        if self.world.world_size == 1 or not any(buffers.values()):
            return {}
        digests = {name: {key: _digest(value) for key, value in of_part.items()} for name, of_part in buffers.items()}
        of_main = self.world.broadcast(digests)
        return {
            name: {key: value for key, value in of_part.items() if digests[name][key] != of_main[name].get(key)}
            for name, of_part in buffers.items()
        }

    def _buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """The buffers of the modules (BatchNorm's statistics), which ranks have for themselves between two steps."""
        buffers = {}
        for name, part in self._parts.items():
            if isinstance(part, torch.nn.Module):
                saved = part.state_dict().keys()
                buffers[name] = _on_cpu({key: value for key, value in part.named_buffers() if key in saved})
        return buffers

    def _frame(self) -> dict[str, Any]:
        """What is small: who saves it, whose it is, and the place in the data."""
        topology, batches = self.world.topology, self.shard.batches
        return {
            "saved_by": {
                "job": topology.job_label,
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
                "step": self.shard.step + 1,
                "seen": self.shard.seen,
            },
            "shard": {
                "size": batches.size,
                "seed": batches.seed,
                "global_batch": batches.global_batch,
                "fingerprint": self.shard.fingerprint,
            },
            "made_with": self._made_with,
        }


def _bare(part: Stateful) -> Stateful:
    return part.module if isinstance(part, DistributedDataParallel) else part


def _parameters_and_buffers(part: Stateful) -> set[str]:
    """What a module copies from the state that it is given; other parts may keep the tensors themselves."""
    if not isinstance(part, torch.nn.Module):
        return set()
    return {name for named in (part.named_parameters(), part.named_buffers()) for name, _ in named}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
