"""Signals around a task's command: passed on, held for it, or none of its business."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled, stays, wait_until
from tasks import AT_ONCE, PLACE, WARNINGS, started

from cluster_ddp import processes
from cluster_ddp.agent.supervision import signals

IGNORING = ("--ignore-warnings",)


def handler(number: int, ready: Path, *, wait_for: Path | None = None) -> str:
    """A script that ends with 75 at a signal; it has no handler until a file is there, but a helper that has one.

    It sleeps in short pieces: Python handles a signal that comes just before a sleep begins only after it.
    """
    wait = "" if wait_for is None else f"\nwhile not pathlib.Path({str(wait_for)!r}).exists(): time.sleep(0.02)\n"
    first = f"import pathlib, signal, subprocess, sys, time; ready = pathlib.Path({str(ready)!r})\n"
    first += "helper = subprocess.Popen(['dd'], stdin=-1, stderr=-3)\n" if wait else ""
    take = f"signal.signal({number}, lambda *_: sys.exit(75))\n"
    return (
        first + ("ready.touch()" + wait + take if wait else take + "ready.touch()\n") + "while True: time.sleep(0.1)\n"
    )


@pytest.mark.parametrize(
    ("number", "status", "whom"),
    [
        *((signal.SIGTERM, 75, "the agent, of Slurm"), (signal.SIGTERM, 143, "all"), (signal.SIGTERM, 75, "all")),
        *((number, 75, "all") for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)),
        *((number, 75, "the agent") for number in (signal.SIGHUP, signal.SIGINT, signal.SIGALRM, signal.SIGQUIT)),
    ],
)
def test_a_command_gets_the_stop_signals(tmp_path: Path, number: signal.Signals, status: int, whom: str) -> None:
    """Slurm sends them to all processes of a task, or to the first alone (proctrack/cgroup)."""
    ready = tmp_path / "it's ready"
    code = handler(number if status == 75 else signal.SIGUSR1, ready)
    with started(sys.executable, "-c", code, **(AT_ONCE if whom == "the agent" else {})) as task:
        wait_until(ready.exists)
        (os.killpg if whom == "all" else os.kill)(task.pid, number)
        assert task.wait(timeout=scaled(LIMIT_S)) == status


@pytest.mark.parametrize("around", ["", "trap : EXIT; "])
@pytest.mark.parametrize("options", [(), IGNORING])
@pytest.mark.parametrize("number", [*WARNINGS, signal.SIGHUP])
def test_a_warning_waits_for_a_command_that_has_no_handler_yet(
    tmp_path: Path, number: signal.Signals, options: tuple[str, ...], around: str
) -> None:
    ready, go = tmp_path / "ready", tmp_path / "go"
    command = [sys.executable, "-c", handler(number, ready, wait_for=go)]
    if around:
        command = ["bash", "-c", f"{around}{shlex.join(command)}; exit $?"]
    with started(*command, options=options, **AT_ONCE) as task:
        wait_until(ready.exists)
        task.send_signal(number)
        if options and number in WARNINGS and not around:
            os.killpg(task.pid, number)  # as Slurm does without control groups
        stays(lambda: task.poll() is None)
        go.touch()
        assert task.wait(timeout=scaled(LIMIT_S)) == 75


def test_a_warning_that_nobody_takes_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After most of a minute: a training may still be starting."""
    told: list[tuple[int, signal.Signals]] = []
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pending = signals.PendingSignals(lambda pid, number: [], lambda pid, number: told.append((pid, number)))
    pending.add([7], signal.SIGUSR1)
    said_at = 0.0
    while now[0] < 300:
        pending.deliver({7})
        said_at = said_at or (now[0] if told else 0.0)
        now[0] = pending.due
    assert told == [(7, signal.SIGUSR1)]
    assert 30 < said_at < 60


def test_a_warning_before_the_command_is_started_is_kept_for_it() -> None:
    """It would end the agent, and with it the job: here the agent waits for an answer of the job's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(scaled(60))
        channel = {"CLUSTER_DDP_CHANNEL": f"127.0.0.1:{server.getsockname()[1]}"}
        with started("bash", "-c", "trap 'exit 75' USR1; while :; do sleep 0.1; done", **channel) as task:
            connection, _ = server.accept()
            task.send_signal(signal.SIGUSR1)
            connection.close()
            assert task.wait(timeout=scaled(LIMIT_S)) == 75


def test_a_command_that_never_listens_is_not_warned() -> None:
    with started("bash", "-c", "echo ready; sleep 0.7; exit 3", **AT_ONCE) as task:
        assert task.stdout is not None and task.stdout.readline() == "ready\n"
        task.send_signal(signal.SIGUSR1)
        assert task.wait(timeout=scaled(LIMIT_S)) == 3


@pytest.mark.parametrize(
    ("around", "number"),
    [
        *(("bash -c", signal.SIGUSR1), ("bash -c", signal.SIGTERM), ("sh -c", signal.SIGTERM)),
        (f"{sys.executable} -c", signal.SIGUSR1),
    ],
)
def test_the_training_behind_another_program_can_save(tmp_path: Path, around: str, number: signal.Signals) -> None:
    ready = tmp_path / "ready"
    command = [sys.executable, "-c", handler(number, ready)]
    code = f"{shlex.join(command)}; exit $?"
    if around.startswith(sys.executable):
        code = f"import subprocess, sys; sys.exit(subprocess.call({command}))"
    with started(*around.rsplit(maxsplit=1), code, options=IGNORING, **AT_ONCE) as task:
        wait_until(ready.exists)
        os.killpg(task.pid, signal.SIGCONT)
        task.send_signal(number)
        assert task.wait(timeout=scaled(LIMIT_S)) == 75


def test_an_agent_below_another_one_does_not_wait_before_it_passes_a_signal_on(tmp_path: Path) -> None:
    """Of the seconds between a warning and the end, torchrun would have lost one more, and fork, too."""
    task = "from cluster_ddp.agent.supervision import supervisor; supervisor._PASS_ON_S = 600"
    never = f"from cluster_ddp.agent import __main__; {task}"
    command = [sys.executable, "-c", handler(signal.SIGUSR1, tmp_path / "ready")]
    agent = [sys.executable, "-c", f"{never}; __main__.run()", "task", "--", *command]
    with started(*agent) as task:
        wait_until((tmp_path / "ready").exists)
        task.send_signal(signal.SIGUSR1)
        assert task.wait(timeout=scaled(LIMIT_S)) == 75


def test_a_script_that_goes_on_after_its_training_has_saved_is_ended(tmp_path: Path) -> None:
    training = shlex.join([sys.executable, "-c", handler(signal.SIGTERM, tmp_path / "ready")])
    text = f"{training}; echo $? >{shlex.quote(str(tmp_path / 'status'))}; sleep 600 & wait"
    with started("bash", "-c", text, **AT_ONCE) as task:
        wait_until((tmp_path / "ready").exists)
        task.terminate()
        assert task.wait(timeout=scaled(LIMIT_S)) == 143
    assert (tmp_path / "status").read_text() == "75\n"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM])
def test_a_shell_that_cleans_up_at_its_end_is_passed_by(tmp_path: Path, number: signal.Signals) -> None:
    """With a trap for EXIT, bash catches all signals, to end of them: its training would be lost."""
    ready = tmp_path / "ready"
    command = shlex.join([sys.executable, "-c", handler(number, ready)])
    with started("bash", "-c", f"trap 'echo cleaned up' EXIT; {command}; exit $?", **AT_ONCE) as task:
        wait_until(ready.exists)
        task.send_signal(number)
        assert task.communicate(timeout=scaled(LIMIT_S))[0] == "cleaned up\n"
        assert task.returncode == 75


def test_a_shell_takes_the_warning_that_it_traps_before_what_it_has_started(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-c", handler(signal.SIGUSR1, tmp_path / "ready")])
    text = f"trap 'kill -TERM $!; exit 5' USR1; {command} & while :; do wait; done"
    with started("bash", "-c", text, options=IGNORING, **AT_ONCE) as task:
        wait_until((tmp_path / "ready").exists)
        task.send_signal(signal.SIGUSR1)
        assert task.wait(timeout=scaled(LIMIT_S)) == 5


def test_a_shell_that_traps_both_is_told_if_nobody_else_can_be() -> None:
    text = "trap 'exit 5' USR1; trap : EXIT; echo ready; while :; do sleep 0.05; done"
    with started("bash", "-c", text, **AT_ONCE) as task:
        assert task.stdout is not None and task.stdout.readline() == "ready\n"
        task.send_signal(signal.SIGUSR1)
        assert task.wait(timeout=scaled(LIMIT_S)) == 5


def test_a_shell_that_was_just_forked_gets_no_signal_of_its_parents() -> None:
    """It has the parent's handlers until it runs `sleep`: the signal would be lost."""
    text = "trap 'exit 5' USR1; trap : EXIT; echo ready; while :; do sleep 0.001; done"
    with subprocess.Popen(["bash", "-c", text], stdout=subprocess.PIPE) as shell:
        try:
            assert shell.stdout is not None and shell.stdout.readline() == b"ready\n"
            found = [signals.takers(shell.pid, signal.SIGUSR1) for _ in range(1500)]
        finally:
            shell.kill()
    assert {pid for takers in found for pid in takers} == {shell.pid}


def test_a_training_that_has_ended_gets_no_signal(tmp_path: Path) -> None:
    """Its shell, which waits for a core, starts the next one."""
    training = shlex.join([sys.executable, "-c", handler(signal.SIGUSR1, tmp_path / "ready")])
    with subprocess.Popen(["bash", "-c", f"{training}; exit $?"]) as shell:
        try:
            wait_until((tmp_path / "ready").exists)
            (child,) = signals.takers(shell.pid, signal.SIGUSR1)
            shell.send_signal(signal.SIGSTOP)
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: processes.running(child) is None)
            assert not signals.takers(shell.pid, signal.SIGUSR1)
        finally:
            shell.kill()


def test_the_end_of_the_others_does_not_change_the_status() -> None:
    """srun sends TERM to the tasks that are left when one has ended."""
    with started("bash", "-c", "trap 'exit 75' USR1; echo ready; while :; do sleep 0.05; done", **AT_ONCE) as task:
        assert task.stdout is not None and task.stdout.readline() == "ready\n"
        wait_until(lambda: task.send_signal(signal.SIGUSR1) or task.poll() is not None)
        assert task.returncode == 75


def test_a_suspended_command_ends_of_term() -> None:
    with started("bash", "-c", "echo $$; kill -STOP $$; exit 1", **AT_ONCE) as task:
        assert task.stdout is not None
        pid = int(task.stdout.readline())
        wait_until(lambda: processes.is_stopped(pid))
        task.terminate()
        assert task.wait(timeout=scaled(LIMIT_S)) == 143


def test_what_nohup_has_started_survives_the_end_of_a_terminal(tmp_path: Path) -> None:
    code = "import signal, time; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True); time.sleep(600)"
    with started("sh", "-c", shlex.join([sys.executable, "-c", code]) + "; exit 4", program=("nohup",)) as task:
        assert task.stdout is not None and task.stdout.readline() == "True\n"
        os.killpg(task.pid, signal.SIGHUP)
        stays(lambda: task.poll() is None, 0.3)


@pytest.mark.parametrize("is_typed", [True, False])
def test_what_is_typed_reaches_a_command_once_as_what_is_sent_does(tmp_path: Path, is_typed: bool) -> None:
    """The terminal sends Ctrl-C to all; kill(1) to the agent alone."""
    ready, counted = tmp_path / "ready", tmp_path / "counted"
    code = f"import signal, time, pathlib; counted = pathlib.Path({str(counted)!r}).open('a', buffering=1)\n"
    code += f"signal.signal(2, lambda *_: counted.write('x'))\npathlib.Path({str(ready)!r}).touch()\n"
    code += "end = time.monotonic() + 1.5\nwhile time.monotonic() < end: time.sleep(0.05)\ncounted.close()\n"
    mine, theirs = pty.openpty()
    env = {name: value for name, value in PLACE.items() if name != "SLURM_PROCID"} | {
        "CLUSTER_DDP_LOCAL_JOB_ID": "1",
        "RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    agent = [sys.executable, "-m", "cluster_ddp.agent", "task", "--", sys.executable, "-c", code]
    # setsid makes it the terminal's owner
    task = subprocess.Popen(["setsid", "--ctty", "--wait", *agent], env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    try:
        wait_until(ready.exists)
        if is_typed:
            os.write(mine, b"\x03")
        else:
            (pid,) = children(task.pid) or [task.pid]
            os.kill(pid, signal.SIGINT)
        assert task.wait(timeout=scaled(LIMIT_S)) == 0
        assert counted.read_text() == "x"
    finally:
        task.kill()
        task.wait()
        for one in (mine, theirs):
            os.close(one)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def test_the_kernels_own_signals_are_left_to_it() -> None:
    kernels = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGPIPE, signal.SIGTSTP)
    assert not set(kernels) & set(signals.PASSED_ON)
    asked = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGALRM}
    assert asked <= set(signals.PASSED_ON)


def test_only_shells_are_started_without_what_they_could_not_trap(tmp_path: Path) -> None:
    for text, is_shell in (("#!/bin/bash -e\n", True), ("#!/usr/bin/python3\n", False), ("\x7fELF", False)):
        (tmp_path / "run it").write_text(text)
        assert signals.is_shell([str(tmp_path / "run it")]) is is_shell
    assert signals.is_shell(["bash", "run.sh"]) and signals.is_shell(["env", "A=1", "/bin/sh", "-c", "x"])
    assert not signals.is_shell(["python", "train.py"])
