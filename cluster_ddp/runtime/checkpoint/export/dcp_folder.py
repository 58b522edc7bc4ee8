"""A checkpoint as a folder of torch.distributed.checkpoint (DCP), which other tools read on any number of ranks.

The pieces of sharded tensors are written as they are, one at a time, so this takes hardly any memory.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from cluster_ddp.files import make_dir
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.export.saved_parts import SavedParts
from cluster_ddp.runtime.checkpoint.export.whole_output import appearing, refuse_taken
from cluster_ddp.runtime.checkpoint.sharded.pieces import Piece


def write(checkpoint: Path, output: Path, *, part: str | None = None) -> Path:
    """Write the parts of a checkpoint, each under its name: `dcp.load({"model": model.state_dict()}, …)` reads it.

    Args:
        checkpoint: a checkpoint, or a run directory: then its newest undamaged one.
        output: a folder, which is made.
        part: the name of the only part to write; None for all.

    Returns:
        The path of the checkpoint.

    Raises:
        SpecError: the output exists.
        CheckpointError: the checkpoint is missing or damaged, or has no such part; or the output can't be written.
    """
    refuse_taken(output)
    parts = SavedParts(checkpoint)
    states: dict[str, Any] = {}
    pieces: dict[int, list[Piece]] = {}
    for name in parts.names if part is None else [part]:
        states[name], of_part = parts.in_pieces(name)
        pieces.update(of_part)
    with appearing(output) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is meant
        make_dir(temporary)
        # With copy-ahead, tensors would be read before the ones before are written.
        writer, failed = dcp.FileSystemWriter(temporary, per_thread_copy_ahead=0), None
        try:
            dcp.save(states, storage_writer=writer, planner=_Planner(pieces), no_dist=True)
        except dcp.CheckpointException as error:  # not an Exception
            failed = next(iter(error.failures.values()))[0]
        if failed is not None:  # with its own context, which has what the disk said
            raise failed
    return parts.path


class _Planner(dcp.DefaultSavePlanner):
    """Plans sharded tensors as their pieces.

    Args:
        pieces: by the id of a tensor without values, which has their place in the state.
    """

    def __init__(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        super().__init__()
        self._by_id, self._by_name = pieces, dict[str, Sequence[Piece]]()
        self._last: torch.Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        sharded = {name: value for name, value in self.state_dict.items() if id(value) in self._by_id}
        self._by_name = {name: self._by_id[id(value)] for name, value in sharded.items()}
        items = [item for item in plan.items if item.index.fqn not in sharded]
        items += [item for name, value in sharded.items() for item in _items(name, value, self._by_name[name])]
        return dataclasses.replace(plan, items=items)

    def lookup_object(self, index: MetadataIndex) -> Any:
        if self._last is not None:  # it is written
            checkpoint_file.release(self._last)
        assert index.index is not None or index.fqn not in self._by_name
        of_name = self._by_name.get(index.fqn)
        found = super().lookup_object(index) if of_name is None else of_name[index.index or 0].values
        self._last = found if isinstance(found, torch.Tensor) else None
        return found


def _items(name: str, whole: torch.Tensor, pieces: Sequence[Piece]) -> list[WriteItem]:
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(piece.start), number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=torch.Size(piece.start), sizes=piece.values.shape),
                properties=TensorProperties(dtype=whole.dtype),
                size=whole.shape,
            ),
        )
        for number, piece in enumerate(pieces)
    ]
