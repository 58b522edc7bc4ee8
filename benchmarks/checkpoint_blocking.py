"""How long a save keeps training waiting: `python benchmarks/checkpoint_blocking.py [--mb 500] [--rounds 7]`.

Compared in turn, on the same model: saving in the foreground (copy, write, SHA-256, fsync), and what `Checkpoint.step`
takes where it saves in the background. Prints JSON, medians in seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import cluster_ddp
from cluster_ddp.runtime.checkpoint import file
from cluster_ddp.runtime.metrics import RunDir

LAYERS = 10


def model_of(mb: int) -> torch.nn.Module:
    """Linear layers with so many megabytes (10**6 bytes) of float32 weights in all."""
    width = round((mb * 1e6 / 4 / LAYERS) ** 0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=500, help="size of the model")
    parser.add_argument("--rounds", type=int, default=7, help="saves of each kind")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    logging.getLogger("cluster_ddp").setLevel(logging.ERROR)
    blocking, background = [], []
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        cluster_ddp.distributed(cuda=False) as world,
    ):
        model = world.wrap(model_of(arguments.mb))
        shard = world.shard(torch.utils.data.TensorDataset(torch.zeros(8, 1)), batch_size=1, shuffle_seed=1)
        run_dir = RunDir(Path(folder), world)
        checkpoint = cluster_ddp.Checkpoint(world, shard=shard, run_dir=run_dir, every="1steps", keep=1, model=model)
        copy = file.HostCopy()
        for _ in range(1 + arguments.rounds):
            state = {"model": model.module.state_dict()}
            blocking.append(seconds(lambda state=state: file.write(Path(folder) / "blocking.pt", copy.of(state))))
            background.append(seconds(checkpoint.step))
            checkpoint._folder.wait()
        first = background[0]  # it also gets the memory from the system
        medians = statistics.median(blocking[1:]), statistics.median(background[1:])
        result = {
            "model_mb": arguments.mb,
            "rounds": arguments.rounds,
            "blocking_s": round(medians[0], 3),
            "background_s": round(medians[1], 4),
            "background_spread_s": [round(min(background[1:]), 4), round(max(background[1:]), 4)],
            "first_background_s": round(first, 3),
            "share": round(medians[1] / medians[0], 4),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
