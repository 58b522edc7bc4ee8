"""The parts of a checkpoint, with their values, in one process and without the objects that they are states of.

The tensors are the bytes of the checkpoint's files, mapped into memory. Only a tensor in several pieces is a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cluster_ddp.errors import CheckpointError, nearest_name
from cluster_ddp.runtime.checkpoint.checkpoint_file import UnusableError
from cluster_ddp.runtime.checkpoint.folder import named_by
from cluster_ddp.runtime.checkpoint.host_copy import with_tensors
from cluster_ddp.runtime.checkpoint.restore import read
from cluster_ddp.runtime.checkpoint.sharded.pieces import Piece
from cluster_ddp.runtime.checkpoint.sharded.shard_file import SavedPieces, described, folder_of
from cluster_ddp.runtime.checkpoint.sharded.shard_save import PARTS


class SavedParts:
    """What an undamaged checkpoint holds.

    Args:
        path: a checkpoint; or a run directory: then its newest undamaged one.

    Raises:
        CheckpointError: there is none, or it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path, _ = named_by(path)
        saved = read(self.path)
        self._states: dict[str, Any] = saved["parts"]
        self._pieces = SavedPieces(folder_of(self.path), described(saved))

    @property
    def names(self) -> list[str]:
        """The names that the parts had in `Checkpointer`."""
        return list(self._states)

    def whole(self, name: str) -> Any:
        """Return a part's state with all its values.

        Raises:
            CheckpointError: it is not there, or its shard files do not have all its values.
        """

        def value(tensor: torch.Tensor, place: str) -> torch.Tensor:
            return self._pieces.read(place, tensor, None) if tensor.is_meta else tensor

        return self._with_tensors(name, value)

    def in_pieces(self, name: str) -> tuple[Any, dict[int, list[Piece]]]:
        """Return a part's state, in which sharded tensors have no values; and their pieces, by id(tensor).

        Raises:
            CheckpointError: it is not there, or can't be read.
        """
        found: dict[int, list[Piece]] = {}

        def note(tensor: torch.Tensor, place: str) -> torch.Tensor:
            if tensor.is_meta and tensor.numel() == 0:
                return torch.empty(tensor.shape, dtype=tensor.dtype)
            if tensor.is_meta:
                found[id(tensor)] = list(self._pieces.of(place))
            return tensor

        return self._with_tensors(name, note), found

    def _with_tensors(self, name: str, tensor: Callable[[torch.Tensor, str], torch.Tensor]) -> Any:
        asked = f"Exporting {name!r} from {self.path}:"
        if name not in self._states:
            hint = f"--part {nearest_name(name, self._states) or next(iter(self._states), 'model')}"
            raise CheckpointError(asked, f"it holds {', '.join(self._states)}.", hint)
        try:
            return with_tensors(self._states[name], f"{PARTS}[{name!r}]", tensor)
        except UnusableError as error:
            raise CheckpointError(asked, f"{error}.", "name another checkpoint") from None
        except OSError as error:
            hint = "if the training still runs, it may have removed it: try again"
            raise CheckpointError(asked, f"{error.filename}: {error.strerror}.", hint) from error
