"""Files are saved when connections have taken all descriptors; the limit is raised as far as it goes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from slowness import LIMIT_S, scaled, wait_until

import cluster_ddp

JOB_ID = job_ids()

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
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, every="5steps", keep=2, model=model)
        for epoch in checkpoint.epochs(1):
            for (samples,) in shard:
                checkpoint._folder.writer.wait()
                try:
                    while True:
                        taken.append(socket.socket())
                except OSError as error:
                    assert error.strerror == "Too many open files"
                checkpoint.run_dir.log("train", {"step": checkpoint.steps})
                checkpoint.step()
        print("all steps made with", len(taken), "sockets", flush=True)
"""


@pytest.mark.fault(
    "connections use up rank 0's file descriptors",
    "saves succeed, from the first on: four descriptors are reserved for them. At the start, the soft limit is raised "
    "to the hard limit, 65,536 at most",
    also=("test_two_thousand_strangers_at_the_store",),
)
@pytest.mark.parametrize("has_restarted", [pytest.param(False, marks=pytest.mark.full), True])
def test_all_is_saved_without_a_free_descriptor(tmp_path: Path, has_restarted: bool) -> None:
    (tmp_path / "run").mkdir()
    if has_restarted:
        (tmp_path / "run" / ".start").write_text('{"job": "", "start": 1}\n')
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "CLUSTER_DDP_START": "1"}
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), str(tmp_path / "run"), "100"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("300 300\n")
    assert int(done.stdout.split()[-2]) > 200
    assert "failed" not in done.stderr
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000015.pt", "step-00000020.pt"]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] != "steps"] == list(range(20))


STRANGERS = """
import pathlib, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (2100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
folder = pathlib.Path(sys.argv[1])
while not (folder / "port").exists():
    time.sleep(0.05)
address = ("127.0.0.1", int((folder / "port").read_text()))
connections = [socket.socket() for _ in range(2000)]
for one in connections:  # those that are not accepted wait in the kernel's queue
    one.setblocking(False)
    one.connect_ex(address)
(folder / "connected").touch()
sys.stdin.read()
"""


def has_a_free_descriptor() -> bool:
    try:
        os.close(os.dup(0))
    except OSError:
        return False
    return True


def train_beside_strangers() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    folder = Path(os.environ["FOLDER"])
    with cluster_ddp.distributed(cuda=False) as world:
        model = world.wrap(torch.nn.Linear(2, 1))
        shard = world.shard(torch.utils.data.TensorDataset(torch.rand(80, 2)), batch_size=4)
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, every="1steps", keep=20, model=model)
        if world.rank == 0:
            store = torch.distributed.distributed_c10d._get_default_store()
            while isinstance(store, torch.distributed.PrefixStore):
                store = store.underlying_store
            (folder / "new port").write_text(str(store.port))
            (folder / "new port").rename(folder / "port")
        wait_until((folder / "connected").exists)
        if world.rank == 0:
            wait_until(lambda: not has_a_free_descriptor())
        for _ in checkpoint.epochs(1):
            for (samples,) in shard:
                model(samples)
                checkpoint.step()
                checkpoint._saver.wait()
            if world.rank == 0:
                with pytest.raises(OSError, match="Too many open files"):
                    os.dup(0)
        world.print(f"the ranks' sum is {world.sum(world.rank):g}")


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2100, reason="too few open files allowed here")
def test_two_thousand_strangers_at_the_store(tmp_path: Path) -> None:
    """More connections than rank 0 may open files: every save is made, and the ranks exchange what they have."""
    (tmp_path / "logs").mkdir()
    run_dir = {"CLUSTER_DDP_RUN_DIR": str(tmp_path / "run"), "FOLDER": str(tmp_path)}
    strangers = subprocess.Popen([sys.executable, "-c", STRANGERS, tmp_path], stdin=subprocess.PIPE)
    try:
        steps = [slurm_step(rank, 2, job_id=JOB_ID, **run_dir) for rank in range(2)]
        ends = run_ranks(train_beside_strangers, steps, tmp_path / "logs")
    finally:
        strangers.kill()
        strangers.communicate()
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert "the ranks' sum is 1\n" in ends[0].output
    assert "failed" not in ends[0].output
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*.pt"))) == 10
