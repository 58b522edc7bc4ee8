"""What submitit runs in each task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slowness import scaled

from cluster_ddp.launch.backends.submitit_task import WARNINGS, Command


def test_a_commands_status_is_the_tasks() -> None:
    assert Command(("true",))() == 0
    for argv, status in ((("bash", "-c", "exit 7"), 7), (("bash", "-c", "kill -9 $$"), 137)):
        with pytest.raises(SystemExit) as raised:
            Command(argv)()
        assert raised.value.code == status


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75)]
)
def test_a_command_gets_the_stop_signals(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """Slurm sends them to all processes of the task, or to the first alone (proctrack/cgroup)."""
    ready = tmp_path / "ready"
    handler = f"signal.signal({number.value}, lambda *a: sys.exit(75));" if status == 75 else ""
    command = f"import pathlib, signal, sys, time; {handler} pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    code = (
        "import signal, sys; signal.signal(signal.SIGUSR2, lambda *a: None)  # submitit's handler\n"
        "from cluster_ddp.launch.backends.submitit_task import Command\n"
        f"Command((sys.executable, '-c', {command!r}))()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + scaled(30)
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=scaled(30)) == status


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_waits_for_a_command_that_has_no_handler_yet(tmp_path: Path, number: signal.Signals) -> None:
    """Slurm sends it to all processes, the command's Python too: neither dies of it, and the handler gets it later."""
    ready = tmp_path / "ready"
    command = (
        "import pathlib, signal, sys, time\n"
        f"ready = pathlib.Path({str(ready)!r}); ready.touch()\n"
        "while ready.exists(): time.sleep(0.02)\n"
        f"signal.signal({number.value}, lambda *a: sys.exit(75)); time.sleep(60)\n"
        "import cluster_ddp"
    )
    code = (
        "import sys\n"
        "from cluster_ddp.launch.backends.submitit_task import Command\n"
        f"Command((sys.executable, '-c', {command!r}))()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + scaled(60)
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, number)
    ready.unlink()
    assert process.wait(timeout=scaled(60)) == 75


def test_a_shell_can_trap_the_warnings() -> None:
    with pytest.raises(SystemExit) as raised:
        Command(("bash", "-c", "trap 'exit 75' USR1; kill -USR1 $$; exit 1"))()
    assert raised.value.code == 75
