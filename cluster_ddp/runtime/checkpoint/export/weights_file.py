"""A part of a checkpoint, such as a model's weights, as one plain file: model.pt or model.safetensors.

Weights of an unsharded checkpoint are written from its file, which is mapped into memory. Those of a sharded one are
put together first, and are then in memory once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.runtime.checkpoint.export.saved_parts import SavedParts
from cluster_ddp.runtime.checkpoint.export.whole_output import appearing, refuse_taken
from cluster_ddp.runtime.run_dir import fenced_writes


def write(checkpoint: Path, output: Path, *, part: str = "model") -> Path:
    """Write a part's state under the names that it has in `part.state_dict()`, without prefixes of wrappers.

    Args:
        checkpoint: a checkpoint, or a run directory: then its newest undamaged one.
        output: ends in .pt (torch.save; torch.load reads it with weights_only) or in .safetensors.
        part: the name that the model had in `Checkpointer`.

    Returns:
        The path of the checkpoint.

    Raises:
        SpecError: the output exists or has another suffix, or safetensors is not installed, or can't hold the part.
        CheckpointError: the checkpoint is missing or damaged, or has no such part; or the output can't be written.
    """
    save = _writer(output)
    refuse_taken(output)
    parts = SavedParts(checkpoint)
    state = parts.whole(part)
    with appearing(output) as temporary:
        save(state, temporary)
    return parts.path


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

    entries = state.items() if isinstance(state, Mapping) else [("it", state)]
    if others := [name for name, value in entries if not isinstance(value, torch.Tensor)]:
        found = f"safetensors files have tensors only, and these entries are something else: {', '.join(others[:5])}."
        raise SpecError("Exporting to .safetensors:", found, "export to a .pt file")
    try:
        save_file(dict(entries), path, metadata={"format": "pt"})  # which transformers asks for
    except (ValueError, KeyError) as error:  # such as a sparse tensor, or a dtype that it does not have
        found = f"safetensors can't write it: {type(error).__name__}: {error}."
        raise SpecError("Exporting to .safetensors:", found, "export to a .pt file") from error
