"""Told to stop, all ranks stop after the same step; here the other ranks are played by threads and false clocks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from slowness import scaled

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime import stop_signals
from cluster_ddp.runtime.checkpoint import time_limit
from cluster_ddp.runtime.stop_signals import DEFAULT_SIGNALS, StopFlag, Stopped, write_stop_marker

log = logging.getLogger("cluster_ddp")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    monkeypatch.setattr(log, "propagate", False)
    log.addHandler(caplog.handler)
    yield caplog
    log.removeHandler(caplog.handler)


def a_world(*others: tuple[str, float], is_main: bool = True) -> Any:
    """What preemption asks of a world; `others` are the clocks of other ranks, in seconds ahead of ours."""

    def gather(mine: tuple[str, float]) -> list[tuple[str, float]]:
        return [mine, *((host, time.time() + ahead) for host, ahead in others)]

    return SimpleNamespace(gather=gather, barrier=lambda: None, is_main=is_main, world_size=1 + len(others))


def flag(
    end: object = "",
    *others: tuple[str, float],
    signals: tuple[str, ...] = (),
    is_main: bool = True,
    start: object = "",
) -> StopFlag:
    times = {"SLURM_JOB_START_TIME": str(start), "SLURM_JOB_END_TIME": str(end)}
    env = {name: text for name, text in times.items() if text}
    stop_flag = StopFlag(signals)
    stop_flag.stop_at(time_limit.deadline(a_world(*others, is_main=is_main), env))
    return stop_flag


# Signals


@pytest.mark.parametrize("name", ["USR1", "SIGUSR1", "usr1", "sigusr1"])
def test_a_signal_is_a_reason(name: str) -> None:
    told = flag(signals=(name, "TERM"))
    assert told.reason() is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told.reason() == f"{socket.gethostname()} got USR1"
    os.kill(os.getpid(), signal.SIGTERM)  # one more, as scancel sends them, changes nothing but the name
    assert told.reason() == f"{socket.gethostname()} got TERM"


def test_handlers_are_given_back() -> None:
    def own(number: int, frame: object) -> None:
        """The script's."""

    signal.signal(signal.SIGUSR1, own)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    told = flag(signals=DEFAULT_SIGNALS)
    told.give_back()
    assert signal.getsignal(signal.SIGUSR1) is own
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    told.give_back()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told.reason() is None


def test_a_signal_named_twice_is_given_back_too() -> None:
    def own(number: int, frame: object) -> None:
        """The script's."""

    signal.signal(signal.SIGUSR1, own)
    flag(signals=("USR1", "SIGUSR1")).give_back()
    assert signal.getsignal(signal.SIGUSR1) is own


@pytest.mark.parametrize("early", ["stop_signals.note_early(('USR1',))", ""])
def test_a_warning_after_the_training_does_not_end_the_process(early: str) -> None:
    """Not while Python ends, either, when it has forgotten all handlers."""
    script = f"""
import os, signal
from cluster_ddp.runtime import stop_signals
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, 10)
        print("survived")
late = Late()
{early}
stop_signals.StopFlag(stop_signals.DEFAULT_SIGNALS).give_back()
os.kill(os.getpid(), signal.SIGUSR1)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=scaled(60))
    assert (ended.returncode, ended.stdout) == (0, "survived\n"), ended.stderr


@pytest.mark.parametrize(
    ("name", "meant"),
    [("USR3", "USR"), ("TERN", "TERM"), ("SIGTEM", "TERM"), ("XYZZY", None), ("", None), ("10", None)],
)
def test_an_unknown_signal_gets_the_nearest_and_a_hint(name: str, meant: str | None) -> None:
    with pytest.raises(SpecError) as error:
        flag(signals=("USR2", name))
    assert repr(name) in error.value.asked
    assert ("Did you mean" in error.value.found) == (meant is not None)
    assert (meant or "") in error.value.found
    assert error.value.hint == "--stop-signals USR1 USR2 TERM"


@pytest.mark.parametrize("name", ["KILL", "SIGKILL", "STOP", "KIL"])
def test_a_signal_that_cannot_be_handled_is_not_proposed(name: str) -> None:
    with pytest.raises(SpecError) as error:
        flag(signals=(name,))
    assert "mean KILL" not in error.value.found and "mean STOP" not in error.value.found


def test_a_refused_signal_leaves_the_others_alone() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(SpecError):
        flag(signals=("USR2", "USR3"))
    assert signal.getsignal(signal.SIGUSR2) is before


# The end of the job


@pytest.mark.parametrize(
    ("passed_s", "left_s", "margin_s"),
    [
        (0, 3600, 60),
        (0, 240, 60),
        (0, 100, 25),
        (0, 8, 2),
        (3500, 100, 60),  # it was slow to begin: a save takes as long as it does in any long job
        (60, 60, 30),
        (None, 100, 25),
    ],
)
def test_it_stops_in_time_before_the_jobs_end(
    monkeypatch: pytest.MonkeyPatch, passed_s: int | None, left_s: int, margin_s: float
) -> None:
    now = SimpleNamespace(wall=1.8e9, monotonic=500.0)
    fake = SimpleNamespace(time=lambda: now.wall, monotonic=lambda: now.monotonic)
    monkeypatch.setattr(stop_signals, "time", fake)
    monkeypatch.setattr(time_limit, "time", fake)
    start = "" if passed_s is None else int(now.wall) - passed_s
    told = flag(int(now.wall) + left_s, start=start)
    now.monotonic += left_s - margin_s - 0.1
    assert told.reason() is None
    now.wall -= 1e6  # somebody sets the clock: what counts is what has passed
    assert told.reason() is None
    now.monotonic += 0.2
    assert told.reason() == "the job's time is nearly up"


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=st.text(max_size=12) | st.from_regex(r"-?\d{1,30}", fullmatch=True))
@example("")
@example("Unknown")
@example("0")
@example("4294967294")  # Slurm's NO_VAL
@example("²")
@example("٣")
@example("1" * 400)
def test_no_end_time_does_harm(said: pytest.LogCaptureFixture, text: str) -> None:
    assert flag(text).reason() is None


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(end=st.integers(0, 10**21))
def test_no_end_time_does_harm_where_clocks_are_apart(said: pytest.LogCaptureFixture, end: int) -> None:
    assert flag(end, ("node2", 3600.0)).reason() is None


def test_an_end_that_is_over_is_not_believed(said: pytest.LogCaptureFixture) -> None:
    assert flag(int(time.time()) - 10).reason() is None
    (record,) = said.records
    assert "Clocks can't be right" in record.getMessage() and "timedatectl" in record.getMessage()


def test_clocks_an_hour_apart_are_not_believed(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    told = flag(int(time.time()) + 60, ("node2", 3600.0), ("node3", 5.0))
    (record,) = said.records
    host = socket.gethostname()
    assert f"on {host} it is 2" in record.getMessage() and "on node2 2" in record.getMessage()
    assert "node3" not in record.getMessage()
    with monkeypatch.context() as patch:
        patch.setattr(stop_signals, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6))
        assert told.reason() is None
    said.clear()
    flag(int(time.time()) + 60, ("node2", -3600.0), is_main=False)
    assert not said.records  # one rank says it


def test_clocks_a_little_apart_are_believed(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    told = flag(int(time.time()) + 60, ("node2", 20.0))
    assert not said.records and told.reason() is None
    monkeypatch.setattr(stop_signals, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 50))
    assert told.reason() == "the job's time is nearly up"


def test_clocks_do_not_matter_where_nobody_tells_the_end(said: pytest.LogCaptureFixture) -> None:
    assert flag("", ("node2", 3600.0)).reason() is None
    assert not said.records


# The word that is left


def test_stopped_ends_with_75() -> None:
    assert Stopped().code == 75


def test_leaving_word(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    write_stop_marker({})
    write_stop_marker({"CLUSTER_DDP_STOPPED": str(tmp_path / "stopped")})
    assert (tmp_path / "stopped").exists() and not said.records
    write_stop_marker({"CLUSTER_DDP_STOPPED": str(tmp_path / "missing" / "stopped")})
    assert "Can't write the stop marker" in said.text and "No such file or directory" in said.text


# While a training starts


NOTED = """
import os, signal, sys, threading
def own(number, frame): print("own")
{before}
{do}
assert "torch" not in sys.modules
from cluster_ddp.runtime.stop_signals import StopFlag
os.kill(os.getpid(), signal.SIGUSR1)
print(StopFlag(["USR1"]).reason() is not None)
"""
IGNORED = "signal.signal(signal.SIGUSR1, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("before", "do", "status", "said"),
    [
        (IGNORED, "import cluster_ddp", 0, "True"),
        (IGNORED, "t = threading.Thread(target=__import__, args=['cluster_ddp']); t.start(); t.join()", 0, "False"),
        (IGNORED + "; signal.signal(signal.SIGUSR2, signal.SIG_IGN); signal.signal(signal.SIGUSR1, own)",
         "import cluster_ddp", 0, "own\nFalse"),
        ("", "import cluster_ddp", -signal.SIGUSR1, ""),
    ],
)  # fmt: skip
def test_an_import_notes_warnings_that_our_batch_script_has_ignored(
    before: str, do: str, status: int, said: str
) -> None:
    """Elsewhere, in a thread, and where the script has a handler of its own, it leaves them as they are."""
    code = NOTED.format(before=before, do=do)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (status, said), done.stderr


def test_a_training_notes_warnings_from_distributed_on() -> None:
    code = (
        "import cluster_ddp, os, signal\n"
        "with cluster_ddp.distributed(cuda=False):\n"
        "    os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR2)\n"
        "    from cluster_ddp.runtime.stop_signals import StopFlag; print(StopFlag(['USR1', 'USR2']).reason())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{socket.gethostname()} got USR1\n", done.stderr


@pytest.mark.parametrize(("name", "status"), [("USR1", 75), ("TERM", -signal.SIGTERM)])
def test_a_signal_while_torch_is_imported(tmp_path: Path, name: str, status: int) -> None:
    """A warning is kept: one step is made and saved. At TERM there is nothing to save yet."""
    code = (
        "import os, signal, sys, cluster_ddp.runtime.stop_signals as p; early = p.note_early\n"
        f"def once(names): p.note_early = early; early(names); os.kill(os.getpid(), signal.SIG{name}); early(())\n"
        "p.note_early = once\n"
        "from cluster_ddp.train import main\n"
        "assert 'torch' not in sys.modules; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "--dataset", "digits", "--run-dir", str(tmp_path / "run"), "--no-cuda"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode == status, done.stderr
    if status == 75:
        assert f"Stopped after step 1 (epoch 1): rank 0: {socket.gethostname()} got USR1. Saved." in done.stdout
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001.pt"]
