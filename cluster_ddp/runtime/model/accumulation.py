"""Gradient accumulation: one update of several batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.data.shard import Shard


@contextmanager
def accumulate(model: DistributedDataParallel, batch: Shard | int, *, every: int) -> Iterator[bool]:
    """Run forward and backward in the body without adding up gradients over ranks, but for the last batch of a group.

    Args:
        model: from `World.wrap`.
        batch: the shard that the batch is from: its epoch's last group may be smaller. Or, without one, the number of
            the batch, from 0.
        every: number of batches of one update.

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
    step, is_end = (batch, False) if isinstance(batch, int) else (batch.step, batch.seen == batch.size)
    is_last = is_end or (step + 1) % every == 0
    with ExitStack() as stack:
        if not is_last:
            stack.enter_context(model.no_sync())
        yield is_last
