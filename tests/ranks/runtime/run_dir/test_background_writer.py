"""What is not on disk when a training ends: tried again, and an error where it is lost. Disks are full for real."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import run_ranks
from slowness import LIMIT_S, scaled

import cluster_ddp
from cluster_ddp.jobs.status import RunStatus, run_statuses

# A training of which rank 0's files may have FREE bytes each, until the folder has a file named "room".
TRAINING = """
    import os, resource, sys, threading, time
    from pathlib import Path
    import torch
    import cluster_ddp
    from cluster_ddp.runtime.run_dir import background_writer

    free, patience_s, steps, every, folder = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    background_writer.PATIENCE_S, background_writer._EVERY_S = patience_s, 0.2
    os.environ["CLUSTER_DDP_RUN_DIR"] = folder
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def make_room():
        while not Path(folder, "room").exists():
            time.sleep(0.05)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    with cluster_ddp.distributed(cuda=False) as world:
        model = world.wrap(torch.nn.Linear(1000, 10))
        shard = world.shard(torch.utils.data.TensorDataset(torch.rand(4 * steps, 1000)), batch_size=4)
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, every=every, model=model)
        threading.Thread(target=make_room, daemon=True).start()
        for epoch in checkpoint.epochs(1):
            for (samples,) in shard:
                if shard.step == steps // 2:
                    checkpoint._folder.writer.wait()
                    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
                checkpoint.run_dir.log("train", {"step": checkpoint.steps, "text": "x" * 100})
                checkpoint.step()
        print("all steps made", flush=True)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(free: int, patience_s: float, *, steps: int = 10, every: str = "5steps") -> subprocess.Popen[str]:
        # (Coverage's data would not fit on the disk either.)
        foreign = ("SLURM_", "CLUSTER_DDP_", "COVERAGE_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        options = [str(free), str(patience_s), str(steps), every, str(tmp_path / "run")]
        command = [sys.executable, "-c", textwrap.dedent(TRAINING), *options]
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=scaled(LIMIT_S))[0]


def steps_of(folder: Path) -> list[int]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if record.get("kind") != "steps"]


@pytest.mark.fault(
    "disk full during a save",
    "a message; training continues, the last good checkpoint stays, and the next save is tried. When training has "
    "ended, unwritten data is retried, with a message; then an error names what is lost (status 1; our training: 2)",
    bound="10 min at the end",
    also=("test_a_full_disk",),
)
def test_a_disk_that_stays_full_ends_in_an_error(tmp_path: Path, start: Start) -> None:
    """What is saved, what is lost and what to do are said; the training did not wait for the disk."""
    process = start(5000, patience_s := round(scaled(5)))
    words = said(process)
    assert process.returncode == 1
    assert "all steps made" in words and "Traceback" not in words
    assert "The training has ended, but: " in words and f"Trying again, for {patience_s} s at most." in words
    assert words.count("Saving the checkpoint") == 2  # after the last batch, and in the end; not for every try
    lost = words[words.index("error: Writing what is left at the end of the training:") :]
    run = tmp_path / "run"
    assert f"{run}/checkpoints/step-00000010.pt is not saved: File too large" in lost
    assert f"the last good one is {run}/checkpoints/step-00000005.pt" in lost
    assert "Hint: " in lost
    assert [path.name for path in run.glob("checkpoints/*")] == ["step-00000005.pt"]


@pytest.mark.parametrize("every", ["5steps", pytest.param("never", marks=pytest.mark.full)])
def test_metrics_that_are_not_written_are_an_error(tmp_path: Path, start: Start, every: str) -> None:
    process = start(700, 2, every=every)
    words = said(process)
    assert process.returncode == 1
    assert f"{tmp_path}/run/metrics.jsonl lacks its last" in words[words.index("error: Writing what is left") :]


@pytest.mark.parametrize("free", [700, pytest.param(5000, marks=pytest.mark.full)])
def test_room_that_is_made_in_time_is_used(tmp_path: Path, start: Start, free: int) -> None:
    process = start(free, 100)
    assert process.stdout is not None
    words = ""
    while "Trying again" not in words:
        words += process.stdout.readline()
    # Its own words may be on the full disk. `status` sees it from outside.
    while (seen := statuses(tmp_path)[0].full_disk) is None:
        assert process.poll() is None
    assert re.search(r"the training has ended, and waits until \d\d:\d\d:\d\d to write its last files", seen)
    (tmp_path / "run" / "room").touch()
    words += said(process)
    assert process.returncode == 0, words
    assert steps_of(tmp_path / "run") == list(range(10))
    assert (tmp_path / "run" / "checkpoints" / "step-00000010.pt").exists()
    assert statuses(tmp_path)[0].full_disk is None


def statuses(folder: Path) -> list[RunStatus]:
    return run_statuses(folder, [])


def a_refused_training_and_another_one() -> None:
    folder = Path(os.environ["FOLDER"])
    for name in ("refused", "other"):
        with contextlib.suppress(ValueError), cluster_ddp.distributed(cuda=False) as world:
            run_dir = cluster_ddp.RunDir(folder / name, world)
            if name == "refused":
                raise ValueError("as in a cell of a notebook")
            run_dir.log("train", {"step": 1})


def test_a_training_leaves_the_files_of_a_refused_one_alone(tmp_path: Path) -> None:
    """Both in one process. The first one's directory has records of an earlier run."""
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "metrics.jsonl").write_text("{}\n")
    (end,) = run_ranks(a_refused_training_and_another_one, [{"FOLDER": str(tmp_path)}], tmp_path)
    assert end.exit_code == 0, end
    assert (tmp_path / "refused" / "metrics.jsonl").read_text() == "{}\n"
    assert '"step": 1' in (tmp_path / "other" / "metrics.jsonl").read_text()
