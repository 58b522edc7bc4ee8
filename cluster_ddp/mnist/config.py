"""The options of the reference workload; the command line is made from them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.interval import Interval
from cluster_ddp.runtime.preemption import number_of

DatasetName = Literal["mnist", "digits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Train the MNIST CNN under DistributedDataParallel.

    Runs as one process, under srun (one task per GPU), or under torchrun.
    """

    dataset: DatasetName = "mnist"
    """mnist (scripts/download_data.py fetches it), or digits: 1,797 real digits that are in the package."""
    data_dir: Path = Path("data")
    """Folder with MNIST/raw, as torchvision's MNIST class has it."""
    run_dir: Path | None = None
    """Folder for metrics.jsonl, run.json and checkpoints. Default: the run folder of the submission, else
    runs/<dataset>-<job id, or date and time>."""
    epochs: int = 14
    """Number of passes over the training set."""
    batch_size: int = 64
    """Training samples per GPU (rank) and step."""
    test_batch_size: int = 1000
    """Test samples per GPU (rank) and step."""
    lr: float = 1.0
    """Learning rate of Adadelta."""
    gamma: float = 0.7
    """Factor on the learning rate after each epoch."""
    seed: int = 1
    """Of the initial weights, the shuffling and the dropout."""
    log_interval: int = 10
    """Steps between two lines of training loss."""
    cuda: bool = True
    """Use GPUs where there are some."""
    dry_run: bool = False
    """One step and one test, to see that everything works."""
    save_model: bool = False
    """Leave the trained weights in the run folder as mnist_cnn.pt."""
    rendezvous_timeout_s: float = 300.0
    """Seconds to wait for all ranks at the start."""
    collective_timeout_s: float = 600.0
    """Seconds that a rank may let the others wait later on; then they name it and end."""
    checkpoint_every: str = "1epoch"
    """How often to save: 1epoch, 500steps, 10min, or never (then only when the job is stopped)."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay."""
    resume: str = "auto"
    """auto: go on from the run folder's newest checkpoint. never: from the beginning. Or the path of a checkpoint or of
    another run's folder to begin with."""
    stop_signals: tuple[str, ...] = ("USR1", "USR2", "TERM")
    """Signals at which to save and stop."""
    on_nan: Literal["stop", "continue"] = "stop"
    """What to do when the loss is no number: stop, or leave out that step's update."""

    def __post_init__(self) -> None:
        for name, low in (
            ("epochs", 1),
            ("batch_size", 1),
            ("test_batch_size", 1),
            ("log_interval", 1),
            ("keep_checkpoints", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < low:
                raise _error(name, getattr(self, name), f"a whole number of {low} or more")
        if not self.lr > 0:
            raise _error("lr", self.lr, "a number above 0")
        if not 0 < self.gamma <= 1:
            raise _error("gamma", self.gamma, "a number above 0, and at most 1")
        for name in ("rendezvous_timeout_s", "collective_timeout_s"):
            if not getattr(self, name) > 0:
                raise _error(name, getattr(self, name), "a number above 0")
        Interval.parse(self.checkpoint_every)
        for signal in self.stop_signals:
            number_of(signal)


def _error(name: str, value: object, legal: str) -> SpecError:
    option = "--" + name.replace("_", "-")
    return SpecError(f"Training with {option} {value}:", f"{name} must be {legal}.", f"give {option} {legal}")
