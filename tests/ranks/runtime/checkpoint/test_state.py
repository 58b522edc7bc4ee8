"""What ranks give to a checkpoint, and what loading one takes of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from slowness import LIMIT_S, scaled

import cluster_ddp
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.state import TrainingState
from cluster_ddp.runtime.run_dir.run_dir import RunDir

pytestmark = pytest.mark.full

JOB_ID = job_ids()


class WithBuffers(torch.nn.Module):
    """A large buffer that is the same on all ranks, a small one that is not, and one that is not saved."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("same", torch.arange(50_000.0))
        self.register_buffer("own", torch.tensor(float(rank)))
        self.register_buffer("passing", torch.tensor(float(rank)), persistent=False)


def note_reading(path: Path, digest: str) -> None:
    print("reads all of it", flush=True)


def save_buffers() -> None:
    checkpoint_file.not_as_chosen = note_reading  # type: ignore[assignment]
    with cluster_ddp.distributed(cuda=False) as world:
        model = world.wrap(WithBuffers(world.rank))
        model.module.own.fill_(world.rank)  # DDP has made it rank 0's
        run_dir = RunDir(Path(os.environ["RUN"]), world)
        checkpoint = cluster_ddp.Checkpointer(world, run_dir=run_dir, model=model, every="1steps")
        if "RESUMED" in os.environ:
            print(json.dumps({"own": model.module.own.item(), "same": model.module.same.sum().item()}))
            return
        for _ in checkpoint.until(1):
            checkpoint.step()


def test_of_buffers_only_those_that_differ_are_gathered(tmp_path: Path) -> None:
    env = {"RUN": str(tmp_path / "run")}
    steps = [slurm_step(rank, 3, job_id=JOB_ID, **env) for rank in range(3)]
    ends = run_ranks(save_buffers, steps, tmp_path)
    assert [end.exit_code for end in ends] == [0, 0, 0], ends
    saved = checkpoint_file.read(tmp_path / "run" / "checkpoints" / "step-00000001.pt")
    gathered = [{part: sorted(buffers) for part, buffers in rank["buffers"].items()} for rank in saved["ranks"]]
    assert gathered == [{"model": []}, {"model": ["own"]}, {"model": ["own"]}]
    again = {"RESUMED": "1", "SLURM_JOB_ID": str(JOB_ID + 1)}
    steps[2]["SLURM_LOCALID"] = "0"  # as if on a second node
    ends = run_ranks(save_buffers, [step | again for step in steps], tmp_path)
    # One rank of each node compares the digest; rank 0 has it from choosing.
    assert ["reads all of it" in end.output for end in ends] == [False, False, True]
    assert [end.exit_code for end in ends] == [0, 0, 0], ends
    found = [json.loads(end.output.splitlines()[-1]) for end in ends]
    assert found == [{"own": rank, "same": torch.arange(50_000.0).sum().item()} for rank in range(3)]


PEAK = """
import sys
import torch
import cluster_ddp
from cluster_ddp.runtime.run_dir.run_dir import RunDir
from pathlib import Path

MB = int(sys.argv[2])

def peak_mb():
    # Not ru_maxrss, which begins with that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024

with cluster_ddp.distributed(cuda=False) as world:
    width = round((MB * 1e6 / 4 / 3 / 8) ** 0.5)
    model = world.wrap(torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(8))))
    optimizer = torch.optim.Adam(model.parameters())
    resumed = Path(sys.argv[1], "checkpoints").exists()
    # What the model and its gradient buckets take is there in any case.
    before = peak_mb()
    checkpoint = cluster_ddp.Checkpointer(
        world, run_dir=RunDir(Path(sys.argv[1]), world), model=model, optimizer=optimizer, every="1steps"
    )
    if resumed:
        print((peak_mb() - before) / MB)
    else:
        for _ in checkpoint.until(1):
            model(torch.rand(1, width)).sum().backward()
            optimizer.step()
            checkpoint.step()
"""


def test_loading_takes_little_more_memory_than_what_is_loaded(tmp_path: Path) -> None:
    """Of model and Adam's state, 150 MB: the file is mapped, and read part by part. Read at once it took 1.23 of it.

    Two thirds are the optimizer's own new state. The memory for copies comes with the first step.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    command: list[Any] = [sys.executable, "-c", PEAK, tmp_path / "run", "150"]
    subprocess.run(command, env={**env, "OMP_NUM_THREADS": "1"}, check=True, timeout=scaled(LIMIT_S))
    done = subprocess.run(
        command, env={**env, "OMP_NUM_THREADS": "1"}, check=True, timeout=scaled(LIMIT_S), stdout=subprocess.PIPE
    )
    assert 0.1 < float(done.stdout.splitlines()[-1]) < 0.9


@pytest.mark.parametrize(
    ("epoch", "seen", "words"),
    [
        (1, 20, "step 30, epoch 2, 20 of its 40 samples seen"),
        (2, 0, "step 30, after epoch 2"),
        (0, 0, "step 30, epoch 1, 0 of its 40 samples seen"),
    ],
)
def test_the_end_of_an_epoch_is_no_place_in_one_that_may_not_come(epoch: int, seen: int, words: str) -> None:
    state: Any = SimpleNamespace(steps=30, epoch=epoch, shards=[SimpleNamespace(seen=seen, size=40)])
    assert TrainingState.place_in_words(state) == words
