"""A save of a sharded state: each rank writes its pieces file, and then rank 0 the checkpoint that names them.

All of it is in the background. The ranks tell rank 0 the SHA-256 of their files through the ranks' store: a collective
in a thread could meet one of the training.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cluster_ddp import processes
from cluster_ddp.run.files import sync_folder
from cluster_ddp.runtime import process_group
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.host_copy import with_tensors
from cluster_ddp.runtime.checkpoint.sharded import pieces_file
from cluster_ddp.runtime.checkpoint.sharded.pieces_file import PARTS
from cluster_ddp.runtime.model.dtensor_pieces import LocalPieces
from cluster_ddp.runtime.run_dir.background_writer import PATIENCE_S
from cluster_ddp.runtime.world import World

_POLL_S = 0.05
# How long rank 0 waits for the others after a failure: those that still live may have written most of it.
_AFTER_FAILURE_S = 5.0


class ShardedSave:
    """One save, seen from one rank.

    Args:
        world: all ranks.
        local: what this rank's pieces file has.
        writers: the ranks that have a pieces file.
        token: the same on all ranks, another for each save. It is part of the files' names, so that no file is
            overwritten that an earlier checkpoint names.
        if_non_finite: called on rank 0 with the names of NaN or Inf entries that other ranks have found.
    """

    def __init__(
        self,
        world: World,
        local: LocalPieces,
        writers: list[int],
        token: str,
        if_non_finite: Callable[[list[str]], object],
    ) -> None:
        self._rank, self.is_main = world.rank, world.is_main
        self._local, self._writers, self._token = local, writers, token
        self._if_non_finite, self._store = if_non_finite, process_group.ranks_store
        self._written: dict[int, dict[str, Any]] = {}  # on rank 0: the other ranks' files, also for another try

    def write(self, checkpoint: Path, state: Mapping[str, Any]) -> bool:
        """Write this rank's pieces file; on rank 0, once all have theirs, the checkpoint. Returns whether that is done.

        Rank 0 leaves it out if another rank did.

        Raises:
            OSError: a file can't be written, or not all pieces files are there in time.
            RunDirError: a newer start of the job has taken the run directory.
            Exception: on rank 0: what `if_non_finite` raises.
        """
        folder = pieces_file.folder_of(checkpoint)
        try:
            own = self._write_own(checkpoint) if self._local.pieces else None
        except Exception as error:
            self._tell({"failed": getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"})
            raise
        if not self.is_main:
            if own is not None:
                self._tell(own)
            return False
        told = self._told()
        if found := [name for message in told.values() for name in message.get("non_finite", ())]:
            self._if_non_finite(found)
            return False
        if failed := [rank for rank in told if "failed" in told[rank]]:
            raise OSError(0, f"rank {failed[0]}: {told[failed[0]]['failed']}")
        self._wait_until_visible(folder)
        written = {**told, **({} if own is None else {self._rank: own})}
        files = {pieces_file.name_of(rank, self._token): {"rank": rank, **written[rank]} for rank in sorted(written)}
        parts = self._without_pieces(state["parts"])
        # Of earlier saves under this name. What comes later may be a newer start's (see `run.fence`).
        outdated = set(pieces_file.names_in(folder)) - files.keys()
        checkpoint_file.write(checkpoint, {**state, "parts": parts, "sharded": {"files": files}})
        pieces_file.remove_files(folder, outdated)
        return True

    def leave_out(self, non_finite: list[str]) -> None:
        """Tell rank 0 that this rank's pieces are non-finite and not written."""
        self._tell({"non_finite": non_finite})

    def _without_pieces(self, parts: Any) -> Any:
        shapes = self._local.shapes

        def shown(tensor: torch.Tensor, name: str) -> torch.Tensor:
            return torch.empty(shapes[name], dtype=tensor.dtype, device="meta") if name in shapes else tensor

        return with_tensors(parts, PARTS, shown)

    @property
    def is_last(self) -> bool:
        """Whether the ranks have parted since, such as after a failure: no other save will follow."""
        return process_group.ranks_store is None

    def _write_own(self, checkpoint: Path) -> dict[str, Any]:
        folder = pieces_file.make_folder(checkpoint)
        if self.is_main:
            sync_folder(folder.parent)
        return pieces_file.write(folder / pieces_file.name_of(self._rank, self._token), self._local)

    def _key_of(self, rank: int) -> str:
        return f"pieces/{self._token}/{rank}"

    def _tell(self, what: dict[str, Any]) -> None:
        if not self.is_main and self._store is not None:
            with contextlib.suppress(Exception):  # rank 0 is gone, and with it this save
                self._store.set(self._key_of(self._rank), json.dumps(what))

    def _told(self) -> dict[int, dict[str, Any]]:
        """What the other ranks have told, once all have. Each message is taken once: a rank that fails tries again."""
        told = dict(self._written)
        others = [rank for rank in self._writers if rank != self._rank]
        wait_s, since_s, suspensions = PATIENCE_S, time.monotonic(), processes.Suspensions()
        while left := [rank for rank in others if rank not in told]:
            for rank in left:
                if (message := self._taken(rank)) is None:
                    break  # asking for all of them each time would take long with many ranks
                told[rank] = message
                if "sha256" in message:
                    self._written[rank] = message
            else:
                continue
            if wait_s == PATIENCE_S and process_group.ranks_store is None:
                wait_s, since_s = _AFTER_FAILURE_S, time.monotonic()
            since_s += suspensions.missed_s()
            if time.monotonic() - since_s > wait_s:
                raise OSError(0, f"rank {left[0]} did not write its pieces within {wait_s:.0f} s")
            time.sleep(_POLL_S)
        return told

    def _taken(self, rank: int) -> dict[str, Any] | None:
        assert self._store is not None
        if not self._store.check([key := self._key_of(rank)]):
            return None
        message: dict[str, Any] = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return message

    def _wait_until_visible(self, folder: Path) -> None:
        paths = {f"rank {rank}": folder / pieces_file.name_of(rank, self._token) for rank in self._writers}
        missing = checkpoint_file.once_visible(lambda: next((who for who in paths if not paths[who].exists()), None))
        if missing:
            hint = "is the run directory on a file system that all nodes share?"
            raise OSError(0, f"{missing} has written its pieces, but they are not to be seen here; {hint}")
