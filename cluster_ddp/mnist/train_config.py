"""The options of `cluster-ddp train`, and what a training returns. The command line is made of the options.

Imports no torch: `submit` checks the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.option_form import flag
from cluster_ddp.runtime.checkpoint.save_interval import Interval
from cluster_ddp.runtime.stop_signals import number_of

FOLDER = "folder:"
DATASETS = ("mnist", "fashion", "digits")
RecipeName = Literal["reference", "fast"]
ModelName = Literal["cnn", "convnet"]
Amp = Literal["off", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Train the MNIST CNN under DistributedDataParallel.

    Runs as one process, under srun (one task per GPU), or under torchrun.
    """

    dataset: str = "mnist"
    """mnist (a checkout's scripts/download_data.py fetches it); fashion: Fashion-MNIST; digits: 1,797 handwritten
    digits in the package; or folder:PATH: images of 28x28 pixels in ten classes, in four unpacked files with MNIST's
    names."""
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
    deterministic: bool = False
    """Same bits in every run on the same machines with the same ranks: deterministic algorithms."""
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
    save_model: bool = False
    """Save the trained weights in the run directory as mnist_cnn.pt."""
    rendezvous_timeout_s: float = 300.0
    """Seconds to wait for all ranks at the start."""
    collective_timeout_s: float = 600.0
    """Seconds that ranks wait for another rank while they train. Then they name it and end."""
    hang_warning_s: float = 120.0
    """Seconds without a step until all ranks say where they are; 0 for never. It ends nothing, unless the job has
    --hang-restart-s."""
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
        for names, is_legal, legal in _NUMBERS:
            for name in names:
                value = getattr(self, name)
                if value is not None and not is_legal(value):
                    option = flag(name)
                    asked = f"Training with {option} {value}:"
                    raise SpecError(asked, f"{name} must be {legal}.", f"give {option} {legal}")
        is_folder = self.dataset.startswith(FOLDER) and self.dataset != FOLDER
        if self.dataset not in DATASETS and not is_folder:
            found = f"there is no such dataset.{nearest(self.dataset, DATASETS)}"
            raise SpecError(f"Training on {self.dataset!r}:", found, f"--dataset {', '.join(DATASETS)} or folder:PATH")
        for is_given, options, why, hint in self._exclusive():
            if is_given:
                raise SpecError(f"Training with {options}:", f"{why}.", hint)
        Interval.parse(self.checkpoint_every)
        for signal in self.stop_signals:
            number_of(signal)

    @property
    def dataset_name(self) -> str:
        """The dataset without a path, for names of files."""
        return self.dataset.partition(":")[0]

    def _exclusive(self) -> Iterator[_Rule]:
        """Options that exclude each other."""
        graph, one = self.cuda_graph, "give one of the two"
        both = self.batch_size is not None and self.global_batch_size is not None
        yield both, "--batch-size and --global-batch-size", "one follows from the other", one
        several = graph and self.accumulate > 1
        yield several, f"--cuda-graph --accumulate {self.accumulate}", "a graph holds an update's only batch", one
        scaled = graph and self.amp == "fp16"
        yield scaled, "--cuda-graph --amp fp16", "the scaler's choice to skip an update can't be captured", "--amp bf16"
        plain = self.sync_batchnorm and self.model == "cnn"
        yield plain, "--sync-batchnorm", "the recipe's CNN has no batch normalisation", "add --model convnet"
        is_path = self.resume not in ("auto", "never")
        wanted = "name a checkpoint or a run directory: --resume PATH"
        yield self.eval_only and not is_path, "--eval-only", "there are no weights to test", wanted
        for name in ("dry_run", "save_model"):
            option = flag(name)
            unused = self.eval_only and bool(getattr(self, name))
            yield unused, f"--eval-only {option}", f"{option} needs a training", "leave one out"


_Rule = tuple[bool, str, str, str]
"""Whether it is broken, the options, why, and a hint."""

_COUNTS = ("epochs", "batch_size", "global_batch_size", "accumulate", "test_batch_size", "log_interval")
# Options, which of their values are legal, in words. A NaN never is.
_NUMBERS: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    ((*_COUNTS, "keep_checkpoints"), lambda value: value >= 1, "a whole number of 1 or more"),
    (("workers", "seed"), lambda value: value >= 0, "a whole number of 0 or more"),
    (("lr", "rendezvous_timeout_s", "collective_timeout_s"), lambda value: value > 0, "a number above 0"),
    (("gamma",), lambda value: 0 < value <= 1, "a number above 0, and at most 1"),
    (("warmup_epochs",), lambda value: value >= 0, "a number of 0 or more"),
    (("resident_share",), lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    (("hang_warning_s",), lambda value: value >= 0, "a number of seconds, or 0 for never"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a training returns: its last figures. One that this start of the job did not measure is None."""

    accuracy: float | None = None
    """On the test set, after the last epoch: 0 to 1."""
    loss: float | None = None
    """Mean over the test set, after the last epoch."""
    samples_per_s: float | None = None
    """Training samples per second over all ranks, from the last log line."""
    run_dir: Path
    """The run directory."""
