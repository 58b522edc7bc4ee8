"""The reference workload: the CNN of PyTorch's MNIST example, trained under DDP.

config           options, and the result     idx_files    the datasets' files and their digests
model            the CNNs, plain             data         images and labels as tensors
hyperparameters  optimizer, learning rate    train_step   forward, backward, update
loop             train and test              benchmark    some steps, timed
fast_cpu         the CNNs, faster on CPUs    cuda_graphs  a step as CUDA graphs
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster_ddp.mnist.config import TrainConfig, TrainResult


def train(config: TrainConfig) -> TrainResult:
    """Join the other ranks, train for all epochs and test after each. Every rank calls it.

    Args:
        config: the options.

    Returns:
        The last figures, and the run directory.

    Raises:
        ClusterDDPError: ranks are missing, the data is missing or damaged, the run directory can't be written, a
            checkpoint does not fit, or the loss is non-finite.
        RuntimeError: another rank failed or hangs, or the ranks end with different weights.
        Stopped: the job was told to stop; all is saved.
    """
    collects = gc.isenabled()
    gc.disable()  # looking through these modules' objects would take a sixth of the time
    try:
        from cluster_ddp.mnist.loop import run

        gc.freeze()  # nor through what they made, from now on
    finally:
        if collects:
            gc.enable()
    return run(config)
