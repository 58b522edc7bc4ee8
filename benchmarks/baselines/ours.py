"""`python -m cluster_ddp.train` as it is, timed by the same stopwatch as the baselines.

    python benchmarks/baselines/ours.py [options of this] [-- options of cluster_ddp.train]

It ends with a line of JSON (see `common.Watch`), before any test.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import Watch, make_parser, parsed
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp import train
from cluster_ddp.runtime.data.shard import Shard
from cluster_ddp.runtime.world import World


def main() -> int:
    """Put the watch around the shard, train. Returns the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--only-wait", action="store_true", help="ranks wait for each other, but exchange no gradients")
    parser.add_argument("more", nargs="*", help="after --: options of cluster_ddp.train")
    options = parsed(parser)
    if options.only_wait:
        _exchange_no_gradients()
    watch, batches_of = Watch(options), Shard._batches_of_pass

    def watched(shard: Shard) -> Iterator[Any]:
        yield from watch(batches_of(shard))
        raise SystemExit(0)

    Shard._batches_of_pass = watched  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as run_dir:
        named = {
            "--data-dir": options.data_dir,
            "--batch-size": options.batch_size,
            "--log-interval": options.log_interval,
            "--run-dir": run_dir,
        }
        return train.main([*(str(word) for pair in named.items() for word in pair), *options.more])


def _exchange_no_gradients() -> None:
    """Exchange four bytes a step instead of the gradients. It spoils the training, and shows what waiting costs."""
    wrap = World.wrap

    def met(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        meeting = dist.all_reduce(torch.zeros(1 if bucket.is_last() else 0), async_op=True)
        return meeting.get_future().then(lambda _: bucket.buffer())

    def wrapped(self: World, model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        ddp: DistributedDataParallel = wrap(self, model, **options)
        ddp.register_comm_hook(None, lambda _, bucket: met(bucket))
        return ddp

    World.wrap = wrapped  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    sys.exit(main())
