"""Hugging Face Accelerate in a job. It stops after a step and resumes there, exactly.

cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/interop/accelerate_loop.py

- Output: save_state writes a folder where you say, here into the run directory.
- Requeue: by the batch script, at status 75. Accelerate handles no signals.
- The place in the DataLoader is yours to keep: `skip_first_batches`, and `set_epoch` for the shuffling.
- `accelerate launch` is not needed: under torchrun and srun Accelerate reads RANK and WORLD_SIZE.
- Without a GPU say `cpu=True`: otherwise each rank silently trains alone.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from stop_flag import StopFlag, run_dir
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2


def main() -> None:
    """Train a linear model on random data."""
    set_seed(1)  # before the model and the data: the same on all ranks
    shuffled = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=shuffled)
    flag = StopFlag()
    inputs = torch.randn(640, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    linear = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(linear, optimizer, loader)
    step = 0
    if saved := sorted(run_dir().glob("step-*[0-9]")):
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.removeprefix("step-"))
        accelerator.print(f"Resuming at step {step}")
    for epoch in range(step // len(loader), EPOCHS):
        loader.set_epoch(epoch)  # the order of its samples
        for batch, targets in skip_first_batches(loader, step % len(loader)):
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(batch), targets))
            optimizer.step()
            step += 1
            if flag.agreed(accelerator.device):
                save(accelerator, step)
                accelerator.print(f"Stopped after step {step}")
                flag.end()
        save(accelerator, step)
    accelerator.print(f"Done: {step} steps, weights {linear.weight.sum().item():.9f}")
    accelerator.end_training()


def save(accelerator: Accelerator, step: int) -> None:
    """Save a whole folder or none: it gets its name at the end. Old ones stay; they are small here."""
    folder = run_dir() / f"step-{step:08d}"
    accelerator.save_state(f"{folder}.new")  # every rank writes its random number generators there
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folder.with_suffix(".new").rename(folder)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
