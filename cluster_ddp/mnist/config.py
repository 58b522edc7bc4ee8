"""The options of the reference workload, and what a training returns. The command line is made of the options.

Imports no torch: `Job.result` loads a result where the job was submitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.mnist.idx_files import FOLDER
from cluster_ddp.runtime.checkpoint.interval import Interval
from cluster_ddp.runtime.stop_signals import number_of

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
    trace: int | None = None
    """Record so many steps of the first epoch with torch.profiler, in trace-rank<k>.json.gz in the run directory."""
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
        self._check_numbers()
        is_folder = self.dataset.startswith(FOLDER) and self.dataset != FOLDER
        if self.dataset not in DATASETS and not is_folder:
            found = f"there is no such dataset.{nearest(self.dataset, DATASETS)}"
            raise SpecError(f"Training on {self.dataset!r}:", found, f"--dataset {', '.join(DATASETS)} or folder:PATH")
        for is_given, options, why, hint in (*self._contradictions(), *self._unused()):
            if is_given:
                raise SpecError(f"Training with {options}:", f"{why}.", hint)
        Interval.parse(self.checkpoint_every)
        for signal in self.stop_signals:
            number_of(signal)

    @property
    def dataset_name(self) -> str:
        """The dataset without a path, for names of files."""
        return self.dataset.partition(":")[0]

    def _check_numbers(self) -> None:
        for name, low in _LOWEST.items():
            if (value := getattr(self, name)) is not None and value < low:
                raise _error(name, value, f"a whole number of {low} or more")
        if self.lr is not None and not self.lr > 0:
            raise _error("lr", self.lr, "a number above 0")
        if not self.warmup_epochs >= 0:
            raise _error("warmup_epochs", self.warmup_epochs, "a number of 0 or more")
        if not 0 < self.gamma <= 1:
            raise _error("gamma", self.gamma, "a number above 0, and at most 1")
        if not 0 <= self.resident_share <= 1:
            raise _error("resident_share", self.resident_share, "a number from 0 to 1")
        for name in ("rendezvous_timeout_s", "collective_timeout_s"):
            if not getattr(self, name) > 0:
                raise _error(name, getattr(self, name), "a number above 0")
        if not self.hang_warning_s >= 0:
            raise _error("hang_warning_s", self.hang_warning_s, "a number of seconds, or 0 for never")

    def _contradictions(self) -> Iterator[_Rule]:
        """Options that exclude each other."""
        one, graph = "give one of the two", self.cuda_graph
        layouts = self.deterministic and self.tune == "always"
        yield layouts, "--deterministic --tune always", "the fastest layout may differ each time", one
        both = self.batch_size is not None and self.global_batch_size is not None
        yield both, "--batch-size and --global-batch-size", "one follows from the other", one
        several = graph and self.accumulate > 1
        yield several, f"--cuda-graph --accumulate {self.accumulate}", "a graph holds an update's only batch", one
        scaled = graph and self.amp == "fp16"
        yield scaled, "--cuda-graph --amp fp16", "the scaler's choice to skip an update can't be captured", "--amp bf16"
        plain = self.sync_batchnorm and self.model == "cnn"
        yield plain, "--sync-batchnorm", "the recipe's CNN has no batch normalisation", "add --model convnet"

    def _unused(self) -> Iterator[_Rule]:
        """Options that an evaluation or a benchmark alone would not use."""
        modes = [*(["--eval-only"] if self.eval_only else []), *(["--benchmark"] if self.benchmark else [])]
        mode, is_path = " ".join(modes), self.resume not in ("auto", "never")
        yield len(modes) > 1, mode, "a benchmark tests no weights", "give one of the two"
        for name in ("dry_run", "save_model", "trace"):
            option = "--" + name.replace("_", "-")
            yield bool(modes and getattr(self, name)), f"{mode} {option}", f"{option} needs a training", "leave one out"
        wanted = "name a checkpoint or a run directory: --resume PATH"
        yield self.eval_only and not is_path, "--eval-only", "there are no weights to test", wanted
        starts = self.benchmark is not None and is_path
        yield starts, "--benchmark --resume PATH", "a benchmark starts with random weights", "leave --resume out"
        too_short = self.dry_run and self.trace is not None
        yield too_short, "--dry-run --trace", "a dry run has one step", "give one of the two"


_Rule = tuple[bool, str, str, str]
"""Whether it is broken, the options, why, and a hint."""

# The lowest legal value of each whole number.
_LOWEST = {
    "epochs": 1,
    "batch_size": 1,
    "global_batch_size": 1,
    "accumulate": 1,
    "test_batch_size": 1,
    "workers": 0,
    "trace": 1,
    "log_interval": 1,
    "keep_checkpoints": 1,
    "seed": 0,
}


def _error(name: str, value: object, legal: str) -> SpecError:
    option = "--" + name.replace("_", "-")
    return SpecError(f"Training with {option} {value}:", f"{name} must be {legal}.", f"give {option} {legal}")


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
