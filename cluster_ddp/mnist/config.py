"""The options of the reference workload; the command line is made from them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.runtime.checkpoint.interval import Interval
from cluster_ddp.runtime.stop_signals import number_of

DATASETS = ("mnist", "fashion", "digits")
FOLDER = "folder:"
RecipeName = Literal["reference", "fast"]
ModelName = Literal["cnn", "convnet"]
Amp = Literal["off", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Train the MNIST CNN under DistributedDataParallel.

    Runs as one process, under srun (one task per GPU), or under torchrun.
    """

    dataset: str = "mnist"
    """mnist (scripts/download_data.py fetches it); fashion: Fashion-MNIST; digits: 1,797 handwritten digits in the
    package; or folder:PATH: images of 28x28 pixels in ten classes, in four unpacked files with MNIST's names."""
    data_dir: Path = Path("data")
    """Folder with MNIST/raw or FashionMNIST/raw, as torchvision's classes have it."""
    run_dir: Path | None = None
    """Folder for metrics.jsonl, run.json and checkpoints. Default: the run directory of the submission, else
    runs/<dataset>-<job id, or date and time>."""
    recipe: RecipeName = "reference"
    """reference: PyTorch's MNIST example. fast: a smaller CNN, Adam, one cycle, bf16; reaches 99 % soonest."""
    model: ModelName = "cnn"
    """cnn: the recipe's. convnet: two 5x5 convolutions, each with batch normalisation, and a linear layer."""
    epochs: int | None = None
    """Number of passes over the training set. Default: the recipe's, 14 or 2."""
    batch_size: int | None = None
    """Training samples per GPU (rank) and step. Default: the recipe's, 64 or 256."""
    global_batch_size: int | None = None
    """Training samples per update, over all GPUs (ranks) and accumulated batches, instead of --batch-size."""
    accumulate: int = 1
    """Number of batches of one update."""
    test_batch_size: int = 1000
    """Test samples per GPU (rank) and step."""
    lr: float | None = None
    """Learning rate at its highest. Default: the recipe's, 1 or 0.006."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by the samples per update / the recipe's batch size (linear), or its square root."""
    warmup_epochs: float = 0.0
    """Raise the learning rate linearly from a hundredth over this many epochs, on top of the recipe's schedule."""
    gamma: float = 0.7
    """Factor on the reference recipe's learning rate after each epoch."""
    amp: Amp | None = None
    """Precision of convolutions and matrix products: off (float32, no TF32), bf16, or fp16 with a scaled
    loss. Weights are float32. Default: the recipe's, off or bf16."""
    sync_batchnorm: bool = False
    """On GPUs: batch normalisation uses the statistics of all ranks' batches."""
    tune: Literal["auto", "always", "never"] = "auto"
    """Time the memory layouts (contiguous, channels_last) at the start and take the faster one. auto: in runs of
    1,000 steps or more. Bits depend on it; a resumed run keeps it."""
    deterministic: bool = False
    """Same bits in every run on the same machines with the same ranks: deterministic algorithms, no tuning."""
    cuda_graph: bool = False
    """On GPUs: run each step's forward and backward pass as one CUDA graph, and the update as another."""
    workers: int | None = None
    """Number of worker processes per rank of a DataLoader that makes the training batches. Default: no DataLoader for a
    dataset that fits on the device."""
    resident_share: float = 0.1
    """Share of a GPU's free memory that a dataset may take. If it needs more, a DataLoader makes the batches."""
    seed: int = 1
    """Random seed for weights, shuffling and dropout."""
    log_interval: int = 10
    """Steps between two log lines."""
    cuda: bool = True
    """Use GPUs, if there are any."""
    dry_run: bool = False
    """Run one step and one test only."""
    eval_only: bool = False
    """Test the weights of the checkpoint or run directory that --resume names. Train nothing."""
    benchmark: Literal["training", "inference"] | None = None
    """Time 20 steps of training or inference, and print the images per second. Keep nothing."""
    profile: int | None = None
    """Record so many steps of the first epoch with torch.profiler, in profile-rank<k>.json.gz in the run directory."""
    save_model: bool = False
    """Save the trained weights in the run directory as mnist_cnn.pt."""
    rendezvous_timeout_s: float = 300.0
    """Seconds to wait for all ranks at the start."""
    collective_timeout_s: float = 600.0
    """Seconds that ranks wait for another rank while they train. Then they name it and end."""
    checkpoint_every: str = "1epoch"
    """How often to save: 1epoch, 500steps, 10min, or never (then only when the job is stopped)."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep."""
    resume: str = "auto"
    """auto: resume from the run directory's newest checkpoint. never: start from the beginning (a requeued job still
    resumes its own). Or a path: start from this checkpoint, or from the newest one of another run directory, if the run
    directory has none yet."""
    stop_signals: tuple[str, ...] = ("USR1", "USR2", "TERM")
    """Signals at which to save and stop."""
    on_nan: Literal["stop", "continue"] = "stop"
    """What to do on a non-finite loss (NaN or Inf): stop, or skip that step's update."""

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.dataset not in DATASETS and not self.dataset.removeprefix(FOLDER) != self.dataset:
            pass
        for options, why, hint in self._contradictions():
            raise SpecError(f"Training with {options}:", f"{why}.", hint)
        Interval.parse(self.checkpoint_every)
        for signal in self.stop_signals:
            number_of(signal)

def _error(name: str, value: object, legal: str) -> SpecError:
    option = "--" + name.replace("_", "-")
    return SpecError(f"Training with {option} {value}:", f"{name} must be {legal}.", f"give {option} {legal}")
