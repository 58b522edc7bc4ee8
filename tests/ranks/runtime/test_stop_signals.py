"""Told to stop, all ranks stop after the same step; here the other ranks are played by threads and false clocks."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ranks import Outcome, run_ranks
from slowness import LIMIT_S, scaled, stays, wait_until

import cluster_ddp
from cluster_ddp.errors import SpecError
from cluster_ddp.runtime import stop_signals
from cluster_ddp.runtime.checkpoint import stop_agreement
from cluster_ddp.runtime.stop_signals import DEFAULT_SIGNALS, StopFlag, Stopped
from cluster_ddp.slurm.variables import node_name


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
    stop_agreement.watch_time_limit(stop_flag, a_world(*others, is_main=is_main), env)
    made.append(stop_flag)
    return stop_flag


made = list[StopFlag]()


@pytest.fixture(autouse=True)
def their_threads() -> Iterator[None]:
    yield
    while made:
        made.pop().is_over.set()


# Signals


@pytest.mark.parametrize("name", ["USR1", "SIGUSR1", "usr1", "sigusr1"])
def test_a_signal_is_a_reason(name: str) -> None:
    told = flag(signals=(name, "TERM"))
    assert told.reason() is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told.reason() == f"{node_name(os.environ)} got USR1"
    os.kill(os.getpid(), signal.SIGTERM)  # one more, as scancel sends them, changes nothing but the name
    assert told.reason() == f"{node_name(os.environ)} got TERM"


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
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=scaled(LIMIT_S))
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
    assert error.value.hint == "stop_signals=('USR1', 'USR2', 'TERM') (of cluster-ddp train: --stop-signals)"


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


# Handlers that are installed after ours


@pytest.mark.fault(
    "you install another USR1, USR2 or TERM handler after the Checkpointer",
    "both are called; one warning",
    bound="until the next step, only the other handler gets the signal",
)
def test_a_later_handler_is_called_and_the_training_stops_too(said: pytest.LogCaptureFixture) -> None:
    called: list[int] = []
    told = flag(signals=("USR1", "USR2"))

    def own(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(signal.SIGUSR1, own)
    assert told.reason() is None and told.reason() is None
    (record,) = said.records
    assert "Signal USR1 has another handler since the Checkpointer was made: " in record.getMessage()
    assert "own. The training still stops" in record.getMessage() and "stop_signals=" in record.getMessage()
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told.reason() == f"{node_name(os.environ)} got USR1"
    assert called == [signal.SIGUSR1] * 2
    told.give_back()
    assert signal.getsignal(signal.SIGUSR1) is own


def test_a_later_handler_may_call_the_one_before(said: pytest.LogCaptureFixture) -> None:
    called: list[int] = []
    told = flag(signals=("USR1",))
    before = signal.getsignal(signal.SIGUSR1)
    assert callable(before)

    def polite(number: int, frame: Any) -> None:
        called.append(number)
        before(number, frame)

    signal.signal(signal.SIGUSR1, polite)
    assert told.reason() is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told.reason() == f"{node_name(os.environ)} got USR1"
    assert called == [signal.SIGUSR1]


@pytest.mark.parametrize("later", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_signal_that_is_ignored_or_deadly_later_stops_the_training(
    said: pytest.LogCaptureFixture, later: signal.Handlers
) -> None:
    told = StopFlag(("USR1",), told=False)
    signal.signal(signal.SIGUSR1, later)
    assert told.reason() is None and not said.records  # another rank says it
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told.reason() == f"{node_name(os.environ)} got USR1"
    told.give_back()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_later_handler_that_is_taken_back_is_forgotten(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a library that handles a signal during one of its calls."""
    monkeypatch.setattr(stop_signals, "_LOOK_EVERY_S", 0.0)
    called: list[int] = []
    told = flag(signals=("USR1",))
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    assert told.reason() is None
    signal.signal(signal.SIGUSR1, before)
    assert told.reason() is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told.reason() == f"{node_name(os.environ)} got USR1"
    assert not called
    told.give_back()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_handler_that_is_installed_just_before_the_end_stays() -> None:
    def own(number: int, frame: object) -> None:
        """The script's."""

    told = flag(signals=("USR1",))
    assert told.reason() is None
    signal.signal(signal.SIGUSR1, own)
    told.give_back()
    assert signal.getsignal(signal.SIGUSR1) is own


def test_fast_steps_do_not_look_for_handlers_each(monkeypatch: pytest.MonkeyPatch) -> None:
    told, looks = flag(signals=("USR1",)), list[int]()
    monkeypatch.setattr(stop_signals, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    getsignal = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: looks.append(number) or getsignal(number))
    assert [told.reason() for _ in range(9)] == [None] * 9
    assert looks == [signal.SIGUSR1]


def test_handlers_after_the_training_are_left_alone(said: pytest.LogCaptureFixture) -> None:
    told = flag(signals=("USR1",))
    told.ignore()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert told.reason() is None and not said.records
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


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
    monkeypatch.setattr(stop_agreement, "time", fake)
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
    host = node_name(os.environ)
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


# An end that changes


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> Iterator[Times]:
    """The file that the batch script writes, and the flag of a rank that reads it."""
    monkeypatch.setattr(stop_agreement, "_READ_EVERY_S", 0.01)
    made = Times(tmp_path / "times")
    yield made
    for told in made.flags:
        told.give_back()
    wait_until(lambda: not followers())


def followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "time limit"]


class Times:
    def __init__(self, path: Path) -> None:
        self.path, self.flags = path, list[StopFlag]()
        self.start = int(time.time()) - 3600

    def flag(self, left_s: int | None, *others: tuple[str, float], is_main: bool = True) -> StopFlag:
        env = {"CLUSTER_DDP_JOB_TIMES": str(self.path), "SLURM_JOB_START_TIME": str(self.start)}
        if left_s is not None:
            env["SLURM_JOB_END_TIME"] = str(int(time.time()) + left_s)
        self.flags.append(StopFlag(()))
        stop_agreement.watch_time_limit(self.flags[-1], a_world(*others, is_main=is_main), env)
        return self.flags[-1]

    def change(self, left_s: int | None) -> None:
        end = "NONE" if left_s is None else int(time.time()) + left_s
        self.path.write_text(f"{self.start} {end}\n")


def test_a_job_that_is_shortened_stops_in_time(times: Times, said: pytest.LogCaptureFixture) -> None:
    told = times.flag(3600)
    assert told.reason() is None
    times.change(50)  # less than the margin
    wait_until(told.reason)
    assert told.reason() == "the job's time is nearly up"
    wait_until(lambda: "The job's end has changed: it ends at 20" in said.text)


@pytest.mark.parametrize("left_s", [3600, None])
def test_a_job_that_is_extended_trains_on(
    times: Times, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, left_s: int | None
) -> None:
    told = times.flag(70)
    times.change(left_s)
    wait_until(lambda: "The job's end has changed" in said.text)
    monkeypatch.setattr(stop_signals, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 600))
    assert told.reason() is None


def test_a_suspension_moves_the_end(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm moves the end of the job as well, and tells it later: what it has told before does not count."""
    times.change(70)
    told, clock = times.flag(70), time.monotonic
    assert told.reason() is None
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 600)
    assert told.reason() is None
    times.change(50)
    wait_until(told.reason)


def test_only_rank_0_knows_the_end(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a rank with the old end would stop all."""
    told = times.flag(70, is_main=False)
    monkeypatch.setattr(stop_signals, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 600))
    assert told.reason() is None


def test_an_end_that_slurm_tells_late(times: Times) -> None:
    told = times.flag(None)
    times.change(50)
    wait_until(told.reason)


@pytest.mark.parametrize("text", ["", "\n", "1 2", "0 ", "N/A N/A\n", "17 NONE 17\n", "\0" * 9, "²² ²²\n"])
def test_no_answer_leaves_the_end_as_it_was(times: Times, text: str) -> None:
    """A last change ends the wait: by then, what came before it was read or replaced."""
    told = times.flag(3600)
    for _ in range(3):
        times.path.write_text(text)
        stays(lambda: told.reason() is None, 0.05)
    times.change(50)
    wait_until(told.reason)


def test_a_pipe_in_place_of_the_file_holds_nothing_up(times: Times) -> None:
    """Others may write to a shared run directory."""
    told = times.flag(3600)
    os.mkfifo(times.path)
    stays(lambda: told.reason() is None, 0.1)
    times.path.unlink()
    times.change(50)
    wait_until(told.reason)


def test_clocks_that_are_wrong_follow_no_change(times: Times, said: pytest.LogCaptureFixture) -> None:
    """No thread is started for it."""
    told = times.flag(None, ("node2", 3600.0))
    assert not followers()
    times.change(50)
    assert told.reason() is None and not said.records


def test_the_thread_ends_with_the_training(times: Times) -> None:
    told = times.flag(3600)
    assert len(followers()) == 1
    told.give_back()
    wait_until(lambda: not followers())


def test_a_reason_stays_while_the_ranks_agree_on_it() -> None:
    """The end moves after rank 0 has told the others to stop: they ask for the reason then."""
    told = StopFlag(())
    told.stop_at(0.0)
    assert told.is_set()
    told.stop_at(float("inf"))
    assert told.reason() == "the job's time is nearly up"


# Its exit status


def test_stopped_ends_with_75() -> None:
    assert Stopped().code == 75


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(LIMIT_S))
    assert (done.returncode, done.stdout.strip()) == (status, said), done.stderr


def warned_in_a_training(is_ignored: bool) -> None:
    if is_ignored:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with cluster_ddp.distributed(cuda=False):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        print(StopFlag(["USR1", "USR2"]).reason())


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_training_notes_warnings_from_distributed_on(tmp_path: Path, is_ignored: bool) -> None:
    (end,) = run_ranks(functools.partial(warned_in_a_training, is_ignored), [{}], tmp_path)
    assert end == Outcome(0, f"{node_name(os.environ)} got USR1\n")


@pytest.mark.fault(
    "a signal arrives before the ranks have met",
    "TERM ends it at once: there is nothing to save. USR1 and USR2 are kept until the script can handle them; then it "
    "makes one step and saves. Without proctrack/cgroup, one before `import cluster_ddp` is lost: the job stops by "
    "the clock",
    bound="20 s",
    also=("tests/slurm/test_launchers.py", "test_a_warning_before_there_is_a_checkpointer"),
)
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
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(LIMIT_S))
    assert done.returncode == status, done.stderr
    if status == 75:
        assert f"Stopped after step 1 (epoch 1): rank 0: {node_name(os.environ)} got USR1. Saved." in done.stdout
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001.pt"]
