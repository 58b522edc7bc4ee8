"""The run directory: no record twice, none lost, none torn."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from ranks import TORCHRUN, run_ranks
from slowness import LIMIT_S, scaled

import cluster_ddp
from cluster_ddp.errors import RunDirError, SpecError
from cluster_ddp.run.names import RECORDS_VERSION
from cluster_ddp.runtime.run_dir import background_writer, fenced_writes, metrics
from cluster_ddp.runtime.run_dir.metrics import set_aside
from cluster_ddp.runtime.run_dir.run_dir import RunDir, default_run_dir
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.topology import Topology


def a_world(rank: int = 0, **more: int) -> World:
    place: dict[str, Any] = {"launcher": "manual", "rank": rank, "local_rank": rank, "world_size": 2, **more}
    topology = Topology(**place, master_addr="localhost", port_candidates=(1,))
    return World(topology=topology, device=torch.device("cpu"))


def steps(folder: Path, name: str = "metrics.jsonl") -> list[int]:
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def test_what_a_killed_run_has_left_half_written_is_removed(tmp_path: Path) -> None:
    """By the next run, once nobody else can be in the directory. (A requeued job left `..progress.….tmp` for ever.)"""
    leftover = tmp_path / "..progress.810debcf.tmp"
    leftover.touch()
    RunDir(tmp_path, a_world(rank=1))
    assert leftover.exists()
    RunDir(tmp_path, a_world())
    assert not leftover.exists()


def record(run_dir: RunDir, *numbers: int) -> None:
    for number in numbers:
        run_dir.log("train", {"step": number})
    written(run_dir)


def written(run_dir: RunDir) -> str | None:
    """Wait until all is written, or has failed; what is not on disk then."""
    return run_dir._metrics.finish(60)


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """No world of another test waits for these files."""
    monkeypatch.setattr(background_writer, "_files", [])


def test_records_are_lines_with_kind_and_time(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "new" / "run", a_world())
    run_dir.log("train", {"step": 1, "loss": 0.5, "text": "ü\n"})
    written(run_dir)
    (line,) = (run_dir.path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found.pop("time") > 1.7e9
    assert found == {"kind": "train", "version": 1, "restart": 0, "step": 1, "loss": 0.5, "text": "ü\n"}


def test_only_rank_0_touches_the_folder(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run", a_world(1))
    run_dir.log("train", {"step": 1})
    run_dir.continue_metrics(10)
    run_dir.describe(None)
    run_dir.save("x.pt", {})
    run_dir.sync()
    assert not (tmp_path / "run").exists()


def test_after_a_checkpoint_records_are_made_anew(tmp_path: Path) -> None:
    first = RunDir(tmp_path, a_world())
    record(first, 1, 2)
    size = first.metrics_bytes
    assert size == (tmp_path / "metrics.jsonl").stat().st_size
    record(first, 3, 4)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "tr')  # killed in the middle of a line
    second = RunDir(tmp_path, a_world())
    second.continue_metrics(size)
    assert steps(tmp_path) == [1, 2] and second.metrics_bytes == size
    record(second, 30, 40)
    assert steps(tmp_path) == [1, 2, 30, 40]
    assert [path.name for path in tmp_path.glob("metrics*")] == ["metrics.jsonl"]


def test_a_line_torn_before_the_checkpoint_is_said_and_spoils_no_other(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    """Where the disk was full, the file can be shorter than the checkpoint says, and end within a record."""
    first = RunDir(tmp_path, a_world())
    record(first, 1, 2, 3)
    size = first.metrics_bytes
    os.truncate(tmp_path / "metrics.jsonl", size - 10)
    second = RunDir(tmp_path, a_world())
    second.continue_metrics(size)
    assert "metrics.jsonl has lost the last" in said.text
    record(second, 4)
    assert steps(tmp_path) == [1, 2, 4]


def test_a_lost_file_is_begun_anew(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    run_dir = RunDir(tmp_path, a_world())
    run_dir.continue_metrics(100)
    record(run_dir, 1)
    assert "metrics.jsonl has lost the last 100 bytes" in said.text
    assert steps(tmp_path) == [1]


class FullDisk:
    """Takes a number of bytes, then no more, for writes with os.pwrite."""

    def __init__(self, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.pwrite = free, os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, descriptor: int, data: bytes, offset: int) -> int:
        if not self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[: self.free]
        self.free -= len(data)
        return self.pwrite(descriptor, data, offset)


@pytest.mark.parametrize("free", [0, 1, 30, 75])
def test_what_a_full_disk_does_not_take_is_written_later(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    run_dir = RunDir(tmp_path, a_world())
    record(run_dir, 1)
    disk = FullDisk(free, monkeypatch)
    record(run_dir, *range(2, 8))
    (error,) = said.records  # once, not for every record
    assert error.levelno == logging.ERROR and "metrics.jsonl failed: No space left on device" in error.getMessage()
    size = run_dir.metrics_bytes
    assert size > (tmp_path / "metrics.jsonl").stat().st_size
    disk.free = 1 << 20
    record(run_dir, 8)
    assert steps(tmp_path) == list(range(1, 9))
    assert run_dir.metrics_bytes == (tmp_path / "metrics.jsonl").stat().st_size
    disk.free = 0
    record(run_dir, 9)
    assert len(said.records) == 2  # full again is said again


def test_records_before_a_checkpoint_survive_a_disk_that_was_full_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint counts them, so they must be there when it is: a resumed run would go on without them."""
    run_dir = RunDir(tmp_path, a_world())
    record(run_dir, 1)
    with monkeypatch.context() as patch:
        FullDisk(10, patch)
        record(run_dir, 2)
        size = run_dir.metrics_bytes
    try:
        run_dir.sync()  # there is space again: it is written; or else this fails, and with it the checkpoint
    except OSError:
        return
    assert (tmp_path / "metrics.jsonl").stat().st_size == size


def test_what_blocks_is_named_and_stops_no_training(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that hangs: the record is made, and the next ones."""
    run_dir = RunDir(tmp_path, a_world())
    has_returned, pwrite = threading.Event(), os.pwrite

    def blocked(*arguments: Any) -> int:
        assert has_returned.wait(60)
        return pwrite(*arguments)

    monkeypatch.setattr(background_writer, "_SLOW_S", 0.0)
    run_dir._metrics.writer._told_s = 0.0
    monkeypatch.setattr(os, "pwrite", blocked)
    run_dir.log("train", {"step": 1})
    for step in range(2, 100):
        run_dir.log("train", {"step": step})
    assert said.text.count(f"Still being written: {tmp_path}/metrics.jsonl, for 0 s. Does its file system hang?") >= 1
    assert run_dir._metrics.finish(0.1) == f"still being written: {tmp_path}/metrics.jsonl, for 0 s"
    size = run_dir.metrics_bytes
    has_returned.set()
    assert written(run_dir) is None
    assert steps(tmp_path) == list(range(1, 100))
    assert size == (tmp_path / "metrics.jsonl").stat().st_size


def test_records_that_wait_for_ever_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path, a_world())
    FullDisk(0, monkeypatch)
    monkeypatch.setattr(metrics, "_MAX_WAITING_BYTES", 1000)
    with pytest.raises(RunDirError, match=r"(?s)metrics.jsonl:\n.* bytes wait to be written: No space left on device"):
        for _ in range(100):
            record(run_dir, 1)


# What others do to the files of a run


def unlink(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.unlink()
    path.write_text("theirs\n")


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("missing")


def remove_all(path: Path) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.fault(
    "`metrics.jsonl` is removed or replaced during the training",
    "the next save logs a message and recreates it from the file that is still open; a replacement is set aside. On "
    "NFS (its error was a stand-in), earlier records may be lost: that save fails, the next one succeeds",
    bound="one save",
    also=("test_metrics_that_cannot_be_made_again_cost_one_checkpoint",),
)
@pytest.mark.parametrize("do", [unlink, replace, link, remove_all])
def test_metrics_that_others_remove_are_made_again(
    tmp_path: Path, said: pytest.LogCaptureFixture, do: Callable[[Path], None]
) -> None:
    run_dir = RunDir(tmp_path / "run", a_world())
    record(run_dir, 1, 2)
    path = run_dir.path / "metrics.jsonl"
    do(path)
    run_dir.log("train", {"step": 3})
    run_dir.sync()
    assert f"{path} was removed or replaced while this run wrote to it; it is made again." in said.text
    record(run_dir, 4)
    assert steps(run_dir.path) == [1, 2, 3, 4]
    assert run_dir.metrics_bytes == path.stat().st_size
    if do is replace:
        assert (run_dir.path / "metrics.1.jsonl").read_text() == "theirs\n"
    said.clear()
    run_dir.sync()
    assert not said.records
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700


def test_threads_that_find_it_made_again_at_the_same_time_write_on(tmp_path: Path) -> None:
    """The one that comes second must not look at what the first has closed."""
    run_dir = RunDir(tmp_path / "run", a_world())
    threads, before = 4, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(300):
                shutil.rmtree(run_dir.path)
                run_dir.path.mkdir()
                together = threading.Barrier(threads)

                def check(together: threading.Barrier = together) -> None:
                    together.wait()
                    fenced_writes.check()

                for one in [pool.submit(check) for _ in range(threads)]:
                    one.result()
    finally:
        sys.setswitchinterval(before)


def test_metrics_that_cannot_be_made_again_cost_one_checkpoint(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, what another node removed can't be read; a checkpoint must not count records that are lost."""
    run_dir = RunDir(tmp_path, a_world())
    record(run_dir, 1, 2)
    (tmp_path / "metrics.jsonl").unlink()

    def stale(*_: Any) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", stale)
        with pytest.raises(OSError, match="the records before are lost: Stale file handle"):
            run_dir.sync()
    record(run_dir, 3)
    run_dir.sync()
    assert steps(tmp_path) == [3]
    assert run_dir.metrics_bytes == (tmp_path / "metrics.jsonl").stat().st_size


def test_an_earlier_runs_records_are_set_aside_with_the_first_of_this(tmp_path: Path) -> None:
    for number in range(3):
        run_dir = RunDir(tmp_path, a_world())
        record(run_dir, number)
    assert steps(tmp_path) == [2]
    assert steps(tmp_path, "metrics.1.jsonl") == [0]
    assert steps(tmp_path, "metrics.2.jsonl") == [1]


def test_setting_aside_takes_the_next_free_number(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    set_aside(path)
    path.touch()
    set_aside(path)  # an empty one is nothing
    assert path.exists() and not said.records
    for text in ("a", "b"):
        path.write_text(text)
        set_aside(path)
    (tmp_path / "metrics.4.jsonl").write_text("d")
    path.write_text("c")
    set_aside(path)
    assert {p.name: p.read_text() for p in tmp_path.glob("metrics.*")} == {
        f"metrics.{number}.jsonl": text for number, text in ((1, "a"), (2, "b"), (3, "c"), (4, "d"))
    }
    for _ in range(2):
        folder.mkdir()
        set_aside(folder)
    assert sorted(p.name for p in tmp_path.glob("checkpoints*")) == ["checkpoints.1", "checkpoints.2"]
    assert "of an earlier run is now checkpoints.2." in said.text


def test_a_folder_that_cannot_be_written_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"(?s)Not a directory\..*--run-dir"):
        RunDir(tmp_path / "file" / "run", a_world())
    with pytest.raises(RunDirError, match=r"File exists"):
        RunDir(tmp_path / "file", a_world())


def test_what_ran_is_described(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Config:
        data_dir: Path = Path("data")

    RunDir(tmp_path, a_world()).describe(Config())
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["config"] == {"data_dir": "data"}
    assert found["topology"]["world_size"] == 2
    assert found["versions"]["cuda"] is None


@pytest.mark.full
def test_a_script_without_a_configuration_is_described(tmp_path: Path) -> None:
    """With its command, the versions, and the commit of its own checkout, not that of this package."""
    project = tmp_path / "a project"
    project.mkdir()
    (project / "t.py").write_text(
        "import cluster_ddp\nwith cluster_ddp.distributed() as world:\n    cluster_ddp.RunDir('../run', world)\n"
    )
    for words in (["init", "-q"], ["add", "t.py"], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qmx"]):
        subprocess.run(["git", *words], cwd=project, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=project, check=True, capture_output=True, text=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    subprocess.run([sys.executable, "t.py", "--lr", "1"], cwd=project, check=True, env=env)
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["command"] == ["t.py", "--lr", "1"]
    assert found["versions"].keys() >= {"cluster_ddp", "python", "torch"}
    assert found["git_commit"] == commit.stdout.strip()
    assert found["config"] == {}


def test_where_a_run_dir_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTER_DDP_RUN_DIR", raising=False)
    assert default_run_dir("digits", a_world(job_id=12)) == Path("runs/digits-12")
    assert default_run_dir("digits", a_world(job_id=14, array_job_id=12, array_task_id=3)) == Path("runs/digits-12_3")
    assert default_run_dir("digits", a_world()).name.startswith("digits-2")
    monkeypatch.setenv("SLURM_JOB_NAME", "fit/all")
    assert default_run_dir(None, a_world(job_id=12)) == Path("runs/fit_all-12")  # as squeue names the job
    assert default_run_dir(None, a_world(job_id=12, is_local=True)) == Path("runs/training-12")
    monkeypatch.setenv("CLUSTER_DDP_RUN_DIR", "/x/y")
    assert default_run_dir("digits", a_world(job_id=12)) == Path("/x/y")


def name_the_run_dir() -> None:
    """The clocks of the ranks' nodes are an hour apart."""
    os.environ.pop("CLUSTER_DDP_RUN_DIR", None)
    time.strftime = lambda form: f"20260101-{os.environ['RANK']}00000"  # type: ignore[assignment,misc]
    with cluster_ddp.distributed(cuda=False) as world:
        print(default_run_dir(None, world))


def test_outside_slurm_rank_0_names_the_run_directory(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    environments[0]["TORCHELASTIC_MAX_RESTARTS"] = "1"  # by a torchrun whose store can't be asked
    ends = run_ranks(name_the_run_dir, environments, tmp_path)
    first, second = (end.output.splitlines()[-1] for end in ends)
    assert first == second == "runs/training-20260101-000000"
    said = "torchrun's store does not answer: after a restart by torchrun, a run directory that you have not named"
    assert [said in end.output for end in ends] == [True, False]


RESTARTED = """
import os, signal, time
import torch, cluster_ddp

time.strftime = lambda form: f"2026010{1 + int(os.environ['TORCHELASTIC_RESTART_COUNT'])}-000000"
with cluster_ddp.distributed(cuda=False) as world:
    model = world.wrap(torch.nn.Linear(2, 1))
    checkpoint = cluster_ddp.Checkpointer(world, every="1steps", model=model)
    for done in checkpoint.until(4):
        model(torch.ones(1, 2)).sum().backward()
        checkpoint.step()
        if done == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            checkpoint._folder.writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_a_restart_of_the_same_torchrun_finds_its_run_directory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESTARTED)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    command = [sys.executable, *TORCHRUN, "--max-restarts=1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"Resuming from runs/{run_dir.name}/checkpoints/step-0000000" in done.stdout


@dataclasses.dataclass
class Patience:
    patience: float


def test_a_world_logs_to_its_newest_run_directory(tmp_path: Path) -> None:
    world = a_world(restart_count=2)
    with pytest.raises(
        SpecError, match=r"Logging a 'train' record:\n  there is no run directory yet.\n  Hint: make the Ch"
    ):
        world.log("train", loss=1)
    RunDir(tmp_path / "one", world)
    run_dir = RunDir(tmp_path / "two", world)
    world.log("train", epoch=1, loss=torch.tensor([0.5]), many=numpy.float32(2.5), lr=[0.1, 0.2], words="x")
    world.log("test", accuracy=1.0)
    run_dir.sync()
    record, other_record = map(json.loads, (tmp_path / "two" / "metrics.jsonl").read_text().splitlines())
    assert record.pop("time") > 1e9
    first = {"version": RECORDS_VERSION, "restart": 2}  # that of this start
    assert record == {"kind": "train", **first, "epoch": 1, "loss": 0.5, "many": 2.5, "lr": [0.1, 0.2], "words": "x"}
    assert other_record.keys() == {"kind", "time", "accuracy"}
    assert not (tmp_path / "one" / "metrics.jsonl").exists()
    other = a_world(rank=1)
    RunDir(tmp_path / "two", other)
    other.log("train", epoch=1)  # nothing


def strict(text: str) -> Any:
    """As readers that keep to RFC 8259 take it."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_number_that_json_does_not_have_is_null(tmp_path: Path) -> None:
    world, inf, nan = a_world(), math.inf, math.nan
    run_dir = RunDir(tmp_path, world)
    world.log("train", loss=nan, most=inf, tensor=torch.tensor(-inf), many=[1.0, numpy.float32(nan)], of={"a": inf})
    run_dir.sync()
    record = strict((tmp_path / "metrics.jsonl").read_text())
    assert [record[name] for name in ("loss", "most", "tensor", "many", "of")] == [
        *(None, None, None),
        [1.0, None],
        {"a": None},
    ]
    run_dir.describe(Patience(patience=inf))
    assert strict((tmp_path / "run.json").read_text())["config"] == {"patience": None}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": torch.zeros(2, 3)}, r"Logging a Tensor of shape \(2, 3\):\n  a record holds numbers, text"),
        ({"model": object()}, r"Logging a object:\n  a record holds"),
        ({"time": 3}, r"Logging 'time':\n  each record has one already.\n  Hint: another name: train_time"),
        ({"kind": 3}, r"Logging 'kind':"),
        ({"version": 3}, r"Logging 'version':"),
    ],
)
def test_what_a_record_cannot_hold_is_a_short_error(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    world = a_world()
    RunDir(tmp_path, world)
    with pytest.raises(SpecError, match=words):
        world.log("train", **values)
