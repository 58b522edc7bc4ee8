"""Files are saved when connections have taken all descriptors; the limit is raised as far as it goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

TRAINING = """
    import os, resource, socket, sys
    import torch
    import cluster_ddp

    os.environ["CLUSTER_DDP_RUN_DIR"] = sys.argv[1]
    soft = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, max(soft, 300)))
    taken = []
    with cluster_ddp.distributed(cuda=False) as world:
        print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
        model = world.wrap(torch.nn.Linear(2, 1))
        shard = world.shard(torch.utils.data.TensorDataset(torch.rand(80, 2)), batch_size=4)
        checkpoint = cluster_ddp.Checkpoint(world, shard=shard, every="5steps", keep=2, model=model)
        for epoch in checkpoint.epochs(1):
            for (samples,) in shard:
                checkpoint._folder.wait()
                try:
                    while checkpoint.steps > 5:  # before, torch imports what it needs to save
                        taken.append(socket.socket())
                except OSError as error:
                    assert error.strerror == "Too many open files"
                checkpoint.run_dir.log("train", {"step": checkpoint.steps})
                checkpoint.step()
        print("all steps made with", len(taken), "sockets", flush=True)
"""


def test_all_is_saved_without_a_free_descriptor(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), str(tmp_path / "run"), "100"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("300 300\n")
    assert int(done.stdout.split()[-2]) > 200
    assert "failed" not in done.stderr
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000015.pt", "step-00000020.pt"]
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == list(range(20))
