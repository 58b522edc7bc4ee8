"""The tests' processes leave out torch.compile's tracer, and train as they would with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

TRAINING = """
import json, sys
import torch
import cluster_ddp

def train(world, change=lambda step: step):
    torch.manual_seed(1)
    model = world.wrap(torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss = change(lambda samples: model(samples).square().sum())
    for _ in range(3):
        optimizer.zero_grad()
        loss(torch.rand(4, 3)).backward()
        assert torch.is_grad_enabled()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]

torch.use_deterministic_algorithms(True)
with cluster_ddp.distributed(cuda=False) as world:
    plain, is_there = train(world), "torch._dynamo" in sys.modules
    compiled = train(world, lambda step: torch.compile(step, backend="eager"))
    again, counts = train(world), dict(torch._dynamo.utils.counters["frames"])
    is_told = torch._inductor.config.deterministic
    print(json.dumps([is_there, counts["ok"] > 0 and is_told, plain, compiled, again]))
"""


def trained(path: str) -> list[object]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING], env={**env, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.full
def test_a_training_needs_no_tracer_until_it_compiles() -> None:
    is_there, has_compiled, *weights = trained(os.environ["PYTHONPATH"])
    assert (is_there, has_compiled) == (False, True)
    assert trained("") == [True, True, *weights]
    assert weights[0] == weights[2]
