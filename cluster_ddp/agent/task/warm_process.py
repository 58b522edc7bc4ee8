"""A process that has imported torch and waits, while a rank trains: after a failure it becomes the next rank.

It runs `cluster_ddp.runtime.fork.warm_rank`, with the interpreter, the options and the environment of the rank's
command: none of them could be changed later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from cluster_ddp.agent import command_program
from cluster_ddp.agent.launch_options import Options
from cluster_ddp.agent.task import python_module, signals
from cluster_ddp.agent.task.spawn import spawn
from cluster_ddp.agent.task.supervisor import say
from cluster_ddp.errors import SpecError, one_line

MODULE = "cluster_ddp.runtime.fork.warm_rank"
READY = b"ready\n"
"""What the process says once it has imported all. If it can't, it says why, and ends."""

AFTER_S = 10.0
"""Seconds after the start of a rank: until then it needs the CPUs itself."""

# How long a restart waits for imports that are under way.
_IMPORT_S = 30.0
_LONGEST = 4096
_NEVER = float("inf")


class Warm:
    """The waiting process of one task; there may be none."""

    def __init__(self, options: Options) -> None:
        self.pid: int | None = None
        self._why_cold = "--cold" if options.cold else _why_cold(options)
        self._has_said = options.cold
        self._due = _NEVER
        self._link: socket.socket | None = None
        self._command: Sequence[str] = ()

    def begin(self, command: Sequence[str], env: Mapping[str, str], *, at_once: bool = False) -> None:
        """Note what the process becomes, and when it is to be started; see `look`."""
        self._command, self._env = python_module.shown(command), env
        self._due = _NEVER if self._why_cold else time.monotonic() + (0.0 if at_once else AFTER_S)

    def look(self) -> float:
        """Start the process, if it is time. Returns the seconds until then."""
        if time.monotonic() >= self._due:
            self._due = _NEVER
            self._start()
        return self._due - time.monotonic()

    def was_killed(self) -> bool:
        """Whether the process was killed since the last call, as by the kernel for memory: then there is no other."""
        ended, status = (0, 0) if self.pid is None else os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            return False
        self.pid, is_killed = None, os.WIFSIGNALED(status)
        how = "was killed" if is_killed else f"has ended with status {os.waitstatus_to_exitcode(status)}"
        self._why_cold = ("" if is_killed else self._reason()) or f"the process that waited for it {how}"
        return is_killed

    def become(self, command: Sequence[str], env: Mapping[str, str], *, ignore_warnings: bool) -> int | None:
        """Let the process become a rank, once it has imported all. Returns its process id.

        None if there is no such process: then the command has to be started.
        """
        self._due = _NEVER
        self.was_killed()
        if self.pid is not None:
            self._why_cold = self._reason()
        if self.pid is not None and self._link is not None and not self._why_cold:
            more = {name: value for name, value in env.items() if self._env.get(name) != value}
            words = python_module.shown(command)
            words = words[command_program.interpreter_words(words) :]
            said = {"words": [*words], "env": more, "ignore_warnings": ignore_warnings}
            line = json.dumps(said).encode() + b"\n"
            try:
                with self._link as link:
                    if rest := line[socket.send_fds(link, [line], [0, 1, 2]) :]:  # who has all may have closed it
                        link.sendall(rest)
                pid, self.pid = self.pid, None
                return pid
            except OSError as error:  # it has just ended
                self._why_cold = f"the process that waited for it has ended ({error.strerror})"
        self.end()
        self._say(env)
        return None

    def end(self) -> None:
        """End the process, if there is one. Whoever waits for all children waits for it."""
        if self._link is not None:
            self._link.close()
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pid = self._link = None

    def _start(self) -> None:
        self._link, link = socket.socketpair()
        self._link.settimeout(_IMPORT_S)
        with link:
            os.set_inheritable(link.fileno(), True)
            at = command_program.interpreter_words(self._command)
            words = [
                *self._command[:at],
                *python_module.words(MODULE, runs_program=True),
                str(link.fileno()),
                *self._command[at:],
            ]
            with contextlib.suppress(OSError):  # such as too many processes: the next start is a cold one
                self.pid = spawn(words, self._env, silent=True, default=signals.PASSED_ON)

    def _reason(self) -> str:
        """Wait until the process has imported all. Returns why it can't; empty if it has."""
        said = b""
        assert self._link is not None
        try:
            while not said.endswith(READY) and (more := self._link.recv(_LONGEST)):
                said += more
        except OSError as error:
            if isinstance(error, socket.timeout):
                return f"the process that waits for it did not import torch within {_IMPORT_S:g} s"
        if said.endswith(READY):
            return ""
        return one_line(said.decode(errors="replace")) or f"its Python can't run {MODULE}"

    def _say(self, env: Mapping[str, str]) -> None:
        """Say once why restarts are slower."""
        if self._command and self._why_cold and not self._has_said and env.get("SLURM_PROCID") == "0":
            self._has_said = True
            say(f"Restarts take some seconds more: each starts Python anew, since {self._why_cold}.")


def _why_cold(options: Options) -> str:
    if options.container is not None:
        return "they are in a container"
    try:
        command_program.interpreter_words(options.command)
    except SpecError:
        return "the command is no Python script or module"
    return ""
