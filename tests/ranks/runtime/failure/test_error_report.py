"""Naming the ranks that hang; what becomes of their job is in tests/slurm/faults."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import job_ids, run_ranks, slurm_step

import cluster_ddp
from cluster_ddp.agent.rank_notes import FailureNote, Notes
from cluster_ddp.errors import CommunicatorError, DataError
from cluster_ddp.run import files
from cluster_ddp.runtime.device.interruptible_wait import DeviceTimeoutError, PeerFailedError
from cluster_ddp.runtime.failure import error_report
from cluster_ddp.runtime.failure.error_report import FailureReporter
from cluster_ddp.runtime.rendezvous import arrived_ranks
from cluster_ddp.slurm.topology import Topology

JOB_ID = job_ids()
HOST = os.uname().nodename


def test_those_with_nothing_to_say_are_named_with_their_hosts() -> None:
    reporter, store = FailureReporter(), dist.HashStore()
    reporter.topology = Topology.from_environ(slurm_step(0, 2000, job_id=1))
    for rank in range(2000):
        store.set(arrived_ranks.arrival(rank), f"n{rank // 8}")
        if rank not in (7, 1999):
            store.set(f"failed/{rank}", "")
    assert reporter._unreported(store) == "rank 7 on n0, rank 1999 on n249"
    for rank in (7, 1999):
        store.set(f"failed/{rank}", "")
    assert reporter._unreported(store) == ""


def test_rank_0_stays_until_the_others_know_who_failed(capfd: pytest.CaptureFixture[str]) -> None:
    reporter, store = FailureReporter(), dist.HashStore()
    reporter.topology, reporter.store = Topology.from_environ(slurm_step(0, 2, job_id=1)), store
    for rank in range(2):
        store.set(arrived_ranks.arrival(rank), "n0")
    other = threading.Timer(0.5, store.set, ("failed/1", ""))
    other.start()
    begun, error = time.monotonic(), ValueError("the one that matters")
    reporter._excepthook(ValueError, error, error.__traceback__)
    assert time.monotonic() - begun > 0.4
    other.join()
    assert "ValueError: the one that matters" in capfd.readouterr().err


@pytest.mark.parametrize("where", ["thread", "process"])
def test_elsewhere_than_in_the_ranks_main_thread_an_error_is_pythons(
    capfd: pytest.CaptureFixture[str], where: str
) -> None:
    """multiprocessing calls the hook in threads of a DataLoader's workers: that ends no rank."""
    reporter, error = FailureReporter(), EOFError("it's gone")
    reporter.install()

    def call() -> None:
        sys.excepthook(EOFError, error, None)

    if where == "thread":
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    else:
        if (pid := os.fork()) == 0:
            call()
            os._exit(0)
        os.waitpid(pid, 0)
    assert capfd.readouterr().err == "EOFError: it's gone\n"


@pytest.mark.parametrize(("is_lost", "is_over"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_hang_that_is_over_once_the_store_has_answered_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool, is_over: bool
) -> None:
    """The store may take seconds to answer, and not in time."""

    class Slow(dist.HashStore):  # type: ignore[misc]
        def check(self, keys: list[str]) -> bool:
            steps.append(1)
            if is_lost:
                raise RuntimeError("it's gone")
            return super().check(keys)

    steps: list[int] = []
    ended: list[int] = []
    monkeypatch.setattr(error_report.process_exit, "now", ended.append)
    reporter, store = FailureReporter(), Slow()
    reporter.topology, reporter.store = Topology.from_environ(slurm_step(0, 2, job_id=1)), store
    answers = SimpleNamespace(lost_store=False)
    reporter.hangs = SimpleNamespace(answers=answers, accuse=lambda: None, silent="rank 1", words="it's silent")
    reporter.end_hang(1.0, lambda: is_over and bool(steps))
    assert ended == ([] if is_over else [1])
    assert dist.HashStore.check(store, [error_report._KEY]) is (not is_over and not is_lost)


@pytest.fixture
def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailureReporter:
    """Of rank 0 of two, with a folder for notes."""
    made = FailureReporter()
    made.topology = Topology.from_environ(slurm_step(0, 2, job_id=1))
    monkeypatch.setenv("CLUSTER_DDP_NOTES", str(tmp_path))
    return made


@pytest.mark.parametrize(
    ("error", "noted"),
    [
        (ValueError("two\nlines \x1b[31m"), ("ValueError: two lines ?[31m", "program")),
        (DataError("Reading x:", "no.", "y"), ("Reading x: no.", "program")),
        (RuntimeError("Connection reset by peer"), ("RuntimeError: Connection reset by peer", "peer")),
        (CommunicatorError("Waiting:", "a peer is gone.", "y"), ("Waiting: a peer is gone.", "peer")),
        (PeerFailedError("another rank failed"), ("another rank failed", "peer")),
    ],
)
def test_a_rank_notes_why_it_failed_and_whether_another_is_the_cause(
    tmp_path: Path, reporter: FailureReporter, error: Exception, noted: tuple[str, str]
) -> None:
    """A rank that was killed can't report: what those say that have lost it is no cause."""
    reporter.report(error)
    words, kind, *_ = Notes(tmp_path).failure(0) or FailureNote("")
    assert (words.endswith(noted[0]), kind) == (True, noted[1]), words


def test_what_follows_from_another_ranks_failure_is_noted_as_that(tmp_path: Path, reporter: FailureReporter) -> None:
    reporter.store = dist.HashStore()
    reporter.store.set("first_failure", "rank 1 on n2")
    reporter.report(ValueError("x"))
    assert Notes(tmp_path).failure(0) == FailureNote("stopped: rank 1 on n2 failed (see its error).", "peer")


def test_it_is_noted_when_no_descriptor_is_left(tmp_path: Path, reporter: FailureReporter) -> None:
    files.reserve_descriptors()
    taken = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        reporter._note(OSError("Too many open files"), "system")
    finally:
        for descriptor in taken:
            os.close(descriptor)
    assert Notes(tmp_path).failure(0) == FailureNote("OSError: Too many open files", "system")


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({"SLURM_PROCID": "3", "RANK": "0"}, 3),
        ({"RANK": "2"}, 2),
        ({"SLURM_PROCID": "1", "RANK": "5", "TORCHELASTIC_RUN_ID": "x"}, 5),  # Slurm's task is torchrun
    ],
)
def test_an_early_error_is_noted_for_its_rank(
    tmp_path: Path, reporter: FailureReporter, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], rank: int
) -> None:
    for name in ("SLURM_PROCID", "RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    reporter.topology = None
    reporter._note(ValueError("x"), "program")
    assert Notes(tmp_path).failure(rank) == FailureNote("ValueError: x", "program")


def rank_0_is_killed() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        world.barrier()
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()


@pytest.mark.quick
def test_ranks_that_rank_0_leaves_behind_say_so_in_one_line(tmp_path: Path) -> None:
    """Not with a traceback of the connection that they lost: at times Slurm ends rank 0 of a failed step first."""
    ends = run_ranks(rank_0_is_killed, [slurm_step(rank, 3, job_id=JOB_ID) for rank in range(3)], tmp_path)
    assert [end.exit_code for end in ends] == [-signal.SIGKILL, 1, 1], ends
    for rank in (1, 2):
        assert "Traceback" not in ends[rank].output
        last = f"[rank {rank} {HOST}] {error_report._STORE_IS_GONE}\n"
        assert ends[rank].output.endswith(last)  # after torch's warning


@pytest.mark.parametrize(
    ("error", "is_timeout"),
    [
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"), True),
        # of a collective that comes after another has waited too long (seen with torch 2.15)
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:49432"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (DeviceTimeoutError("waited 3 s for the device"), True),
        (PeerFailedError("another rank failed"), False),
        (ValueError("Timed out waiting for my coffee"), False),
    ],
)
def test_what_counts_as_having_waited_too_long(error: Exception, is_timeout: bool) -> None:
    assert error_report._is_timeout(error) == is_timeout


def test_a_signal_at_its_end_does_not_change_the_status_of_the_first_failure(tmp_path: Path) -> None:
    """srun sends TERM to all ranks once one has ended: perhaps another one, that this one's failure has stopped."""
    code = "import atexit, os, signal, cluster_ddp\n"
    code += "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
    code += "with cluster_ddp.distributed(cuda=False): raise ValueError('the one that matters')"
    env = os.environ | {"CLUSTER_DDP_NOTES": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert Notes(tmp_path).has_joined(0)
    assert Notes(tmp_path).failure(0) == FailureNote("ValueError: the one that matters", "program")
    assert done.stderr.endswith("ValueError: the one that matters\n")


def failing_at(step: int) -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        checkpoint = cluster_ddp.Checkpointer(world, model=torch.nn.Linear(1, 1), every="1steps")
        for done in checkpoint.until(9):
            if done == step:
                raise ValueError("x")
            checkpoint.step()


def test_the_note_of_a_failure_has_the_step(tmp_path: Path) -> None:
    """Of the whole training: those before a resume count."""
    for step in (2, 3):
        (folder := tmp_path / f"notes of {step}").mkdir()
        env = {"CLUSTER_DDP_NOTES": str(folder), "CLUSTER_DDP_RUN_DIR": str(tmp_path / "it's a run")}
        ends = run_ranks(functools.partial(failing_at, step), [env], folder)
        assert Notes(folder).failure(0) == FailureNote("ValueError: x", "program", step), ends


def test_who_has_only_lost_its_connection_is_not_said_to_have_failed(
    reporter: FailureReporter, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a rank that was killed, the others learn nothing else: who failed, the job's agent says."""
    lost = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:49432")
    reporter.store, other = dist.HashStore(), FailureReporter()
    other.topology, other.store = Topology.from_environ(slurm_step(1, 4, job_id=1)), reporter.store
    other.report(lost)
    reporter.report(lost)
    said = capfd.readouterr().err
    assert "failed (see its error)" not in said
    words = f"rank 1 on {HOST} {error_report._CONNECTION_LOST}."
    assert said.endswith(f"[rank 0 {HOST}] stopped: {words}\n"), said
    assert said.startswith(f"[rank 1 {HOST}] stopped: it {error_report._CONNECTION_LOST}:\n"), said


def test_a_rank_that_failed_is_named_before_one_that_lost_its_connection(
    reporter: FailureReporter, capfd: pytest.CaptureFixture[str]
) -> None:
    reporter.store = dist.HashStore()
    reporter.store.set(error_report._KEY, f"{error_report._LOST}rank 1 on n2")
    reporter.report(ValueError("the one that matters"))
    assert "ValueError: the one that matters" in capfd.readouterr().err
    assert reporter.store.get(error_report._KEY).decode() == f"rank 0 on {HOST}"


def three_of_four_are_left() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        world.barrier()
        if world.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()


def test_those_that_a_killed_rank_leaves_behind_blame_none_of_each_other(tmp_path: Path) -> None:
    ends = run_ranks(three_of_four_are_left, [slurm_step(rank, 4, job_id=JOB_ID) for rank in range(4)], tmp_path)
    assert [end.exit_code for end in ends] == [1, 1, 1, -signal.SIGKILL], ends
    for end in ends[:3]:
        assert "failed (see its error)" not in end.output and error_report._CONNECTION_LOST in end.output, end.output
