"""A collective that one rank alone calls, on this machine: whatever gloo does, both lines are named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from local_launch import launch
from ranks import TORCHRUN
from slowness import LIMIT_S, scaled

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import cluster_ddp

if __name__ == "__main__":
    who, size = map(int, sys.argv[1:3])
    with cluster_ddp.distributed(cuda=False) as world:
        net = torch.nn.Linear(3, 2)
        model, optimizer = world.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
        {steps}
            model(torch.ones(4, 3)).sum().backward()  # all ranks
            optimizer.step()
            {step}
            if world.rank == who:
                dist.all_reduce(torch.zeros(size))  # one rank
"""
WITHOUT = SCRIPT.format(steps="for step in range(9):", step="")
CHECKPOINTER = "checkpoint = cluster_ddp.Checkpointer(world, model=model, optimizer=optimizer)"
WITH = SCRIPT.format(
    steps=f"{CHECKPOINTER}\n        for step in checkpoint.until(9):",
    step="checkpoint.step()",
)


@pytest.mark.parametrize(
    ("script", "who", "size"),
    [
        (WITHOUT, 0, 1),
        pytest.param(WITH, 1, 1000, marks=pytest.mark.full),
        pytest.param(WITH, 0, 1, marks=pytest.mark.full),
        pytest.param(WITHOUT, 0, 1000, marks=pytest.mark.full),
        pytest.param(WITHOUT, 1, 1, marks=pytest.mark.full),
    ],
    ids=["rank 0, less", "a Checkpointer, rank 1, more", "a Checkpointer, rank 0", "rank 0, more", "rank 1, less"],
)
def test_a_collective_on_one_rank_is_named_with_both_lines(script: str, who: int, size: int, tmp_path: Path) -> None:
    """gloo aborts the rank that gets more than it waits for, in C++, within the first second and before any step."""
    path = tmp_path / "train.py"
    path.write_text(script)
    status, said = launch(tmp_path, "--", sys.executable, str(path), str(who), str(size), OMP_NUM_THREADS="1")
    lines = {line.partition("  # ")[2]: number for number, line in enumerate(script.splitlines(), 1)}
    verdict = re.search(r"Waiting for the other ranks in a collective:\n  (.*)\.\n  Hint: (.*)", said)
    assert status == 134 and verdict, said
    assert f"rank {who} on " in verdict[1] and f"train.py:{lines['one rank']})" in verdict[1], said
    assert f"train.py:{lines['all ranks']})" in verdict[1], said
    assert "is one of them inside `if world.is_main:`?" in verdict[2], said
    last = said.splitlines()[-1]
    assert last.startswith("Failed first, with status 134: rank ") and verdict[1] in last, said


@pytest.mark.full
def test_under_torchrun_the_rank_that_gloo_aborts_says_its_line(tmp_path: Path) -> None:
    """Without a run directory there is no verdict; torchrun may end the other rank before it has said anything."""
    path = tmp_path / "train.py"
    path.write_text(WITHOUT)
    command = [sys.executable, *TORCHRUN, str(path), "0", "1"]
    ended = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=scaled(LIMIT_S)
    )
    aborted = ended.stderr.partition("Fatal Python error: Aborted")[2].partition("Extension modules")[0]
    lines = [number for number, line in enumerate(WITHOUT.splitlines(), 1) if line.endswith((" rank", " ranks"))]
    assert any(f'train.py", line {number} in ' in aborted for number in lines), ended.stderr
