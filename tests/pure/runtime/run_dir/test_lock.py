"""One run at a time in a run directory; the others are other processes, as on a cluster."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster_ddp.errors import RunDirError
from cluster_ddp.runtime.run_dir import fenced_writes
from cluster_ddp.runtime.run_dir.fenced_writes import RunLock
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

HOLD = """
    import os, signal, sys, time
    from pathlib import Path
    from cluster_ddp.runtime.run_dir.fenced_writes import RunLock
    from cluster_ddp.slurm.topology import Topology
    held = RunLock(Path(sys.argv[1]), Topology.from_environ(os.environ))
    print(os.getpid(), flush=True)
    sys.stdin.readline()
"""


def job(job_id: int | None = None, **more: int) -> Topology:
    place = {"launcher": "single", "rank": 0, "local_rank": 0, "world_size": 1}
    return Topology(**place, master_addr="localhost", port_candidates=(1,), job_id=job_id, **more)  # type: ignore[arg-type]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that hold the lock until a line comes on their stdin."""
    started: list[subprocess.Popen[str]] = []

    def start(job_id: int | None = None) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        if job_id is not None:
            one_task = {"PROCID": 0, "LOCALID": 0, "NODEID": 0, "STEP_ID": 0, "STEP_NUM_TASKS": 1, "STEP_NUM_NODES": 1}
            env |= {f"SLURM_{name}": str(value) for name, value in one_task.items()}
            env |= {"SLURM_JOB_ID": str(job_id), "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "1"}
        command = [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path / ".lock")]
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != f"{process.pid}\n":
            raise subprocess.CalledProcessError(process.wait(), command)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., "subprocess.Popen[str]"]


def test_a_second_run_is_refused_with_the_owner_named(tmp_path: Path, holder: Start) -> None:
    process = holder(12)
    with pytest.raises(RunDirError) as error:
        RunLock(tmp_path / ".lock", job(13))
    assert f"job 12 (process {process.pid} on {node_name(os.environ)}, since 2" in error.value.found
    assert str(tmp_path) in error.value.asked
    assert "--run-dir" in error.value.hint and "scancel 12" in error.value.hint
    owner = json.loads((tmp_path / ".lock").read_text())  # the one refused has left it as it was
    assert (owner["job"], owner["process"]) == ("12", process.pid)
    with pytest.raises(RunDirError):  # nor has it ended the other's lock
        RunLock(tmp_path / ".lock", job(13))


def test_a_job_on_this_machine_is_ended_by_its_process(tmp_path: Path) -> None:
    """Its id may be that of a job of Slurm's, which scancel would end."""
    owner = {"job": "12", "is_local": True, "process": 14, "host": "here", "since": "now"}
    hint = fenced_writes._in_use(tmp_path / ".lock", owner, False).hint
    assert hint is not None and hint.endswith("or end it first (kill 12)")


def test_outside_a_job_nobody_is_waited_for(tmp_path: Path, holder: Start) -> None:
    process = holder()
    with pytest.raises(RunDirError) as error:
        RunLock(tmp_path / ".lock", job())
    assert f"a run (process {process.pid} on " in error.value.found
    assert "scancel" not in error.value.hint


def test_killed_it_holds_nothing(tmp_path: Path, holder: Start) -> None:
    process = holder(12)
    process.send_signal(signal.SIGKILL)
    process.wait()
    RunLock(tmp_path / ".lock", job(13))
    owner = json.loads((tmp_path / ".lock").read_text())
    own = {"job": "13", "is_local": False, "host": node_name(os.environ), "process": os.getpid()}
    assert owner == {**own, "since": owner["since"]}


def test_its_former_self_is_waited_for(
    tmp_path: Path, holder: Start, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, naps = holder(12), []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            process.communicate("end\n")

    clock = SimpleNamespace(sleep=nap, monotonic=time.monotonic, strftime=time.strftime)
    monkeypatch.setattr(fenced_writes, "time", clock)  # not time.sleep itself: other threads sleep, too
    RunLock(tmp_path / ".lock", job(12))
    assert len(naps) == 3
    (record,) = said.records
    assert f"Waiting for the former run of this job to end: job 12 (process {process.pid} on" in record.getMessage()


def test_a_former_self_that_stays_is_refused_in_the_end(
    tmp_path: Path, holder: Start, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder(12)
    monkeypatch.setattr(fenced_writes, "LOCK_PATIENCE_S", 0.3)
    with pytest.raises(RunDirError, match=r"the former run of this job, is still using it"):
        RunLock(tmp_path / ".lock", job(12))


def test_another_task_of_the_array_is_another_job(
    tmp_path: Path, holder: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder(12)
    clock = SimpleNamespace(sleep=lambda _: pytest.fail("it waits"), monotonic=time.monotonic, strftime=time.strftime)
    monkeypatch.setattr(fenced_writes, "time", clock)
    with pytest.raises(RunDirError):
        RunLock(tmp_path / ".lock", job(12, array_job_id=12, array_task_id=3))


def unlink(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.unlink()
    path.touch()


@pytest.mark.fault(
    "`.lock` is removed or replaced",
    "the next save logs a message and takes it again. If another job has taken it, this one ends with an error and "
    "saves nothing more",
    bound="one save",
    also=(
        "test_a_lock_that_others_have_taken_ends_this_run",
        "test_another_training_in_the_run_directory_ends_this_one",
    ),
)
@pytest.mark.parametrize("do", [unlink, replace])
def test_a_lock_that_others_remove_is_taken_again(
    tmp_path: Path, holder: Start, said: pytest.LogCaptureFixture, do: Callable[[Path], None]
) -> None:
    held = RunLock(tmp_path / ".lock", job(12))
    held.keep()
    assert not said.records
    do(tmp_path / ".lock")
    held.keep()
    assert f"{tmp_path}/.lock was removed or replaced while this run held it; it is locked again." in said.text
    with pytest.raises(subprocess.CalledProcessError):
        holder(13)
    assert json.loads((tmp_path / ".lock").read_text())["job"] == "12"


def test_a_lock_that_others_have_taken_ends_this_run(tmp_path: Path, holder: Start) -> None:
    held = RunLock(tmp_path / ".lock", job(12))
    (tmp_path / ".lock").unlink()
    process = holder(13)
    with pytest.raises(RunDirError) as error:
        held.keep()
    assert f"job 13 (process {process.pid} on {node_name(os.environ)}, since 2" in error.value.found
    assert "This run ends" in error.value.found and "--run-dir" in error.value.hint


@pytest.mark.parametrize("share", ["0", "1"])
def test_only_its_owner_can_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str) -> None:
    """Who may read a file may lock it; one of an earlier version could be read by all."""
    monkeypatch.setenv("CLUSTER_DDP_SHARE", share)
    for before in (None, 0o644):
        if before:
            (tmp_path / ".lock").chmod(before)
        RunLock(tmp_path / ".lock", job(12))
        assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o600
    (tmp_path / ".lock").unlink()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(OSError, match="It is a symbolic link"):
        RunLock(tmp_path / ".lock", job(12))
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("left", [b"", b"\xff\xfe", b"[1]", b'{"job": "12"', b'{"job": 3}\n' + b"x" * 5000])
def test_what_a_dead_owner_has_left_does_not_matter(tmp_path: Path, left: bytes) -> None:
    (tmp_path / ".lock").write_bytes(left)
    RunLock(tmp_path / ".lock", job(13))
    assert json.loads((tmp_path / ".lock").read_text())["job"] == "13"


@pytest.mark.fault(
    "the run directory's file system has no locks, so that nothing refuses a second job there",
    "a message says so. (A lock holds across nodes on NFS, and on Lustre mounted with `flock`)",
)
def test_without_locks_it_goes_on_and_says_so(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)
    RunLock(tmp_path / ".lock", job(13))
    assert "has no locks: two runs" in said.text
