"""A rank writes its stack when no step came for long: exactly if it is stuck, and never at the cost of its process."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_ddp.runtime.failure import hang_verdict, stack_timer
from cluster_ddp.runtime.failure.hang_verdict import Answer
from cluster_ddp.runtime.failure.stacks import StackFile

HERE = Answer(rank=0, host="node1", where="a.py:1", doing="f")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[StackFile]:
    found = StackFile(tmp_path / "stack-rank0.txt")
    found.write(HERE.text())
    yield found
    found.close()


def compute(depth: int) -> int:
    return depth and compute(depth - 1) + len([*range(3)])


def test_a_rank_that_was_asked_while_it_trains_lives_on_and_is_not_stuck(file: StackFile) -> None:
    """As after a suspension. faulthandler's own timer ends it by SIGSEGV at about the third time."""

    def ask() -> None:
        for _ in range(100):
            file.arm(1e-4)
            time.sleep(0.002)

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        compute(50)
    asking.join()
    file.arm(600)
    assert file._timer.has_fired and hang_verdict.read(file.path.parent) == [HERE]


def test_a_rank_is_stuck_while_c_code_holds_pythons_lock(file: StackFile) -> None:
    file.arm(0.01)
    ctypes.PyDLL(None).usleep(500_000)
    [found] = hang_verdict.read(file.path.parent)
    assert (found.state, found.doing) == ("locked", "test_a_rank_is_stuck_while_c_code_holds_pythons_lock")
    file.arm(600)
    assert hang_verdict.read(file.path.parent) == [HERE]


def test_what_it_answered_stays(file: StackFile) -> None:
    file.dump()
    text = file.path.read_text()
    file.arm(0.01)
    ctypes.PyDLL(None).usleep(500_000)
    assert file.path.read_text() != text
    file.arm(600)
    assert file.path.read_text() == text


def test_a_signal_that_comes_after_the_end_does_nothing(tmp_path: Path) -> None:
    file = StackFile(tmp_path / "stack-rank0.txt")
    file.dump()
    file.arm(600)
    file.close()
    text = file.path.read_text()
    os.kill(os.getpid(), stack_timer._SIGNAL)
    compute(50)
    assert file.path.read_text() == text


def test_without_a_timer_it_says_so_and_writes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: print)
    stack_timer._output.cache_clear()
    file = StackFile(tmp_path / "stack-rank0.txt")
    file.arm(600)
    file.write(HERE.text())
    file.close()
    stack_timer._output.cache_clear()
    assert f"no timer: the script handles signal {stack_timer._SIGNAL:d}" in capfd.readouterr().err
