"""`python -m cluster_ddp.train` as it is, its batches under the same stopwatch as the baselines'.

    python benchmarks/baselines/ours.py [options of this] [-- options of cluster_ddp.train]

It ends with a line of JSON (see `common.Watch`), before any test.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from common import Watch, parse

from cluster_ddp import train
from cluster_ddp.runtime.data.shard import Shard


def main() -> int:
    """Put the watch around the shard, train. Returns the exit status."""
    options = parse(__doc__, passes_on_to="cluster_ddp.train")
    watch, batches_of = Watch(options), Shard.__iter__

    def watched(shard: Shard) -> Iterator[Any]:
        yield from watch(batches_of(shard))
        raise SystemExit(0)

    Shard.__iter__ = watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as run_dir:
        named = {
            "--data-dir": options.data_dir,
            "--batch-size": options.batch_size,
            "--log-interval": options.log_interval,
            "--run-dir": run_dir,
        }
        return train.main([*(str(word) for pair in named.items() for word in pair), *options.more])


if __name__ == "__main__":
    sys.exit(main())
