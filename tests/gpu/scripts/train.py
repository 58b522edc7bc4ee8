"""One rank of a training of the digits, with what a test adds to it: `python tests/gpu/scripts/train.py TASK.json`.

The task holds "config" (of `TrainConfig`) and any of these options:

rehearse      on the CPU; a CUDA graph's stand-in runs the function again
shared_gpu    all ranks compute on the first GPU, which the package itself refuses
hide_gpu      the rank that sees no GPU
capture       false: --cuda-graph with all its settings, but nothing is captured
dropout       false: without
samples       train with so many of the images
loader        true: batches through torch's DataLoader, with two workers
fault         {"rank": 1, "step": 30, "do": one of `patches.FAULTS`}
watch_syncs   true: between log lines, waiting for the GPU is an error
timed         true: note what saves, resuming and the agreement to stop take
trace         path: the second epoch's profile of rank 0
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Train; rank 0 leaves what was found in result.json."""
    task = json.loads(Path(sys.argv[1]).read_text())
    hidden = task.get("hide_gpu")
    if hidden is not None and os.environ.get("SLURM_PROCID", os.environ.get("RANK")) == str(hidden):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    import patches

    patches.apply(task)
    from cluster_ddp.mnist.train_config import TrainConfig
    from cluster_ddp.mnist.training import run

    config = {**task["config"], "run_dir": Path(task["config"]["run_dir"])}
    if task.get("rehearse"):
        config["cuda"] = False
    run(TrainConfig(**config))


if __name__ == "__main__":
    main()
