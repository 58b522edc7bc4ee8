"""Parts that differ between ranks: a checkpoint has rank 0's, which a resume gives to all ranks.

Each save compares a digest of each part. It leaves out what may differ: buffers, since each rank's own are saved, and
pieces of sharded tensors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.checkpoint.exactness import state_digest
from cluster_ddp.runtime.checkpoint.host_copy import tensors_in
from cluster_ddp.runtime.model.dtensor_pieces import content
from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

_OF_TRAINED = (
    "call the model that world.wrap returns, not the one inside, and unfreeze parameters before: DDP averages no other "
    "gradients; of a tensor of no module, average it yourself: world.all_reduce(tensor.grad) / world.world_size. If "
    "the ranks' weights are averaged now and then (local SGD), save only after that"
)
_OF_OTHERS = (
    "make the same on every rank what is of all: world.mean, world.all_reduce. Name a state that each rank has for "
    "itself in meters instead; it needs load_state_dicts(states)"
)


class RankDifferences:
    """Compares the parts of all ranks at each save, and says once of each which ranks have another one than rank 0."""

    def __init__(self, world: World, parts: Mapping[str, Any]) -> None:
        self._world, self._parts = world, parts
        self._saves = 0
        self._equal_at: dict[str, int] = {}  # the step of the last save at which a part was the same everywhere
        self._told: set[str] = set()

    def unlike_main(self) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
        """Return this rank's buffers that differ from rank 0's; and the names of parts that do. A collective.

        Buffers are those that are saved with a module. Such as BatchNorm's statistics, which differ between ranks
        between two steps.
        """
        if self._world.world_size == 1:
            return {}, []
        parts, buffers = self.digests(), self._buffers()
        digests = {
            name: {key: sha256(content(value)).hexdigest() for key, value in of_part.items()}
            for name, of_part in buffers.items()
        }
        parts_of_main, buffers_of_main = self._world.broadcast((parts, digests))
        own = {
            name: {key: value for key, value in of_part.items() if digests[name][key] != buffers_of_main[name].get(key)}
            for name, of_part in buffers.items()
            if name in buffers_of_main
        }
        return own, [name for name, digest in parts.items() if parts_of_main.get(name, digest) != digest]

    def digests(self) -> dict[str, str]:
        """Return a digest of this rank's part by name, of what this save compares. Waits for a GPU."""
        looked_at = {}
        for name, part in self._parts.items():
            with contextlib.suppress(CheckpointError):  # it can't be saved, which rank 0 says
                looked_at[name] = state_digest.begin(_kept_of_main(part), self._saves)
        self._saves += 1
        self._world.synchronize()
        return {name: state_digest.end(begun) for name, begun in looked_at.items()}

    def _buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        buffers = {}
        for name, part in self._parts.items():
            if isinstance(part, torch.nn.Module) and (own := dict(part.named_buffers())):
                saved = part.state_dict().keys()
                buffers[name] = {key: value.cpu() for key, value in own.items() if key in saved}
        return buffers

    def tell(self, step: int, of_ranks: Sequence[Sequence[str]]) -> None:
        """Say which parts differ since when. Call it on rank 0 with the names of those that differ on each rank."""
        for name, part in self._parts.items():
            others = [str(rank) for rank, names in enumerate(of_ranks) if name in names]
            if not others:
                self._equal_at[name] = step
            elif name not in self._told:
                self._told.add(name)
                log.error("%s\nTraining continues.", self._error(name, part, step, others))

    def tell_of_data(self, step: int, of_ranks: Sequence[Sequence[str | None]]) -> None:
        """Say once if ranks share out different datasets. Call it on rank 0 with the fingerprints of each rank."""
        others = [str(rank) for rank, one in enumerate(of_ranks) if one != of_ranks[0]]
        if others and "data" not in self._told:
            self._told.add("data")
            found = f"{_ranks_have(others)} another dataset than rank 0: samples are trained twice or never."
            hint = "split it the same way on all ranks: random_split(…, generator=torch.Generator().manual_seed(1))"
            log.error("%s\nTraining continues.", CheckpointError(f"Saving step {step}:", found, hint))

    def _error(self, name: str, part: Any, step: int, others: Sequence[str]) -> CheckpointError:
        since = f" At step {self._equal_at[name]} it was the same." if name in self._equal_at else ""
        found = f"{name!r} differs between ranks: {_ranks_have(others)} another one than rank 0."
        lost = "A checkpoint has rank 0's, which a resume gives to all ranks: it will not be exact."
        is_trained = isinstance(part, (torch.nn.Module, torch.optim.Optimizer))
        hint = _OF_TRAINED if is_trained else _OF_OTHERS
        return CheckpointError(f"Saving step {step}:", f"{found}{since} {lost}", hint)


def _ranks_have(ranks: Sequence[str]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(ranks)} have"


def _kept_of_main(part: Any) -> Any:
    """What a checkpoint has of rank 0 alone."""
    if isinstance(part, torch.nn.Module):
        return state_digest.weights(part)
    state = part.state_dict()
    if isinstance(part, torch.optim.Optimizer):  # plain values don't count: LBFGS keeps each rank's own loss, unread
        return {**state, "state": [tensor for _, tensor in tensors_in(state["state"], "")]}
    return state
