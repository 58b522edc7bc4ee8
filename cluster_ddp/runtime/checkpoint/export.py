"""`cluster-ddp export`: what a checkpoint holds, in one process, for other tools. No model is made.

The tensors are the bytes of the checkpoint's files, mapped into memory. Only a tensor in several pieces is a copy. An
output appears whole or not at all, and replaces nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from cluster_ddp.errors import CheckpointError, SpecError, nearest, nearest_name
from cluster_ddp.run.files import make_dir, sync_folder
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.checkpoint_file import UnusableError
from cluster_ddp.runtime.checkpoint.folder import named_by
from cluster_ddp.runtime.checkpoint.host_copy import with_tensors
from cluster_ddp.runtime.checkpoint.restore import read
from cluster_ddp.runtime.checkpoint.sharded.pieces_file import PARTS
from cluster_ddp.runtime.checkpoint.sharded.resharding import SavedPieces
from cluster_ddp.runtime.model.dtensor_pieces import Piece
from cluster_ddp.runtime.run_dir import fenced_writes


def export(checkpoint: Path, output: Path, *, part: str | None = None, as_dcp: bool = False) -> Path:
    """Write a part of a checkpoint, such as a model's weights, as one file, or its parts for torch.distributed's DCP.

    Returns the checkpoint's path. A file has the names that the part has in its `state_dict()`, without prefixes of
    wrappers. A sharded checkpoint's weights are put together first, and are then in memory once. `dcp.load({"model":
    model.state_dict()}, …)` reads a folder on any number of ranks. Of sharded tensors it has the pieces as they are;
    that takes hardly any memory.

    Args:
        checkpoint: a checkpoint, or a run directory: then its newest undamaged one.
        output: ends in .pt (torch.save; torch.load reads it with weights_only) or in .safetensors; with `as_dcp` a
            folder, which is made.
        part: the name that it had in `Checkpointer`; None: "model", with `as_dcp` all.

    Raises:
        SpecError: the output exists, has another suffix or no folder; safetensors is missing, or can't hold the part.
        CheckpointError: the checkpoint is missing or damaged, or has no such part; or the output can't be written.
    """
    by_id = dict[int, list[Piece]]()
    save = functools.partial(_save_dcp, by_id) if as_dcp else _writer(output)
    _refuse_taken(output)
    path, _ = named_by(checkpoint)
    saved = read(path)
    pieces = SavedPieces(path, saved)

    def replaced(tensor: torch.Tensor, place: str) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if not as_dcp:
            return pieces.read(place, tensor, None)
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        by_id[id(tensor)] = list(pieces.of(place))
        return tensor

    names = list(saved["parts"]) if as_dcp and part is None else [part or "model"]
    states = {name: _state(path, saved["parts"], name, replaced) for name in names}
    with _appearing(output) as temporary:
        save(states if as_dcp else states[names[0]], temporary)
    return path


def _state(path: Path, parts: Mapping[str, Any], name: str, tensor: Callable[[torch.Tensor, str], torch.Tensor]) -> Any:
    """A part's state, with each tensor replaced; see `with_tensors`."""
    asked = f"Exporting {name!r} from {path}:"
    if name not in parts:
        hint = f"--part {nearest_name(name, parts) or next(iter(parts), 'model')}"
        raise CheckpointError(asked, f"it holds {', '.join(parts)}.", hint)
    try:
        return with_tensors(parts[name], f"{PARTS}[{name!r}]", tensor)
    except UnusableError as error:
        raise CheckpointError(asked, f"{error}.", "name another checkpoint") from None
    except OSError as error:
        hint = "if the training still runs, it may have removed it: try again"
        raise CheckpointError(asked, f"{error.filename}: {error.strerror}.", hint) from error


def _writer(output: Path) -> Callable[[Any, Path], None]:
    """What writes a file of this suffix."""
    if output.suffix == ".pt":
        return _torch_save
    asked = f"Writing {output}:"
    if output.suffix != ".safetensors":
        legal = (".pt", ".safetensors")
        found = f"its name must end in {' or '.join(legal)}.{nearest(output.suffix, legal)}"
        raise SpecError(asked, found, "or name a folder, for torch.distributed.checkpoint: --dcp")
    try:
        from safetensors import torch as _  # noqa: F401  # before a large checkpoint is read
    except ImportError as error:
        found = f"the library safetensors can't be imported by {sys.executable} ({error})."
        raise SpecError(asked, found, f"pip install safetensors; or write {output.with_suffix('.pt').name}") from error
    return _save_safetensors


def _torch_save(state: Any, path: Path) -> None:
    with open(fenced_writes.open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        torch.save(state, file)


def _save_safetensors(state: Any, path: Path) -> None:
    from safetensors.torch import save_file

    asked, hint = "Exporting to .safetensors:", "export to a .pt file"
    entries = state.items() if isinstance(state, Mapping) else [("it", state)]
    if others := [name for name, value in entries if not isinstance(value, torch.Tensor)]:
        found = f"safetensors files have tensors only, and these entries are something else: {', '.join(others[:5])}."
        raise SpecError(asked, found, hint)
    try:
        save_file(dict(entries), path, metadata={"format": "pt"})  # which transformers asks for
    except (ValueError, KeyError) as error:  # such as a sparse tensor, or a dtype that it does not have
        raise SpecError(asked, f"safetensors can't write it: {type(error).__name__}: {error}.", hint) from error


def _save_dcp(pieces: Mapping[int, Sequence[Piece]], states: dict[str, Any], path: Path) -> None:
    """Write states into a folder; of sharded tensors, which have no values, the pieces, by the tensor's id."""
    make_dir(path)
    # With copy-ahead, tensors would be read before the ones before are written.
    writer, failed = dcp.FileSystemWriter(path, per_thread_copy_ahead=0), None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is meant
        try:
            dcp.save(states, storage_writer=writer, planner=_Planner(pieces), no_dist=True)
        except dcp.CheckpointException as error:  # not an Exception
            failed = next(iter(error.failures.values()))[0]
    if failed is not None:  # with its own context, which has what the disk said
        raise failed


class _Planner(dcp.DefaultSavePlanner):
    """Plans sharded tensors as their pieces; see `_save_dcp`."""

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


def _refuse_taken(output: Path) -> None:
    """Raise SpecError if something has an output's name, or its folder does not exist."""
    asked = f"Writing {output}:"
    if os.path.lexists(output):
        raise SpecError(asked, "it exists, and is not replaced.", "choose another name, or move it away")
    if not output.parent.is_dir():
        found = f"there is no folder {output.parent}."
        raise SpecError(asked, found, f"mkdir -p {shlex.quote(str(output.parent))}")


@contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """Yield a temporary path beside an output, for a file or a folder that then gets the output's name.

    After an error nothing is left. A killed process may leave `.<name>.<hex>.tmp`. What can't be written is a
    CheckpointError.
    """
    temporary = output.with_name(f".{output.name}.{os.urandom(4).hex()}.tmp")
    try:
        yield temporary
        if not temporary.is_dir():  # DCP has synced its files
            with open(fenced_writes.open_own(temporary, os.O_RDWR | os.O_CREAT), "rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(temporary)
        _refuse_taken(output)
        temporary.rename(output)
        sync_folder(output.parent)
    except Exception as error:  # each library has its own for a full disk
        # torch.save hides it.
        found = next((one for one in (error, error.__context__) if isinstance(one, OSError)), None)
        if found is None and type(error).__name__ != "SafetensorError":
            raise
        words = str(error) if found is None else found.strerror or str(found)
        raise CheckpointError(f"Writing {output}:", f"{words}.", "free space there: df -h, quota") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)
