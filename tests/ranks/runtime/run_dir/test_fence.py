"""A rank that lives on after a newer start of its job has taken the run directory: nothing that it writes counts."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import slurm_step
from slowness import LIMIT_S, scaled, wait_until

from cluster_ddp.errors import RunDirError
from cluster_ddp.run import fence
from cluster_ddp.run.files import is_at
from cluster_ddp.runtime.checkpoint import checkpoint_file, folder, restore
from cluster_ddp.runtime.checkpoint.checkpoint_file import DamagedError
from cluster_ddp.runtime.failure import sick_nodes, stacks
from cluster_ddp.runtime.profiling import node_usage
from cluster_ddp.runtime.run_dir import fenced_writes, start_log, tracker_thread
from cluster_ddp.runtime.run_dir.fenced_writes import RunLock
from cluster_ddp.runtime.run_dir.metrics import MetricsFile, set_aside
from cluster_ddp.slurm.topology import Topology

TRAINING = """
    import sys, torch, cluster_ddp
    with cluster_ddp.distributed(cuda=False) as world:
        checkpoint = cluster_ddp.Checkpointer(world, model=torch.nn.Linear(1, 1), every="1steps")
        print("joined", flush=True)
        for step in checkpoint.until(6):
            print("step", step, flush=True)
            if not sys.stdin.readline():
                break
            world.log("train", loss=step)
            checkpoint.step()
            checkpoint._saver.wait()
"""
TAKEN = "a newer start of this job has taken the run directory: start 1. This rank is of start 0: it ends."


def env_of(start: int, run_dir: Path, **more: str) -> dict[str, str]:
    place = slurm_step(0, 1, job_id=12, CLUSTER_DDP_START=str(start), CLUSTER_DDP_RUN_DIR=str(run_dir), **more)
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_"))} | place


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


Start = Callable[[int], "subprocess.Popen[bytes]"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (path := tmp_path / "it's a run").mkdir()
    return path


@pytest.fixture
def start(run_dir: Path) -> Iterator[Start]:
    """Starts rank 0, which trains a step for each line on its stdin, and whose output goes to task-0.log."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", textwrap.dedent(TRAINING)]
        with open(run_dir / "task-0.log", "ab") as log:
            env = env_of(number, run_dir)
            process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def said_soon(log: Path, line: str) -> None:
    deadline = time.monotonic() + scaled(60)
    while line not in log.read_text().splitlines():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def steps(process: subprocess.Popen[bytes], count: int) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n" * count)
    process.stdin.flush()


@pytest.mark.fault(
    "rank 0's node is cut off, and its processes keep writing",
    "the restarted ranks get the run directory's lock at once; the old rank ends at its next write; nothing that it "
    "writes counts (tested on one machine)",
    bound="one write",
)
@pytest.mark.quick
def test_what_a_zombie_writes_does_not_count_and_its_next_write_ends_it(run_dir: Path, start: Start) -> None:
    zombie = start(0)
    steps(zombie, 3)
    said_soon(log := run_dir / "task-0.log", "step 3")
    with open(log, "rb") as orphan:
        before = content(run_dir)
        fence.take_over(run_dir, "12", 1, logs=[log])
        assert content(run_dir) == {name: value for name, value in before.items() if name != ".lock"} | {
            ".start": b'{"job": "12", "start": 1}\n'
        }
        newer = start(1)
        newer.communicate(b"\n" * 3, timeout=scaled(LIMIT_S))
        assert newer.returncode == 0, log.read_text()
        assert "Waiting for the former run" not in log.read_text()
        assert [json.loads(line)["restart"] for line in (run_dir / "starts.jsonl").open() if '"start"' in line] == [
            0,
            1,
        ]
        after = content(run_dir)
        zombie.communicate(b"\n" * 3, timeout=scaled(LIMIT_S))
        assert content(run_dir) == after
        said = orphan.read().decode()
    assert zombie.returncode == 1
    assert "was removed or replaced" not in said
    assert f"error: Writing to the run directory {run_dir}:\n  {TAKEN}\n  Hint: nothing is to be done" in said


def dumped_stacks(run_dir: Path) -> None:
    held = stacks.StackFile(run_dir / "stack-rank1.txt")
    held.is_wanted = True
    held.close()


def metrics(run_dir: Path) -> None:
    (writing := MetricsFile(run_dir / "metrics.jsonl")).append(b"{}\n")
    writing.finish(scaled(10))
    writing.append(b"{}\n")


def tracker(run_dir: Path) -> None:
    records = SimpleNamespace(path=run_dir / "metrics.jsonl", written=3, is_continued=True)
    feeding = tracker_thread.Tracking([], run_dir, records, is_restart=True)
    events = SimpleNamespace(log=lambda points: (run_dir / "events").write_text("x"), close=list, upload="")
    feeding._trackers = {"x": events}  # type: ignore[dict-item]
    try:
        feeding._feed()
    finally:
        feeding.stop()


def usage(run_dir: Path) -> None:
    sampling = node_usage.Sampler(run_dir, Topology.from_environ(os.environ), os.environ)
    sampling.stop()


WRITERS: dict[str, Callable[[Path], object]] = {
    "a checkpoint": lambda run_dir: checkpoint_file.write(run_dir / "step.pt", {}),
    "the lock": lambda run_dir: RunLock(run_dir / ".lock", Topology.from_environ(os.environ)),
    "metrics": metrics,
    "another run's metrics": lambda run_dir: set_aside(run_dir / "metrics.jsonl"),
    "starts": lambda run_dir: start_log.note_end(run_dir, "x", state="COMPLETED", saved=True),
    "sick nodes": lambda run_dir: sick_nodes.note(os.environ, "node2", "x"),
    "usage": usage,
    "a tracker": tracker,
    "a damaged checkpoint": lambda run_dir: restore.put_aside({run_dir / "metrics.jsonl": DamagedError("x")}, None),
    "the newest checkpoint's name": lambda run_dir: folder.CheckpointFolder(run_dir, keep=1)._note_newest(run_dir),
    "stacks": dumped_stacks,
    "a tracker's id": lambda run_dir: tracker_thread._stored_id(run_dir),
}


@pytest.mark.parametrize("what", WRITERS)
def test_every_writer_is_refused_after_a_newer_start(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, what: str
) -> None:
    for name in ("metrics.jsonl", "starts.jsonl", "stack-rank1.txt"):
        (run_dir / name).write_text("{}\n")
    fence.take_over(run_dir, "12", 1)
    before = content(run_dir)
    for name, value in env_of(0, run_dir).items():
        monkeypatch.setenv(name, value)
    if what == "sick nodes":  # nothing is said where that can't be written
        WRITERS[what](run_dir)
    elif what == "usage":  # in a thread
        WRITERS[what](run_dir)
        wait_until(lambda: TAKEN in said.text)
    else:
        with pytest.raises(RunDirError, match="a newer start of this job"):
            WRITERS[what](run_dir)
    assert content(run_dir) == before
    monkeypatch.setenv("CLUSTER_DDP_START", "1")
    WRITERS[what](run_dir)
    assert content(run_dir) != before


def append(run_dir: Path) -> None:
    descriptor = fenced_writes.open_own(run_dir / "starts.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b"the older start's\n")
    os.close(descriptor)


def empty(run_dir: Path) -> None:
    os.close(fenced_writes.open_own(run_dir / "stack-rank1.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))


def publish(run_dir: Path) -> None:
    with fenced_writes.atomic_write(run_dir / "checkpoints" / "step.pt") as made:
        made.write(b"the older start's\n")


def publish_pieces(run_dir: Path) -> None:
    with fenced_writes.atomic_write(run_dir / "checkpoints" / "step.pieces" / "rank-1.pt") as made:
        made.write(b"the older start's\n")


AMID = [(append, 1), (append, 2), (empty, 1), (empty, 2), (publish, 1), (publish_pieces, 1)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("write", "check"), AMID)
def test_a_rank_that_is_held_up_amid_a_write_changes_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], check: int, when: str
) -> None:
    """Such as by a machine that sleeps: the newer start comes just before or after the rank has checked."""
    (run_dir / "checkpoints" / "step.pieces").mkdir(parents=True)
    for name in ("starts.jsonl", "stack-rank1.txt"):
        (run_dir / name).write_text("a line\n")
    for name, value in env_of(0, run_dir).items():
        monkeypatch.setenv(name, value)
    before, checks, refuse_older = content(run_dir), [], fence.refuse_older

    def held_up(path: Path, job: str, start: int) -> None:
        checks.append("before")
        if (len(checks), when) == (check, "before"):
            fence.take_over(run_dir, "12", 1)
        refuse_older(path, job, start)
        if (len(checks), when) == (check, "after"):
            fence.take_over(run_dir, "12", 1)

    monkeypatch.setattr(fence, "refuse_older", held_up)
    with contextlib.suppress(RunDirError, FileNotFoundError):
        write(run_dir)
    after = content(run_dir)
    assert after.pop(".start") and after == before


def test_stacks_of_an_older_start_that_come_late_are_no_part_of_the_newer_ones(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_dir / "stack-rank1.txt"
    older = stacks.StackFile(path)
    fence.take_over(run_dir, "12", 1)
    newer = stacks.StackFile(path)
    newer.write("the newer start's")
    before = path.read_bytes()
    older.write("the older start's")
    older.dump()
    older.is_wanted = False
    older.close()
    assert path.read_bytes() == before
    newer.close()
    assert not path.exists()


def test_records_of_an_older_start_are_refused_where_it_saves_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env_of(0, run_dir).items():
        monkeypatch.setenv(name, value)
    older = MetricsFile(run_dir / "metrics.jsonl")
    older.append(b"{}\n")
    assert older.finish(scaled(10)) is None
    fence.take_over(run_dir, "12", 1)
    older.append(b'{"late": 1}\n')
    with pytest.raises(RunDirError, match="a newer start of this job"):
        older.finish(scaled(10))
    with pytest.raises(RunDirError, match="a newer start of this job"):
        older.append(b"{}\n")
    assert (run_dir / "metrics.jsonl").read_bytes() == b"{}\n"


def test_the_run_directory_of_another_job_stays_as_it_is(run_dir: Path) -> None:
    """Two jobs were given the same one: the second one's ranks were refused, and are started again."""
    (run_dir / ".lock").write_text('{"job": "11"}\n')
    (run_dir / "metrics.jsonl").write_text("{}\n")
    (log := run_dir / "task-0.log").write_text("x\n")
    held = {path: os.open(path, os.O_RDONLY) for path in run_dir.iterdir()}
    fence.take_over(run_dir, "12", 1, logs=[log])
    assert {path.name: is_at(descriptor, path) for path, descriptor in held.items()} == {
        ".lock": True,
        "metrics.jsonl": True,
        "task-0.log": False,
    }
    for descriptor in held.values():
        os.close(descriptor)


def test_what_another_job_has_left_refuses_nobody(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was resumed as a new job, whose first start has number 0. Nor does what is damaged."""
    for name, value in env_of(0, run_dir).items():
        monkeypatch.setenv(name, value)
    for left in ('{"job": "11", "start": 3}', '{"job": "12"', "[]", '{"job": "12", "start": "x"}'):
        (run_dir / ".start").write_text(left)
        append(run_dir)
    assert (run_dir / "starts.jsonl").read_bytes().count(b"\n") == 4


def test_a_file_in_a_new_place_keeps_its_mode_and_no_link_is_followed(run_dir: Path) -> None:
    (run_dir / "starts.jsonl").write_text("x\n")
    (run_dir / "starts.jsonl").chmod(0o640)
    (run_dir / "precious").write_text("mine\n")
    (run_dir / "metrics.jsonl").symlink_to("precious")
    os.mkfifo(run_dir / "usage-0.jsonl")
    fence.take_over(run_dir, "12", 1, logs=[run_dir / "missing"])
    assert stat.S_IMODE((run_dir / "starts.jsonl").stat().st_mode) == 0o640
    assert (run_dir / "metrics.jsonl").is_symlink() and (run_dir / "precious").read_text() == "mine\n"
    assert (run_dir / "usage-0.jsonl").is_fifo()
