"""Gradient accumulation: one update of several batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.errors import SpecError


@contextmanager
def accumulate(model: DistributedDataParallel, step: int, *, every: int, steps: int) -> Iterator[bool]:
    """Run forward and backward in the body without adding up gradients over ranks, but for the last batch of a group.

    Args:
        model: from `World.wrap`.
        step: number of the batch in its epoch, from 0.
        every: number of batches of one update.
        steps: number of batches in the epoch; the last group may be smaller.

    Yields:
        Whether this batch is the last of its group: then update the weights.

    Raises:
        SpecError: `every` is below 1, or the model is not wrapped.
    """
    if every < 1:
        raise SpecError(f"Accumulating {every} batches:", "an update needs 1 or more.", "every=4")
    if not hasattr(model, "no_sync"):  # torch.compile's wrapper has it, too
        asked = f"Accumulating gradients of a {type(model).__name__}:"
        raise SpecError(asked, "it is not wrapped in DistributedDataParallel.", "model = world.wrap(model)")
    is_last = (step + 1) % every == 0 or step + 1 == steps
    with ExitStack() as stack:
        if not is_last:
            stack.enter_context(model.no_sync())
        yield is_last
