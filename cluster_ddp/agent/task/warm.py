"""A process that has imported torch and waits, while a rank trains: after a failure it becomes the next rank.

It runs `cluster_ddp.runtime.fork.warm`, with the interpreter, the options and the environment of the rank's command:
none of them could be changed later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from cluster_ddp.agent import python_command
from cluster_ddp.agent.options import Options
from cluster_ddp.agent.task import signals
from cluster_ddp.agent.task.keeper import say
from cluster_ddp.agent.task.spawn import spawn
from cluster_ddp.contract import Env
from cluster_ddp.errors import SpecError

MODULE = "cluster_ddp.runtime.fork.warm"
AFTER_S = 10.0
"""Seconds after the start of a rank: until then it needs the CPUs itself."""

BEGUN = "begun\n"
"""What the process says when its Python has started."""

_BEGIN_S = 5.0
_LONGEST = 4096
_NEVER = float("inf")


class Warm:
    """The waiting process of one task; there may be none.

    Args:
        options: of the job.
    """

    def __init__(self, options: Options) -> None:
        self.pid: int | None = None
        self._is_off = options.cold
        self._why_cold = "" if options.cold else _why_cold(options)
        self._due = _NEVER
        self._link: socket.socket | None = None
        self._command: Sequence[str] = ()

    def begin(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Note that a rank has been started: the process becomes that of the start after it.

        Args:
            command: of the rank.
            env: of the rank.
        """
        self._command, self._env = command, {**env, Env.START: str(int(env.get(Env.START, "0")) + 1)}
        self._due = _NEVER if self._is_off or self._why_cold else time.monotonic() + AFTER_S

    def begin_at_once(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the process, for this very start. See `begin`."""
        self._command, self._env = command, {**env}
        self._due = _NEVER if self._is_off or self._why_cold else 0.0
        self.look()

    def look(self) -> float:
        """Start the process, if it is time. Returns the seconds until then."""
        if time.monotonic() >= self._due:
            self._due = _NEVER
            self._start()
        return self._due - time.monotonic()

    def become(self, command: Sequence[str], env: Mapping[str, str], *, ignore_warnings: bool) -> int | None:
        """Let the process become a rank.

        Args:
            command: of the rank.
            env: of the rank.
            ignore_warnings: whether it ignores USR1 and USR2, until it has a handler.

        Returns:
            Its process id; None if there is no such process: then the command has to be started.
        """
        pid, link, self._due = self.pid, self._link, _NEVER
        if pid is not None and link is not None and self._lives(pid, link):
            more = {name: value for name, value in env.items() if self._env.get(name) != value}
            at = python_command.interpreter_words(command)
            said = {"command": [*command], "at": at, "env": more, "ignore_warnings": ignore_warnings}
            line = json.dumps(said).encode() + b"\n"
            with contextlib.suppress(OSError), link:
                link.sendall(line[socket.send_fds(link, [line], [0, 1, 2]) :])
                self.pid = self._link = None
                self._say(env)
                return pid
        self.end()
        self._say(env)
        return None

    def end(self) -> None:
        """End the process, if there is one."""
        if self._link is not None:
            self._link.close()
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self.pid = self._link = None

    def _start(self) -> None:
        own, link = socket.socketpair()
        with link:
            os.set_inheritable(link.fileno(), True)
            at = python_command.interpreter_words(self._command)
            words = [*self._command[:at], "-m", MODULE, str(link.fileno())]
            with contextlib.suppress(OSError):  # such as too many processes: the next start is a cold one
                self.pid = spawn(words, self._env, silent=True, default=signals.PASSED_ON)
        self._link = own

    def _lives(self, pid: int, link: socket.socket) -> bool:
        """Whether the process has begun. If it can't import all, it says why, and starts the command anew itself."""
        link.settimeout(_BEGIN_S)
        try:
            said = link.recv(_LONGEST).decode()
        except OSError:
            return False
        link.settimeout(None)
        if said:
            self._why_cold = said[len(BEGUN) :]
            return True
        self.pid = None
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) >= 0:  # else it was killed: the next one may live
            self._why_cold = f"its Python can't run {MODULE}"
        return False

    def _say(self, env: Mapping[str, str]) -> None:
        """Say once why a restart begins with a new Python."""
        if self._command and self._why_cold and not self._is_off and env.get("SLURM_PROCID") == "0":
            self._is_off = True
            say(f"Each restart begins with a new Python: {self._why_cold}.")


def _why_cold(options: Options) -> str:
    if options.launcher == "torchrun":
        return "torchrun starts them"
    if options.container is not None:
        return "they are in a container"
    try:
        python_command.interpreter_words(options.command)
    except SpecError:
        return "the command is no Python script or module"
    return ""
