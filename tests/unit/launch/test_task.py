"""What submitit runs in each task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cluster_ddp.launch.task import Command, RequeuedTask, Task


def test_a_commands_status_is_the_tasks() -> None:
    assert Command(("true",))() == 0
    for argv, status in ((("bash", "-c", "exit 7"), 7), (("bash", "-c", "kill -9 $$"), 137)):
        with pytest.raises(SystemExit) as raised:
            Command(argv)()
        assert raised.value.code == status


@pytest.mark.parametrize(
    ("number", "handled", "status"),
    [(signal.SIGTERM, False, 143), (signal.SIGTERM, True, 3), (signal.SIGUSR2, False, 0), (signal.SIGUSR2, True, 3)],
)
def test_signals(tmp_path: Path, number: signal.Signals, handled: bool, status: int) -> None:
    """TERM is passed on; the warning signal reaches a command on its own, and kills none that doesn't know it."""
    ready = tmp_path / "ready"
    handler = f"signal.signal({number.value}, lambda *a: sys.exit(3));" if handled else ""
    command = f"import pathlib, signal, sys, time; {handler} pathlib.Path({str(ready)!r}).touch(); time.sleep(1)"
    code = (
        "import signal, sys; signal.signal(signal.SIGUSR2, lambda *a: None)  # submitit's handler\n"
        f"from cluster_ddp.launch.task import Command; Command((sys.executable, '-c', {command!r}))()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 30
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number == signal.SIGTERM:
        process.send_signal(number)
    else:
        os.killpg(process.pid, number)  # as Slurm does: to all processes of the task
    assert process.wait(timeout=30) == status


def test_after_a_requeue_it_is_the_same_again() -> None:
    task = RequeuedTask(Command(("true",)))
    assert task.checkpoint().function is task
    assert not hasattr(Task(Command(("true",))), "checkpoint")
    assert threading.active_count() == 1
