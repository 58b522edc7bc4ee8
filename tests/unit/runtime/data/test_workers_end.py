"""A process whose loader has workers ends, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from torch.utils.data import Dataset
import cluster_ddp

class Numbers(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor([float(index)])

def main():
    global shard
    with cluster_ddp.distributed(cuda=False) as world:
        options = dict(num_workers={workers}, persistent_workers={persist})
        shard = world.shard(Numbers(), batch_size=8, shuffle_seed=1, **options)
        for number, batch in enumerate(shard):
            if number == 3 and "{ending}" == "raises":
                raise ValueError("the one that matters")
            if number == 3 and "{ending}" == "exits":
                sys.exit(75)
    print("left", len(list(shard)))

{call}
"""


@pytest.mark.parametrize(("ending", "status"), [("succeeds", 0), ("raises", 1), ("exits", 75)])
@pytest.mark.parametrize(("workers", "persist"), [(1, True), (2, False)])
@pytest.mark.parametrize("call", ["main()", "import builtins; builtins.kept = main; main()"], ids=["plain", "kept"])
def test_it_ends(tmp_path: Path, ending: str, status: int, workers: int, persist: bool, call: str) -> None:
    """At the top level a shard lives to the end of the interpreter, which waits for workers that ignore TERM."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(workers=workers, persist=persist, ending=ending, call=call))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert done.stdout == ("left 8\n" if status == 0 else "")
    assert done.stderr.count("ValueError: the one that matters") == (1 if ending == "raises" else 0)


GIVEN_UP = """
import time
import torch
from torch.utils.data import Dataset
import cluster_ddp

class Slow(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        time.sleep(600 * index)
        return torch.tensor([float(index)])

with cluster_ddp.distributed(cuda=False) as world:
    shard = world.shard(Slow(), batch_size=1, num_workers=1, persistent_workers=False)
    for batch in shard:
        break
del shard, batch
print("given up", flush=True)
"""


def test_a_worker_that_torch_gave_up_is_ended_too(tmp_path: Path) -> None:
    """It is busy for longer than the 5 s that torch waits for it, and ignores the TERM after that."""
    script = tmp_path / "script.py"
    script.write_text(GIVEN_UP)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr
