"""The weights in a checkpoint, for evaluation, export and fine-tuning."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.checkpoint.checkpoint_file import UnusableError
from cluster_ddp.runtime.checkpoint.folder import named_by
from cluster_ddp.runtime.checkpoint.restore import read
from cluster_ddp.runtime.checkpoint.sharded.part_state import SavedPieces, filled
from cluster_ddp.runtime.model.ddp import unwrapped


def load_weights(path: str | os.PathLike[str], model: torch.nn.Module, *, part: str = "model") -> Path:
    """Load a model's parameters and buffers from a checkpoint. It needs no world; the model stays on its device.

    A sharded model (`World.wrap`) takes its own pieces, from whatever checkpoint.

    Args:
        path: a checkpoint, such as runs/fit-12/checkpoints/best-accuracy.pt; or a run directory: then its newest one.
        model: of the same architecture; wrapped, compiled or plain.
        part: the name that the model had in `Checkpointer`.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, has no such part, or holds another model.
    """
    found, _ = named_by(Path(path))
    saved = read(found)
    parts = saved["parts"]
    asked = f"Loading {part!r} from {found}:"
    if part not in parts:
        raise CheckpointError(asked, f"it holds {', '.join(parts)}.", f"part={next(iter(parts), None)!r}")
    try:
        inner = unwrapped(model)
        inner.load_state_dict(filled(part, inner, parts[part], SavedPieces(found, saved)))
    except (RuntimeError, TypeError, AttributeError) as error:  # missing names, other shapes; not a module's state
        hint = "make the model with the same arguments as in the training"
        raise CheckpointError(asked, f"{str(error)[:500]}.", hint) from error
    except UnusableError as error:
        raise CheckpointError(asked, f"{error}.", "name another checkpoint, or make this one again") from None
    return found
