"""What bash does around a command in each task: it passes signals on, and tells of status 75."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_ddp.submission.task_command import of_command
from slowness import scaled

from cluster_ddp.submission.render import _rendered
from cluster_ddp.submission.spec import JobSpec

CGROUPS = Path("/sys/fs/cgroup")
HOST = socket.gethostname()
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


def start(
    *command: str,
    marker: Path | None = None,
    stderr: int | None = None,
    launcher: str = "srun",
    mount: Path = CGROUPS,
    preexec_fn: Callable[[], object] | None = None,
    **more: str,
) -> subprocess.Popen[str]:
    spec = JobSpec(name="x", command=command, signal="R:SIGALRM@60", launcher=launcher)
    text = _rendered("task.sh.j2", spec=spec, task=of_command(spec)).replace(str(CGROUPS), str(mount))
    env = {**os.environ, **({} if marker is None else {"CLUSTER_DDP_STOPPED": str(marker)}), **more}
    return subprocess.Popen(
        ["bash", "-c", text, "bash", *command],
        env=env,
        preexec_fn=preexec_fn,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(60)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("exit 7", 7), ("kill -9 $$", 137), ("exit 75", 75)])
def test_the_commands_status_is_the_tasks(tmp_path: Path, command: str, status: int) -> None:
    """75 is noted in the stop marker, too."""
    marker = tmp_path / "it's the marker"
    assert start("bash", "-c", command, marker=marker).wait(timeout=scaled(60)) == status
    assert marker.exists() is (status == 75)
    assert start("bash", "-c", command).wait(timeout=scaled(60)) == status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_the_shell_says_nothing_of_a_command_that_a_signal_has_ended(number: signal.Signals) -> None:
    """ "bash: line 41: 6427 Aborted ( trap - INT; exec …" would be the last line of its log."""
    process = start("bash", "-c", f"sleep 0.5; echo mine >&2; kill -{number.value} $$", stderr=subprocess.PIPE)
    assert process.communicate(timeout=scaled(60))[1] == "mine\n"
    assert process.returncode == 128 + number


def test_the_first_task_that_fails_says_so(tmp_path: Path) -> None:
    """The error is its script's to tell, if that uses cluster_ddp."""
    cases = [
        ("exit 7", 7, f"rank 2 on {HOST}\nstatus 7\n"),
        ("kill -KILL $$", 137, f"rank 2 on {HOST}: killed by SIGKILL\nstatus 137\n"),
        ("ulimit -c 0; kill -SEGV $$", 139, f"rank 2 on {HOST}: killed by SIGSEGV\nstatus 139\n"),
        ("ulimit -c 0; kill -ABRT $$", 134, f"rank 2 on {HOST}\nstatus 134\n"),
        ("exit 255", 255, f"rank 2 on {HOST}\nstatus 255\n"),
        (f'echo "rank 2 on {HOST}: ValueError: x" >"$CLUSTER_DDP_FAILED"; exit 1', 1, None),
        ('echo "rank 1 on n1: ValueError: x" >"$CLUSTER_DDP_FAILED"; exit 1', 1, "rank 1 on n1: ValueError: x\n"),
        ("exit 75", 75, ""),
        ("true", 0, ""),
    ]
    markers = [tmp_path / f"it's failed {number}" for number in range(len(cases))]
    tasks = [start("bash", "-c", one[0], RANK="2", CLUSTER_DDP_FAILED=str(path)) for one, path in zip(cases, markers)]
    for (_, status, said), marker, task in zip(cases, markers, tasks):
        assert task.wait(timeout=scaled(60)) == status
        expected = f"rank 2 on {HOST}: ValueError: x\nstatus 1\n" if said is None else said
        assert (marker.read_text() if marker.exists() else "") == expected
    assert start("false", RANK="3", CLUSTER_DDP_FAILED=str(tmp_path / "it's failed 0")).wait(timeout=scaled(60)) == 1
    assert (tmp_path / "it's failed 0").read_text() == f"rank 2 on {HOST}\nstatus 7\n"


@pytest.mark.skipif(not os.access(CGROUPS / "memory", os.W_OK), reason="no control groups of version 1 to make")
def test_the_kernel_kills_for_memory(tmp_path: Path) -> None:
    """The real one, in a control group with less memory than the command needs."""
    group = CGROUPS / "memory" / f"test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(40 << 20))
        command = (sys.executable, "-S", "-c", "x = b'x' * (100 << 20)")
        env = {"RANK": "2", "CLUSTER_DDP_FAILED": str(tmp_path / "failed")}
        task = start(*command, preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())), **env)
        assert task.wait(timeout=scaled(60)) == 137
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    assert (tmp_path / "failed").read_text() == f"rank 2 on {HOST}: killed by the kernel for memory\nstatus 137\n"


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("file", ["memory.events", "memory.oom_control"])
def test_the_kernels_kills_for_memory_are_said(tmp_path: Path, file: str, shell: str) -> None:
    """From made files of this process's control groups; those before it began do not count. sh is torchrun's worker."""
    below = tmp_path / ("memory" if file == "memory.oom_control" else "")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        (folder := Path(f"{below}{line.split(':', 2)[2]}")).mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("low 0\noom_kill 2\n")
    (agent := tmp_path / "python").write_text('#!/bin/sh\nwhile [ "$1" != --no-python ]; do shift; done; shift; "$@"\n')
    agent.chmod(0o755)
    env = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1", "NODE_RANK": "0", "RANK": "2"}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CLUSTER_DDP_FAILED": str(tmp_path / "failed")}
    launcher = "srun" if shell == "bash" else "torchrun"
    for kills, end, said in (
        (2, "kill -KILL $$", ": killed by SIGKILL\nstatus 137\n"),
        (3, "kill -KILL $$", ": killed by the kernel for memory\nstatus 137\n"),
        (4, "exit 1", "\nstatus 1\n"),
    ):
        (tmp_path / "failed").unlink(missing_ok=True)
        command = f"sed -i 's/kill .*/kill {kills}/' $(find {tmp_path} -name {file}); {end}"
        task = start("bash", "-c", command, launcher=launcher, mount=tmp_path, stderr=subprocess.PIPE, **env)
        printed = task.communicate(timeout=scaled(60))[1]
        assert (tmp_path / "failed").read_text() == f"rank 2 on {HOST}{said}"
        words = f"The kernel has killed a process of rank 2 on {HOST} for memory (oom_kill).\n"
        assert (words in printed) == (kills > 2)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        *((signal.SIGTERM, 143), (signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75)),
        *((signal.SIGHUP, 75), (signal.SIGINT, 75), (signal.SIGALRM, 75)),
    ],
)
@pytest.mark.parametrize("whom", ["the shell alone", "all"])
def test_a_command_gets_the_stop_signals(tmp_path: Path, number: signal.Signals, status: int, whom: str) -> None:
    """Slurm sends them to all processes of the task, or to the first alone (proctrack/cgroup)."""
    ready = tmp_path / "ready"
    handler = f"signal.signal({number.value}, lambda *a: sys.exit(75));" if status == 75 else ""
    command = f"import pathlib, signal, sys, time; {handler} pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    process = start(sys.executable, "-c", command)
    wait_until(ready.exists)
    (os.killpg if whom == "all" else os.kill)(process.pid, number)
    assert process.wait(timeout=scaled(30)) == status


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_waits_for_a_command_that_has_no_handler_yet(tmp_path: Path, number: signal.Signals) -> None:
    ready = tmp_path / "ready"
    command = (
        "import pathlib, signal, sys, time\n"
        f"ready = pathlib.Path({str(ready)!r}); ready.touch()\n"
        "while ready.exists(): time.sleep(0.02)\n"
        f"signal.signal({number.value}, lambda *a: sys.exit(75)); time.sleep(60)\n"
    )
    process = start(sys.executable, "-c", command)
    wait_until(ready.exists)
    process.send_signal(number)
    time.sleep(0.5)
    assert process.poll() is None
    ready.unlink()
    assert process.wait(timeout=scaled(60)) == 75


def test_a_command_that_never_listens_is_not_warned() -> None:
    process = start("bash", "-c", "echo ready; sleep 1.5; exit 3")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=scaled(60)) == 3


def test_the_end_of_the_others_does_not_change_the_status(tmp_path: Path) -> None:
    """srun sends TERM to the tasks that are left when one has ended."""
    process = start("bash", "-c", "trap 'exit 75' USR1; echo ready; while true; do sleep 0.05; done")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.02)
    assert process.wait(timeout=scaled(60)) == 75


def test_a_shell_can_trap_the_warnings() -> None:
    assert start("bash", "-c", "trap 'exit 75' USR1; kill -USR1 $$; exit 1").wait(timeout=scaled(60)) == 75


LISTENS = "import socket; held = socket.socket(); held.bind(('', {port})); held.listen(); import time; time.sleep(2)"


@pytest.mark.parametrize(
    ("what", "more", "is_warned"),
    [
        ("pass", {}, True),
        (LISTENS, {}, False),
        ("pass", {"RANK": "1"}, False),
        ("pass", {"WORLD_SIZE": "1"}, False),
        ("import sys; sys.exit(3)", {}, False),
        ("import cluster_ddp", {}, False),
    ],
)
def test_ranks_that_have_not_met_are_told_so(what: str, more: dict[str, str], is_warned: bool) -> None:
    """By rank 0, which listens on MASTER_PORT if a foreign script has joined a process group."""
    port = free_port()
    env = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": str(port), **more}
    process = start(sys.executable, "-c", what.format(port=port), stderr=subprocess.PIPE, **env)
    said = process.communicate(timeout=scaled(60))[1]
    assert ("warning: The 4 ranks of this job have not met: rank 0 did not listen" in said) is is_warned
    assert is_warned or said == ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def test_python_that_imports_us_begins_with_warnings_ignored() -> None:
    show = "import signal; print(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)"
    for more, ignored in (("", False), ("\nimport cluster_ddp", True)):
        process = start(sys.executable, "-c", show + more)
        assert process.communicate(timeout=scaled(60))[0] == f"{ignored}\n"
