"""The reference workload: the CNN of PyTorch's MNIST example, trained under DDP.

train_config  the options, and what a training returns
data          images and labels as tensors; the datasets' files and their digests
model         the CNNs, the recipes by which they are trained, layers for faster training on CPUs
training      the loop, a batch's gradients and update, parts of a step as CUDA graphs
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster_ddp.mnist.train_config import TrainConfig, TrainResult


def train(config: TrainConfig) -> TrainResult:
    """Join the other ranks, train for all epochs and test after each. Every rank calls it.

    Raises:
        ClusterDDPError: ranks, data, a checkpoint are missing or do not fit; or the loss is non-finite.
        RuntimeError: another rank failed or hangs, or the ranks end with different weights.
        Stopped: the job was told to stop; all is saved.
    """
    collects = gc.isenabled()
    gc.disable()  # looking through these modules' objects would take a sixth of the time
    try:
        from cluster_ddp.mnist.training import run

        gc.freeze()  # nor through what they made, from now on
    finally:
        if collects:
            gc.enable()
    return run(config)
