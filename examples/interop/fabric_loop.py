"""Lightning Fabric in a job. It stops after a step and resumes there, exactly.

cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/interop/fabric_loop.py

- Output: fabric.save writes where you say, here into the run directory.
- Requeue: by the batch script, at status 75. Fabric handles no signals.
- Fabric wants the numbers of devices and nodes told, under torchrun and srun, too: it shares samples by them.
- Fabric does not save the place in a DataLoader. Here a step's data follow from its number.
"""

import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from stop_flag import StopFlag, run_dir

STEPS = 40


def main() -> None:
    """Train a linear model on random data."""
    local_ranks, ranks = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    fabric = Fabric(accelerator="auto", strategy="ddp", devices=local_ranks, num_nodes=ranks // local_ranks)
    fabric.launch()
    flag = StopFlag()
    fabric.seed_everything(1)
    linear = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(linear, torch.optim.AdamW(linear.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    path = run_dir() / "fabric.ckpt"
    if path.exists():
        fabric.load(path, state)
        fabric.print(f"Resuming at step {state['step']}")
    while state["step"] < STEPS:
        generator = torch.Generator().manual_seed(state["step"] * fabric.world_size + fabric.global_rank)
        inputs = torch.randn(16, 8, generator=generator).to(fabric.device)
        optimizer.zero_grad()
        fabric.backward(F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)))
        optimizer.step()
        state["step"] += 1
        stop = flag.agreed(fabric.device)
        if stop or state["step"] % 20 == 0:
            fabric.save(path.with_suffix(".new"), state)  # rank 0 writes, all wait
            if fabric.is_global_zero:
                path.with_suffix(".new").replace(path)
        if stop:
            fabric.print(f"Stopped after step {state['step']}")
            flag.end()
    fabric.print(f"Done: {STEPS} steps, weights {linear.weight.sum().item():.9f}")


if __name__ == "__main__":
    main()
