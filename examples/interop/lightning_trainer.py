"""Lightning's Trainer in a job. It stops after a step and resumes there.

cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/interop/lightning_trainer.py

- Output: `default_root_dir` is the run directory. Lightning's loggers start another version_N there after each requeue.
- Requeue: by the batch script, at status 75. Lightning would call `scontrol requeue` at USR1, too: that is off.
- Lightning wants the numbers of devices and nodes told, and compares them with Slurm's or torchrun's.
- Lightning does not save the place in a DataLoader: resumed in the middle of an epoch, it starts with the epoch's first
  batches again. Here a step's data follow from its number. A loader with a state_dict is another way.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from stop_flag import StopFlag, run_dir


class Model(LightningModule):  # type: ignore[misc]  # without Lightning it is Any
    """A linear model on random data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch of this step's own."""
        seed = self.global_step * self.trainer.world_size + self.global_rank
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)).to(self.device)
        return F.mse_loss(self.linear(inputs), inputs.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As always."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class StopAfterStep(Callback):  # type: ignore[misc]
    """Saves and ends when the job is told to stop."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Replace Lightning's handler of TERM, which would start a collective in the middle of a step."""
        self.flag = StopFlag()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        """After the step."""
        if self.flag.agreed(module.device):
            trainer.save_checkpoint(run_dir() / "stopped.ckpt")  # rank 0 writes, all wait
            trainer.print(f"Stopped after step {trainer.global_step}")
            self.flag.end()


def main() -> None:
    """Train, from where it was stopped."""
    seed_everything(1)
    local_ranks, ranks = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    is_srun = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    trainer = Trainer(
        devices=local_ranks,
        num_nodes=ranks // local_ranks,
        strategy="ddp",
        plugins=[SLURMEnvironment(auto_requeue=False)] if is_srun else None,
        callbacks=[StopAfterStep()],
        default_root_dir=run_dir(),
        max_steps=40,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model, path = Model(), run_dir() / "stopped.ckpt"
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(20)))
    trainer.fit(model, loader, ckpt_path=path if path.exists() else None)
    trainer.print(f"Done: {trainer.global_step} steps, weights {model.linear.weight.sum().item():.9f}")


if __name__ == "__main__":
    main()
