"""A rank whose collectives will never end, and one that hangs itself; with real stores and processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import job_ids, run_ranks, slurm_step
from slowness import stays, wait_until

import cluster_ddp
from cluster_ddp.agent.rank_notes import FailureNote, Notes
from cluster_ddp.errors import CommunicatorError
from cluster_ddp.runtime import distributed as distributed_module
from cluster_ddp.runtime import process_exit, process_group
from cluster_ddp.runtime.device import interruptible_wait
from cluster_ddp.runtime.failure import error_report, peer_watch
from cluster_ddp.runtime.failure.error_report import FailureReporter
from cluster_ddp.runtime.failure.peer_watch import PeerWatch
from cluster_ddp.slurm.topology import Topology

JOB_ID = job_ids()
HOST = os.uname().nodename


class Started(PeerWatch):
    """One that watches on CPUs, too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.start()


def as_on_a_gpu() -> None:
    """Ranks on the CPU are watched as on a GPU whose kernels wait."""
    peer_watch._EVERY_S, peer_watch._GRACE_S = 0.2, 1.0
    interruptible_wait.is_busy = lambda device: True  # type: ignore[assignment]
    distributed_module.PeerWatch = Started  # type: ignore[misc]


def blocked_in_a_kernel() -> None:
    as_on_a_gpu()
    with cluster_ddp.distributed(cuda=False) as world:
        world.barrier()
        if world.rank == 1:
            raise ValueError("this is the one that matters")
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Event().wait()  # as deaf as in C++, where Python's handlers don't run


def test_a_rank_that_waits_in_a_kernel_ends_seconds_after_anothers_failure(tmp_path: Path) -> None:
    steps = [slurm_step(rank, 3, job_id=JOB_ID, CLUSTER_DDP_NOTES=str(tmp_path)) for rank in range(3)]
    ends = run_ranks(blocked_in_a_kernel, steps, tmp_path)
    assert [end.exit_code for end in ends] == [1, 1, 1], ends
    assert "ValueError: this is the one that matters" in ends[1].output
    assert Notes(tmp_path).failure(1) == FailureNote("ValueError: this is the one that matters", "program")
    for rank in (0, 2):
        words = f"stopped: rank 1 on {HOST} failed (see its error)."
        assert ends[rank].output == f"[rank {rank} {HOST}] {words}\n"
        assert Notes(tmp_path).failure(rank) == FailureNote(words, "peer")
        assert Notes(tmp_path).has_joined(rank)


def rank_0_is_killed() -> None:
    as_on_a_gpu()
    with cluster_ddp.distributed(cuda=False) as world:
        world.barrier()
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(60)


def test_with_rank_0_the_store_goes_and_that_is_seen(tmp_path: Path) -> None:
    ends = run_ranks(rank_0_is_killed, [slurm_step(rank, 2, job_id=JOB_ID + 1) for rank in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [-signal.SIGKILL, 1], ends
    assert ends[1].output.endswith(f"[rank 1 {HOST}] {error_report._STORE_IS_GONE}\n")


@pytest.mark.parametrize("is_busy", [True, False])
def test_only_a_rank_whose_device_is_busy_answers_and_is_ended(monkeypatch: pytest.MonkeyPatch, is_busy: bool) -> None:
    """One whose device is idle may be what the others wait for: it must not look as if it had answered."""
    ended: list[int] = []
    monkeypatch.setattr(peer_watch, "_EVERY_S", 0.05)
    monkeypatch.setattr(peer_watch, "_GRACE_S", 0.3)
    monkeypatch.setattr(process_exit, "now", ended.append)
    reporter, store = FailureReporter(), dist.HashStore()
    reporter.topology, reporter.store = Topology.from_environ(slurm_step(1, 2, job_id=1)), store
    watch = PeerWatch(reporter, lambda: is_busy, 2)
    watch.start()
    assert not watch.has_failed()
    store.set("first_failure", "rank 0 on n0")
    wait_until(watch.has_failed)
    if is_busy:
        wait_until(lambda: ended)
        assert store.check(["failed/1"])
    else:
        stays(lambda: not store.check(["failed/1"]), 0.7)
    assert ended == ([1] if is_busy else [])
    watch.stop()
    watch._thread.join(20)
    assert not watch._thread.is_alive()


BROKEN = CommunicatorError("Communicating:", "a connection broke.", "look at the other ranks")


def communicator_breaks() -> None:
    """As NCCL's watchdog finds it: it has logged that, and nothing else happens."""
    as_on_a_gpu()
    is_first = os.environ["SLURM_PROCID"] == "1"
    process_group.communicator_error = lambda device: BROKEN if is_first else None  # type: ignore[assignment]
    with cluster_ddp.distributed(cuda=False) as world:
        world.barrier()
        if "WAITS" in os.environ:
            interruptible_wait._poll(lambda: False, world.collective_timeout_s, world.peer_failed)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Event().wait()


@pytest.mark.fault(
    "NCCL's connection breaks, or its watchdog times out",
    "the rank reports it, and the others name that rank (tested with a stand-in for NCCL)",
    bound="seconds; if the script itself waits, twice `--collective-timeout-s`",
)
@pytest.mark.parametrize("waits", [{}, {"WAITS": "1"}])
def test_a_communicator_that_broke_ends_the_rank_and_the_others(tmp_path: Path, waits: dict[str, str]) -> None:
    """TORCH_NCCL_RETHROW_CUDA_ERRORS=0 keeps such errors back. In a call of the script, and in a wait of ours."""
    steps = [slurm_step(rank, 2, job_id=JOB_ID + 30 + len(waits), **waits) for rank in range(2)]
    ends = run_ranks(communicator_breaks, steps, tmp_path)
    assert [end.exit_code for end in ends] == [1, 1], ends
    assert ends[1].output == f"[rank 1 {HOST}] error: {BROKEN}\n"
    assert ends[0].output == f"[rank 0 {HOST}] stopped: rank 1 on {HOST} {error_report._CONNECTION_LOST}.\n"


def test_a_watch_that_is_stopped_has_seen_nothing() -> None:
    reporter = FailureReporter()
    reporter.topology, reporter.store = Topology.from_environ(slurm_step(1, 2, job_id=1)), dist.HashStore()
    watch = PeerWatch(reporter, lambda: True, 2)
    watch.start()
    watch.stop()
    watch._thread.join(20)
    assert not watch._thread.is_alive() and not watch.has_failed()


def waiting_for_its_device() -> None:
    """Rank 0 as where it waits for a GPU; rank 1 hangs, or raises."""
    as_on_a_gpu()
    interruptible_wait.is_busy = lambda device: os.environ["SLURM_PROCID"] == "0"  # type: ignore[assignment]
    with cluster_ddp.distributed(cuda=False, collective_timeout_s=float(os.environ["TIMEOUT_S"])) as world:
        world.barrier()
        if world.rank == 0:
            interruptible_wait._poll(lambda: False, world.collective_timeout_s, world.peer_failed)
        if "RAISES" in os.environ:
            raise ValueError("this is the one that matters")
        threading.Event().wait(12)
        os._exit(9)


def test_a_device_that_waits_for_a_rank_that_hangs_names_it(tmp_path: Path) -> None:
    steps = [slurm_step(rank, 2, job_id=JOB_ID + 20, TIMEOUT_S="1") for rank in range(2)]
    first, _ = run_ranks(waiting_for_its_device, steps, tmp_path)
    assert first.exit_code == 1
    assert first.output.startswith(f"[rank 0 {HOST}] error: Waiting 1 s for the other ranks:\n  rank 0 on {HOST} waits")
    assert f"; rank 1 on {HOST} " in first.output


def test_a_rank_that_waits_for_its_device_sees_anothers_failure(tmp_path: Path) -> None:
    steps = [slurm_step(rank, 2, job_id=JOB_ID + 21, TIMEOUT_S="600", RAISES="1") for rank in range(2)]
    first, _ = run_ranks(waiting_for_its_device, steps, tmp_path)
    assert first.exit_code == 1
    assert first.output == f"[rank 0 {HOST}] stopped: rank 1 on {HOST} failed (see its error).\n"


class Kept:
    """Something that must not be lost."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep(self) -> None:
        time.sleep(0.5)
        self.path.touch()


def abort_hangs() -> None:
    """The group can't be ended, as with a CUDA graph alive: the process ends all the same, with what must be kept."""
    distributed_module.process_group.abort = lambda device: False  # type: ignore[assignment]
    kept = Kept(Path(os.environ["KEPT"]))
    process_exit.before_now(kept.keep)
    with cluster_ddp.distributed(cuda=False) as world:
        world.barrier()
        if world.rank == 1:
            raise (SystemExit(7) if "STATUS" in os.environ else ValueError("once"))
        threading.Event().wait(3)
        sys.exit(0)


@pytest.mark.parametrize(("env", "status"), [({}, 1), ({"STATUS": "7"}, 7)])
def test_where_nccl_cannot_be_ended_the_process_is(tmp_path: Path, env: dict[str, str], status: int) -> None:
    steps = [
        slurm_step(rank, 2, job_id=JOB_ID + 2 + status, KEPT=str(tmp_path / f"kept{rank}"), **env) for rank in range(2)
    ]
    ends = run_ranks(abort_hangs, steps, tmp_path)
    assert ends[1].exit_code == status, ends
    assert (tmp_path / "kept1").exists()
    assert ends[1].output.count("ValueError: once") == (0 if env else 1)


def test_only_what_is_still_there_is_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept")
    process_exit.before_now(kept.keep)
    del kept
    process_exit._keep()
    assert not (tmp_path / "kept").exists()
