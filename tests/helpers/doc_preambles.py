"""Names that the Python blocks of the documentation use and a reader has: a model, a dataset, an evaluation."""

from __future__ import annotations

FOR_ALL = """
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import cluster_ddp


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))

    def forward(self, images):
        return self.layers(images)


dataset = TensorDataset(torch.rand(256, 1, 28, 28), torch.randint(10, (256,)))
weights = torch.ones(len(dataset))
optimizer = torch.optim.SGD(MyModel().parameters(), lr=0.1)
correct, seen = 1, 2
"""

IN_A_WORLD = """
model = world.wrap(MyModel())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shard = world.shard(dataset, batch_size=16, shuffle_seed=1)
test_shard = world.shard(dataset, batch_size=64)
"""
"""Before the blocks of a page that have a `world` and do not make it."""

_CHECKPOINT = """
checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir="runs/fit-12", model=model, optimizer=optimizer)
"""

OF_PAGE = {
    "docs/how-to/gradient-accumulation.md": _CHECKPOINT,
    "docs/how-to/evaluate.md": _CHECKPOINT,
    "docs/how-to/own-script.md": _CHECKPOINT + "epoch, loss, accuracy = 0, torch.ones(()), 0.5\n",
    "docs/how-to/large-model.md": "from gpt_fsdp import GPT, Block\n",
    "docs/how-to/whole-training.md": """
import char_lm

characters, train_set, _ = char_lm.load(None)
shard = world.shard(train_set, batch_size=64, shuffle_seed=1)
model, identity = world.wrap(char_lm.CharModel(len(characters))), {"characters": characters}
checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir="runs/char_lm-12", model=model, identity=identity)
for _ in checkpoint.epochs(1):
    for _ in shard:
        checkpoint.step()
    checkpoint.best("loss", 1.0, mode="min")
""",
    "docs/how-to/requeue.md": """
import math

epochs = 6


def evaluate(model):
    return 0.5
""",
    "docs/how-to/streams.md": """
Path("data").mkdir()
Path("data/train.jsonl").write_text("".join(f"{list(range(number))}\\n" for number in range(1, 17)))
""",
    "docs/how-to/your-data.md": """
import torchvision

Path("data/train").mkdir(parents=True)
for number in range(20):
    torchvision.io.write_png(torch.randint(256, (3, 8, 8), dtype=torch.uint8), f"data/train/{number}.png")
""",
    # Slurm is planned for, but not asked: what a job answers is made up.
    "docs/how-to/notebooks.md": """
from unittest.mock import create_autospec

from cluster_ddp import submit_api


def submitted(spec, function_or_command=None):
    assert str(submit_api._plan(spec, function_or_command, must_run=False))
    return create_autospec(cluster_ddp.Job, instance=True)


cluster_ddp.submit = submitted
""",
}
"""What a page needs more."""
