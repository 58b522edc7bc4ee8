"""The world of ranks in a training script (`distributed` joins and leaves it):

with cluster_ddp.distributed() as world:
    model = world.wrap(Model().to(world.device))
    for epoch in range(epochs):
        shard.set_epoch(epoch)
        for images, labels in shard: ...
    accuracy = world.mean(correct, seen)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime import process_group
from cluster_ddp.runtime.console import say
from cluster_ddp.runtime.data.world_data import WorldData
from cluster_ddp.runtime.device import interruptible_wait
from cluster_ddp.runtime.model.world_models import Models
from cluster_ddp.runtime.rendezvous import run_label
from cluster_ddp.runtime.rng import seed_all, stream_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class World(Models, WorldData):
    """All ranks of the run, seen from one of them. See `Collectives`, `Models` and `WorldData`, too."""

    run_label: str = field(default_factory=run_label.now)
    """Date and time of the start, by rank 0's clock, the same on all ranks: names a run outside Slurm."""
    run_log: list[Callable[[str, Mapping[str, Any]], None]] = field(default_factory=list, repr=False)
    """`RunDir.log` of the newest run directory; empty before there is one."""
    ended_runs: set[Path] = field(default_factory=set, repr=False)
    """Run directories of trainings that have come to their end in this process."""

    if not TYPE_CHECKING:  # type checkers know the names

        def __getattr__(self, name: str) -> object:
            """Suggest the right name for a common wrong one, world_size for size. Python suggests for typos."""
            longer = [known for known in dir(type(self)) if not known.startswith("_") and name in known]
            meant = f". Did you mean {min(longer, key=len)}?" if longer else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{meant}")

    def log(self, kind: str, /, **values: Any) -> None:
        """Append a record to metrics.jsonl in the run directory, on rank 0, in the background.

        `status` shows the newest `epoch` and `samples_per_s`, and the newest `accuracy` that is not a "train" record's.

            world.log("train", epoch=epoch, loss=loss, samples_per_s=shard.samples_per_s)
            world.log("test", epoch=epoch, accuracy=accuracy)

        Args:
            kind: "train", "test", or one of your own.
            values: numbers, text, lists and dictionaries of them; tensors of one element. Reading a tensor waits for
                its device.

        Raises:
            SpecError: there is no run directory yet, or a value is of another type.
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
            RunDirError: more than 256 MiB of records are waiting to be written.
        """
        if not self.run_log:
            hint = "make the Checkpointer before, or without one: cluster_ddp.RunDir(None, world)"
            raise SpecError(f"Logging a {kind!r} record:", "there is no run directory yet.", hint)
        if self.is_main and any(isinstance(value, torch.Tensor) for value in values.values()):
            self.synchronize()
        self.run_log[0](kind, values)

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print at once, on rank 0 only, as Python's print. On other ranks use logging.getLogger("cluster_ddp")."""
        if self.is_main:
            say(sep.join(map(str, values)), end=end)

    def watch_stream(self, stream: torch.cuda.Stream) -> None:
        """Watch a CUDA stream of your own for unfinished work. Otherwise only the default stream is watched.

        When another rank fails, a rank with unfinished work is ended: the work may be a collective that waits forever.
        """
        interruptible_wait.watched.append(stream)

    def before_leaving(self, function: Callable[[], object]) -> None:
        """Call a function when all ranks leave the world, before the process group ends. Last in, first out.

        Reset CUDA graphs that contain collectives there: NCCL waits without a limit for every graph that uses a
        communicator (NCCL 2.30, init.cc, localPersistentRefs; pytorch#115388).
        """
        process_group.before_leaving.append(function)

    def seed_rank(self, seed: int) -> None:
        """Seed this rank's generators (torch, Python, NumPy) differently from other ranks'.

        Args:
            seed: random seed of the run, the same on all ranks. Call this after building the model.
        """
        seed_all(stream_seed(seed, self.rank))
