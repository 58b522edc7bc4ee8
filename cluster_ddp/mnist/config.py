"""The options of the reference workload; the command line is made from them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.checkpoint.interval import Interval
from cluster_ddp.runtime.stop_signals import number_of

DatasetName = Literal["mnist", "digits"]
RecipeName = Literal["reference", "fast"]
Amp = Literal["off", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Train the MNIST CNN under DistributedDataParallel.

    Runs as one process, under srun (one task per GPU), or under torchrun.
    """

    dataset: DatasetName = "mnist"
    """mnist (scripts/download_data.py fetches it), or digits: 1,797 handwritten digits in the package."""
    data_dir: Path = Path("data")
    """Folder with MNIST/raw, as torchvision's MNIST class has it."""
    run_dir: Path | None = None
    """Folder for metrics.jsonl, run.json and checkpoints. Default: the run directory of the submission, else
    runs/<dataset>-<job id, or date and time>."""
    recipe: RecipeName = "reference"
    """reference: PyTorch's MNIST example. fast: a smaller CNN, Adam, one cycle, bf16; reaches 99 % soonest."""
    epochs: int | None = None
    """Number of passes over the training set. Default: the recipe's, 14 or 2."""
    batch_size: int | None = None
    """Training samples per GPU (rank) and step. Default: the recipe's, 64 or 256."""
    test_batch_size: int = 1000
    """Test samples per GPU (rank) and step."""
    lr: float | None = None
    """Learning rate at its highest. Default: the recipe's, 1 or 0.006."""
    gamma: float = 0.7
    """Factor on the reference recipe's learning rate after each epoch."""
    amp: Amp | None = None
    """Precision of convolutions and matrix products: off (float32, no TF32) or bf16. Weights are float32.
    Default: the recipe's, off or bf16."""
    tune: Literal["auto", "always", "never"] = "auto"
    """Time the memory layouts (contiguous, channels_last) at the start and take the faster one. auto: in runs of
    1,000 steps or more. Bits depend on it; a resumed run keeps it."""
    deterministic: bool = False
    """Same bits in every run on the same machines with the same ranks: deterministic algorithms, no tuning."""
    cuda_graph: bool = False
    """On GPUs: run each step's forward and backward pass as one CUDA graph, and the update as another."""
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
        for name, low in (
            ("epochs", 1),
            ("batch_size", 1),
            ("test_batch_size", 1),
            ("log_interval", 1),
            ("keep_checkpoints", 1),
            ("seed", 0),
        ):
            if (value := getattr(self, name)) is not None and value < low:
                raise _error(name, getattr(self, name), f"a whole number of {low} or more")
        if self.lr is not None and not self.lr > 0:
            raise _error("lr", self.lr, "a number above 0")
        if not 0 < self.gamma <= 1:
            raise _error("gamma", self.gamma, "a number above 0, and at most 1")
        if not 0 <= self.resident_share <= 1:
            raise _error("resident_share", self.resident_share, "a number from 0 to 1")
        for name in ("rendezvous_timeout_s", "collective_timeout_s"):
            if not getattr(self, name) > 0:
                raise _error(name, getattr(self, name), "a number above 0")
        if self.deterministic and self.tune == "always":
            asked, found = "Training with --deterministic --tune always:", "the fastest layout may differ each time."
            raise SpecError(asked, found, "give one of the two")
        Interval.parse(self.checkpoint_every)
        for signal in self.stop_signals:
            number_of(signal)


def _error(name: str, value: object, legal: str) -> SpecError:
    option = "--" + name.replace("_", "-")
    return SpecError(f"Training with {option} {value}:", f"{name} must be {legal}.", f"give {option} {legal}")
