"""`--hang-restart-s`: a rank that is busy in C code ends no start. test_hang_watch.py has real hangs."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import slurm_step
from slowness import stays, wait_until

from cluster_ddp import processes
from cluster_ddp.run.names import Env
from cluster_ddp.runtime.failure import hang_watch, last_progress, stacks
from cluster_ddp.runtime.failure.hang_verdict import Answer
from cluster_ddp.runtime.failure.hang_watch import HangWatch
from cluster_ddp.runtime.failure.stack_timer import StackTimer
from cluster_ddp.slurm.topology import Topology


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory. This rank has completed its last step some time ago, and waits for nobody."""
    monkeypatch.setattr(hang_watch, "_ANSWER_S", 0.0)
    monkeypatch.setattr(hang_watch, "_OTHERS_S", 0.0)
    monkeypatch.setattr(last_progress, "last_s", time.monotonic() - 60)
    monkeypatch.setattr(last_progress, "run_dir", None)
    monkeypatch.delenv(Env.RUN_DIR, raising=False)
    (path := tmp_path / "it's a run").mkdir()
    yield path


def watching(rank: int, ended: list[bool], *, warning_s: float = 0.1) -> HangWatch:
    """The watch of one of two ranks, without its thread; the other one is silent."""
    store, topology = dist.HashStore(), Topology.from_environ(slurm_step(rank, 2, job_id=1))
    limits = {"warning_s": warning_s, "timeout_s": 600.0, "restart_s": 0.0}
    return HangWatch(topology, lambda ask: ask(store), **limits, end=lambda is_over: ended.append(is_over()))


@pytest.mark.parametrize("seen", ["all files", "own file", "no run directory"])
def test_silent_ranks_end_a_start_only_where_their_files_would_say_that_they_are_busy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    if seen != "no run directory":
        monkeypatch.setenv(Env.RUN_DIR, str(folder))
    if seen == "all files":
        (folder / "stack-rank1.txt").write_text(f"{Answer(rank=1, host='node 1').text()}\n")
    ended: list[bool] = []
    watch = watching(0, ended)
    try:
        for _ in range(3):
            watch._look(time.monotonic())
        assert watch.silent == "rank 1 on node 1" if seen == "all files" else watch.silent.startswith("rank 1 on ")
        assert ended == ([False] if seen == "all files" else [])
    finally:
        watch._workers.close()
        if watch._file is not None:
            watch._file.close()


@pytest.mark.parametrize(("rank", "times"), [(0, 0), (1, 1)])
def test_one_rank_says_once_that_there_is_no_run_directory(
    folder: Path, capfd: pytest.CaptureFixture[str], rank: int, times: int
) -> None:
    watch = watching(rank, [], warning_s=0.0)
    for _ in range(3):
        watch._look(time.monotonic())
    watch._workers.close()
    assert capfd.readouterr().err.count("warning: --hang-restart-s 0 ends no start of this job") == times


def test_where_a_rank_is_stuck_is_written_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client may write half a minute late: by then the rank would count as gone."""
    files, synced = [], []
    monkeypatch.setattr(StackTimer, "set", lambda timer, timeout_s, file: files.append(file))
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(str(Path(f"/proc/self/fd/{file}").readlink())))
    monkeypatch.setenv(Env.RUN_DIR, str(folder))
    watch = watching(0, [])
    watch._look(time.monotonic())
    assert watch._file is not None and watch._answered_at == last_progress.last_s
    assert fcntl.fcntl(files[0], fcntl.F_GETFL) & os.O_DSYNC
    assert synced[0] == str(folder / "stack-rank0.txt")
    watch._workers.close()
    watch._file.close()


def test_a_full_disk_silences_no_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setenv(Env.RUN_DIR, str(folder))
    watch = watching(0, [])
    monkeypatch.setattr(stacks.StackFile, "dump", fail)
    watch._look(time.monotonic())
    assert watch.words
    watch._workers.close()
    assert watch._file is not None
    watch._file.close()


def test_a_suspension_is_no_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps while the watch waits for its next look."""
    watch, look, clock, looks = watching(0, [], warning_s=10.0), HangWatch._look, time.monotonic, list[float]()

    def counted(watch: HangWatch, now: float) -> None:
        look(watch, now)
        looks.append(watch._answered_at)
        last_progress.note_step()

    monkeypatch.setattr(HangWatch, "_look", counted)
    last_progress.note_step()
    watch.start()
    last_progress.note_step()
    try:
        wait_until(lambda: len(looks) > 1)
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 600)
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 2)
        assert {*looks} == {-1.0} and not watch.words
    finally:
        watch.stop()


def test_the_store_is_left_alone_while_all_ranks_begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of stacks is there at once."""
    monkeypatch.setenv(Env.RUN_DIR, str(folder))
    asked: list[object] = []
    topology = Topology.from_environ(slurm_step(1, 2, job_id=1))
    watch = HangWatch(topology, asked.append, warning_s=600.0, timeout_s=600.0)
    watch.start()
    try:
        wait_until((folder / "stack-rank1.txt").exists)
        stays(lambda: asked == [], 0.2)
    finally:
        watch.stop()


def test_a_suspension_while_a_rank_looks_makes_no_hang(folder: Path) -> None:
    """The time of the look is taken before the suspension is noted."""
    watch = watching(0, [])
    watch._look(last_progress.last_s + 0.05)
    assert not watch.words


def test_a_rank_of_thousands_that_waits_for_their_answers_was_not_suspended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for a minute, since rank 0's store has to answer all. Else the hang would begin anew, for ever."""
    now = [time.monotonic()]

    class Waits(threading.Event):
        rounds = 0

        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.0
            self.rounds += 1
            return self.rounds > 5

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(last_progress, "_suspensions", processes.Suspensions())
    monkeypatch.setattr(last_progress, "last_s", before := now[0] - 121)
    topology = Topology.from_environ(slurm_step(1, 4096, job_id=1))
    watch = HangWatch(topology, lambda question: None, warning_s=120.0, timeout_s=600.0)
    watch._stopped = Waits()
    watch._watch()
    watch._workers.close()
    assert watch.words and last_progress.last_s == before


def test_a_store_whose_answer_was_suspended_is_asked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_progress, "last_s", time.monotonic())
    is_suspended = threading.Event()
    monkeypatch.setattr(last_progress, "note_suspension", lambda pause_s: is_suspended.is_set())
    asked: list[object] = []
    topology = Topology.from_environ(slurm_step(1, 2, job_id=1))
    watch = HangWatch(topology, asked.append, warning_s=600.0, timeout_s=600.0)
    watch.start()
    last_progress.note_step()
    try:
        wait_until(lambda: asked)
        stays(lambda: len(asked) == 1, 0.2)
        is_suspended.set()
        wait_until(lambda: len(asked) > 1)
    finally:
        watch.stop()
