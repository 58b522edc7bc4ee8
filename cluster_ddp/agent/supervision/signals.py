"""Signals of a job: which are passed on to a command, which process can take one, and those that wait for that.

A warning waits for a handler, and TERM for what a shell has started.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import signal
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent.command_program import SHELLS, is_interpreter, program_words

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""They come some time before the end, and by themselves should not end a process."""

_KERNELS = "KILL STOP CHLD CONT TSTP TTIN TTOU SEGV BUS FPE ILL ABRT TRAP SYS PIPE WINCH URG PROF VTALRM STKFLT"

_LONGEST_SHEBANG = 256  # binfmt_script

PASSED_ON = tuple(one for one in signal.Signals if one.name[3:] not in _KERNELS.split())
"""Signals of people and of Slurm (scancel --signal, sbatch --signal): those that come from outside."""


def hold(numbers: Iterable[int] = (*PASSED_ON, signal.SIGCHLD)) -> None:
    """Let signals wait, from now on, for whoever takes them: the process's supervisor."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def let_come(numbers: Iterable[int] = (*PASSED_ON, signal.SIGCHLD)) -> None:
    """End `hold`, in a process that was forked meanwhile: it has no supervisor."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def wait(numbers: Sequence[int], timeout_s: float) -> signal.struct_siginfo | None:
    """Take the next one of some signals, which are held; None if none comes in so many seconds.

    sigtimedwait does not wait here: if this process was stopped meanwhile, and is continued after the deadline, CPython
    returns a siginfo that nobody has filled in (3.9 to 3.14, signalmodule.c).
    """
    waits = select.poll()
    waits.register(_descriptor(tuple(numbers)), select.POLLIN)
    waits.poll(math.ceil(1000 * timeout_s))
    return signal.sigtimedwait(numbers, 0)


@functools.cache
def _descriptor(numbers: tuple[int, ...]) -> int:
    return processes.signals_descriptor(numbers)


def taken(numbers: Sequence[int]) -> list[signal.Signals]:
    """Take those of some signals that wait already."""
    found = []
    while numbers and (one := wait(numbers, 0.0)) is not None:
        found.append(signal.Signals(one.si_signo))
    return found


def is_known_to_all(received: signal.struct_siginfo) -> bool:
    """Whether a signal concerns nobody else: an end of a child, or Ctrl-C, which the terminal sends to all."""
    is_typed = received.si_signo in (signal.SIGINT, signal.SIGQUIT) and received.si_code > 0  # by the kernel
    return received.si_signo == signal.SIGCHLD or is_typed


def takers(pid: int, number: int) -> list[int]:
    """Return who has a handler for a signal: a command itself, or else those nearest below it; empty if nobody.

    A shell may have one for itself only, with which it cleans up and ends: processes below it come first. A Python
    process without one is a training that is not ready yet, or starts one: below it, only shells and Python processes
    count. Others, such as Go programs, are helpers of a training. A shell that was just forked has its parent's
    handlers until it runs a program: a signal other than TERM, which can't wait, waits for what it becomes. A process
    that has ended keeps its handlers until it is waited for, and takes nothing.

    Args:
        pid: the command's process.
        number: the signal.
    """
    level, cleaning, waits = [(pid, False)], list[int](), False
    while level:
        found, below = list[int](), []
        for one, is_below_python in level:
            program = processes.program(one)
            is_shell, is_python = program in SHELLS, is_interpreter(program)
            if _catches(one, number) and (is_shell or is_python or not is_below_python):
                if is_shell and one != pid and number != signal.SIGTERM and not processes.is_settled(one):
                    waits = True
                else:
                    (cleaning if is_shell and _cleans_up(one, number) else found).append(one)
            waits |= is_python
            below += [(child, is_below_python or is_python) for child in processes.children(one)]
        if found:
            return found
        level = below
    return [] if waits else cleaning[:1]


def saving_below(pid: int) -> list[int]:
    """Return who is to get TERM before a command: below a shell that would end of it, those that catch it."""
    is_shell = processes.program(pid) in SHELLS
    return [one for one in takers(pid, signal.SIGTERM) if one != pid] if is_shell else []


def _catches(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError, IndexError):  # it has just ended
        return processes.catches(pid, number) and processes.running(pid) is not None
    return False


def _cleans_up(shell: int, number: int) -> bool:
    """Whether a handler may be a shell's own. With a trap for EXIT, bash catches all signals that would end it.

    While it waits for a command, it catches INT, too.
    """
    return number == signal.SIGINT or _catches(shell, signal.SIGSEGV)


def is_shell(command: Sequence[str]) -> bool:
    """Whether a shell runs a command: it can't trap a signal that was ignored when it started (POSIX, trap)."""
    program = Path([*program_words(command), "env"][0])  # `env A=1` prints the environment
    if program.name in SHELLS:
        return True
    with contextlib.suppress(OSError), program.open("rb") as file:  # a script; on the PATH, it is not looked for
        first = file.readline(_LONGEST_SHEBANG)
        return first.startswith(b"#!") and any(Path(os.fsdecode(word)).name in SHELLS for word in first[2:].split())
    return False


_FIRST_S, _LONGEST_S = 0.2, 5.0  # from one look to the next: a command may never have a handler
_ENDING_S = 1.0  # a shell needs less to end after what it has started


class PendingSignals:
    """Signals that commands are to get.

    Args:
        takers: says which processes get a signal other than TERM; none: not yet.
        waits: called with a command and a signal that nobody has taken for a while.
    """

    def __init__(
        self, takers: Callable[[int, int], Sequence[int]], waits: Callable[[int, signal.Signals], object]
    ) -> None:
        self._takers, self._waits = takers, waits
        # When to look next, on the clock of time.monotonic(); and how many seconds later then.
        self._looks: dict[tuple[int, signal.Signals], tuple[float, float]] = {}
        self._saving: dict[int, set[tuple[int, str]]] = {}  # of a shell: who has got TERM in its place

    @property
    def due(self) -> float:
        """When `deliver` has something to do, on the clock of time.monotonic()."""
        return min((at for at, _ in self._looks.values()), default=float("inf"))

    def add(self, pids: Iterable[int], number: signal.Signals, *, wait_s: float = 0.0) -> None:
        """Send a signal to commands, those that still run in so many seconds."""
        for pid in pids:
            self._looks.setdefault((pid, number), (time.monotonic() + wait_s, _FIRST_S))

    def deliver(self, running: Container[int]) -> None:
        """Send what can be sent now to commands that run."""
        now = time.monotonic()
        for (pid, number), (at, then_s) in list(self._looks.items()):
            if pid in running and now < at:
                continue
            del self._looks[pid, number]
            is_term = number == signal.SIGTERM
            if pid in running and (wait_s := self._end(pid) if is_term else self._warn(pid, number, then_s)):
                self._looks[pid, number] = (now + wait_s, wait_s)

    def _warn(self, pid: int, number: signal.Signals, then_s: float) -> float:
        """Send a signal to who can take it. Returns seconds to the next look; 0 if it is sent.

        If nobody can, it waits: the command would die of it.
        """
        for one in (takers := self._takers(pid, number)):
            send(one, number)
        if not takers and then_s < _LONGEST_S <= 1.1 * then_s:
            self._waits(pid, number)
        return 0.0 if takers else min(1.1 * then_s, _LONGEST_S)

    def _end(self, pid: int) -> float:
        """Send TERM to a command; to a shell, once those have ended that save in its place. Returns as `_warn` does."""
        saving = {(one, begun) for one in saving_below(pid) if (begun := processes.started(one))}
        told = self._saving.pop(pid, set())
        for one, _ in saving - told:
            send(one, signal.SIGTERM)
        if saving:
            self._saving[pid] = saving
        elif not told:
            send(pid, signal.SIGTERM)
        return _FIRST_S if saving else _ENDING_S if told else 0.0


def send(pid: int, number: int) -> None:
    """Send a signal to a process, unless it has ended, or runs as somebody else."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)
        if number == signal.SIGTERM:
            os.kill(pid, signal.SIGCONT)  # a suspended process could not end
