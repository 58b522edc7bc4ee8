"""What Linux knows about processes, and what it does for this one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_SIGSET_BYTES = 128  # of a sigset_t, in glibc and musl
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CGROUPS = Path("/sys/fs/cgroup")
_LATE_S = 5.0
_LOOK_S = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (proc(5), SigCgt). An ended child's can be read until waited for.

    Raises:
        OSError: there is no such process.
    """
    return _has(pid, "SigCgt", number)


def blocks(pid: int, number: int) -> bool:
    """Whether a process, in its main thread, blocks a signal (SigBlk): it may wait for it in another. See `catches`."""
    return _has(pid, "SigBlk", number)


def _has(pid: int, signals: str, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition(f"{signals}:")[2].split()[0], 16) >> (number - 1) & 1)


def program(pid: int) -> str:
    """Return the name of the program that a process runs (proc(5), exe); empty if it can't be read."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.removesuffix(" (deleted)")
    except OSError:
        return ""


class Stat(NamedTuple):
    """What is known about a process (proc(5), stat)."""

    state: str
    """One letter, such as R: it runs or waits for a core."""
    cpu_s: float
    """CPU seconds so far."""
    ticks: int
    """When it was started, in clock ticks after the boot."""
    pages: int
    """Resident pages of memory; those that several processes share count for each."""


def stat(pid: int) -> Stat | None:
    """Return what is known about a process; None if there is none. One that has ended is one until it is waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return Stat(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[19]), int(fields[21]))


def running(pid: int) -> Stat | None:
    """As `stat`; None also for a process that has ended and is not waited for yet."""
    found = stat(pid)
    return None if found is None or found.state in "ZX" else found


def started(pid: int) -> str:
    """Return when a process was started: which boot of the machine, and how many clock ticks after it (proc(5)).

    A later process with the same id has another. Empty if there is none, or if it has ended and is not waited for yet.
    """
    if (found := running(pid)) is None:
        return ""
    return f"{_BOOT.read_text().strip() if _BOOT.exists() else ''} {found.ticks}".strip()


def is_settled(pid: int) -> bool:
    """Return whether a process still runs, and has had a tenth of a second for it.

    A forked one is another program's by then, unless it waits for a core, or for the disk, all the time.
    """
    if (found := running(pid)) is None:
        return False
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - found.ticks / _TICKS_PER_S
    return age_s >= 0.1 and (found.state not in "RD" or found.cpu_s >= 0.1)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger; False if there is none."""
    found = stat(pid)
    return found is not None and found.state in "Tt"


class Suspensions:
    """Notices that this process was suspended: by scontrol suspend, gang scheduling, SIGSTOP.

    The clock runs meanwhile, and the other processes of the job were suspended, too. A process that waits for them asks
    every second or two, and adds the missed time to each deadline.
    """

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def missed_s(self, pause_s: float = 2.0) -> float:
        """Return for how many seconds this process was suspended since the last call; 0 if it was a little late only.

        `pause_s`: after so many seconds it asks again if nothing holds it up.
        """
        now = time.monotonic()
        missed_s, self._last_s = now - self._last_s - pause_s, now
        return missed_s if missed_s > _LATE_S else 0.0


def environment(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with (proc(5), environ); empty if they can't be read."""
    try:
        content = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return {}
    return {name: value for name, is_set, value in (one.partition("=") for one in content.split("\0")) if is_set}


def environments(values: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Return the processes that were started with these variables -> all of theirs, as far as they can be read."""
    found = {int(path.name): environment(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    return {pid: env for pid, env in found.items() if values.items() <= env.items()}


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run (proc(5), children)."""
    found = []
    with contextlib.suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(word) for word in (thread / "children").read_text().split()]
    return found


def end_with_parent(number: int, parent: int) -> None:
    """Let the kernel send this process a signal when its parent ends (prctl(2)), also if it has ended already.

    `parent` is the parent's process id, as it was when this process began.
    """
    import ctypes  # not needed in each task

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def identity(pid: int) -> str:
    """Return what names a process for others on this machine, for ever: its id, and when it was `started`."""
    return f"{pid} {started(pid)}"


def end_with(other: str) -> None:
    """Let a thread kill this process within seconds when another one ends, in whatever way.

    Unlike `end_with_parent`, it does not count which thread of the other process has started this one, and there may
    be processes between them. `other` is an `identity`. Nothing is done if none of that identity can be seen from
    here: in a container, ids may be others.
    """
    pid, _, since = other.partition(" ")

    def wait() -> None:
        while since and started(int(pid)) == since:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    if started(int(pid)) == since:
        start_thread(wait, "end-with")


def signals_descriptor(numbers: Iterable[int]) -> int:
    """Return a descriptor that can be read while one of some signals, which are blocked, waits (signalfd(2)).

    Raises:
        OSError: no descriptor is free.
    """
    import ctypes

    libc, mask = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(_SIGSET_BYTES)
    libc.sigemptyset(mask)
    for number in numbers:
        libc.sigaddset(mask, int(number))
    descriptor = int(libc.signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def name(pid: int) -> str:
    """Return what ps and top show of a process; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def rename(name: str) -> None:
    """Set what ps and top show of this process (prctl(2)); 15 bytes at most."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def adopt_orphans() -> None:
    """Become the parent of the processes below this one whose own parent ends first (prctl(2))."""
    import ctypes  # needed by jobs on this machine only

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all_below(*, but: Collection[int | None] = (), timeout_s: float = 10.0) -> bool:
    """Kill all processes below this one but some children, the adopted ones too. Returns whether all end in time."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in children(os.getpid()) if pid not in but]) and time.monotonic() < deadline:
        for pid in left:  # what these leave behind comes next
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    return not left


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread that takes no signals, and does not keep the process alive.

    The kernel gives a signal to any thread that does not block it. The main one, which waits for it, could miss the end
    of a child or a warning.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a thread inherits what is blocked
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def oom_kills(mount: Path = _CGROUPS) -> int:
    """Return how many processes of this process's control groups the kernel has killed for memory; 0 if unknown.

    See cgroups(7).
    """
    kills = 0
    with contextlib.suppress(OSError, IndexError):
        paths = {line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
        version_2 = [Path(f"{mount}{path}/memory.events") for path in paths]
        version_1 = [Path(f"{mount}/memory{path}/memory.oom_control") for path in paths]
        for file in version_2 + version_1:
            with contextlib.suppress(OSError, ValueError):
                fields = dict(line.split() for line in file.read_text().splitlines())
                kills += int(fields.get("oom_kill", 0))
    return kills
