"""The reference workload: the CNN of PyTorch's MNIST example, trained under DDP.

config   its options                    files  the dataset's files and their digests
model    the CNNs, plain                data   images and labels as tensors
recipes  optimizer, learning rate       step   what is done with a batch
loop     train and test                 result what a training returns
fast_cpu the same, faster on CPUs       cuda_graphs  a step launched as one, on GPUs
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster_ddp.mnist.config import TrainConfig
    from cluster_ddp.mnist.result import TrainResult


def train(config: TrainConfig) -> TrainResult:
    """Join the world, train for all epochs, test after each. Every rank calls it.

    Raises:
        ClusterDDPError: the ranks did not meet, the data is missing, the run directory can't be written, or a
            checkpoint does not fit.
        Stopped: the job was told to stop; all is saved.
    """
    from cluster_ddp.mnist.loop import run  # torch

    return run(config)
