"""The seed of a task: a process that has imported torch, and forks a rank whenever it is asked to.

It runs `cluster_ddp.runtime.fork.seed`, with the interpreter, the options and the environment of the ranks' command:
none of them could be changed later. It forks twice, and this process adopts each rank. It stays for the next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import command_program
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.agent.supervision import signals
from cluster_ddp.agent.supervision.spawn import spawn
from cluster_ddp.agent.supervision.supervisor import say
from cluster_ddp.agent.task import python_module
from cluster_ddp.errors import SpecError, one_line
from cluster_ddp.run.files import open_own

MODULE = "cluster_ddp.runtime.fork.seed"
READY = b"ready\n"
"""What the seed says once it has imported all. If it can't, it says why, and ends."""

_LOOK_S = 0.2
_ANSWER_S = 30.0  # that the seed may take to fork a rank: somebody may have stopped it
_FORK_S = 2.0  # that it has in any case: if the start ends while it forks, it is kept for the next one
_END_S = 5.0  # that it may take to end, once its connection has ended
_LONGEST = 4096


class Seed:
    """The seed of one task; there may be none.

    Args:
        options: of the task. One rank that starts once needs no seed, and has none.
        gives_up: is asked, while the seed is waited for, whether to wait no longer.
    """

    def __init__(self, options: AgentOptions, *, gives_up: Callable[[], bool]) -> None:
        self.pid: int | None = None
        self._why_none = _why_none(options)
        self._is_wanted, self._gives_up = options.restarts > 0 or options.launcher == "fork", gives_up
        self._is_ready = self._has_said = False

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it with the command and the environment of the ranks, unless it runs, or can't be."""
        if not self._is_wanted or self._why_none or self.pid is not None:
            return
        processes.adopt_orphans()  # the ranks
        words = [*command]
        self._env = env
        self._link, link = socket.socketpair()
        with link:
            os.set_inheritable(link.fileno(), True)
            at = command_program.interpreter_words(words)
            program = [*python_module.words(MODULE, runs_program=True), str(link.fileno())]
            try:
                self.pid = spawn([*words[:at], *program, *words[at:]], env, silent=True, default=signals.PASSED_ON)
            except OSError as error:  # such as too many processes; or no such Python, which the ranks say
                self._why_none = f"the process that forks them can't be started ({error.strerror})"

    def fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        log: Path | None,
        cpus: Collection[int],
        ignore_warnings: bool,
    ) -> int | None:
        """Fork a rank, once all is imported. Returns its process id; None if the command has to be started anew.

        Args:
            command, env: of the rank.
            log: where its output is appended; None for this process's own.
            cpus: the CPUs to which it is bound.
            ignore_warnings: whether it starts with USR1 and USR2 ignored, until it has a handler.

        Raises:
            OSError: the log can't be written.
        """
        if self.pid is None or not self._has_imported():
            return None
        changes: dict[str, str | None] = {name: None for name in self._env if name not in env}
        changes |= {name: value for name, value in env.items() if self._env.get(name) != value}
        words = command[command_program.interpreter_words(command) :]
        asked = {"words": words, "env": changes, "cpus": sorted(cpus), "ignore_warnings": ignore_warnings}
        target = None if log is None else open_own(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            line, streams = json.dumps(asked).encode() + b"\n", [0, *([1, 2] if target is None else [target, target])]
            self._link.sendall(line[socket.send_fds(self._link, [line], streams) :])
            answer = self._heard(_ANSWER_S, least_s=_FORK_S)
        except OSError:  # it has just ended
            answer = b""
        finally:
            if target is not None:
                os.close(target)
        if answer and answer.strip().isdigit():
            return int(answer)
        if answer is None:
            self.end("" if self._gives_up() else "the process that forks them does not answer")
        elif answer:
            self.end(one_line(answer.decode(errors="replace")))
        elif not self._has_ended():
            self.end("the process that forks them has closed its connection")
        return None

    def look(self) -> bool:
        """Return whether it was killed since the last call, as by the kernel for memory: then there is no other."""
        ended, status = (0, 0) if self.pid is None else os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            return False
        self.pid, is_killed = None, os.WIFSIGNALED(status)
        why = "" if is_killed or self._is_ready else one_line((self._heard() or b"").decode(errors="replace"))
        how = "was killed" if is_killed else f"has ended with status {os.waitstatus_to_exitcode(status)}"
        self._why_none = why or f"the process that forks them {how}"
        self._link.close()
        return is_killed

    def _has_ended(self) -> bool:
        """Wait a moment for its end, once it has closed the connection: its threads end after that."""
        deadline = time.monotonic() + _END_S
        while self.pid is not None and time.monotonic() < deadline:
            self.look()
            time.sleep(0.01)
        return self.pid is None

    def say(self) -> None:
        """Say once why ranks are not forked."""
        if self._is_wanted and self._why_none and not self._has_said:
            self._has_said = True
            say(f"Starts take some seconds more: each rank starts Python anew, since {self._why_none}.")

    def end(self, why: str = "") -> None:
        """End it, if it runs, and wait for that: it has the lock of a staged environment. For good, for a reason."""
        self._why_none = self._why_none or why
        if self.pid is not None:
            self._link.close()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self.pid, self._is_ready = None, False

    def _has_imported(self) -> bool:
        """Wait until it has imported all. Returns whether it has."""
        if not self._is_ready:
            said = self._heard()
            self._is_ready = said == READY
            if not self._is_ready:
                gave_up = self._gives_up()
                why = one_line((said or b"").decode(errors="replace")) or f"its Python can't run {MODULE}"
                self.end("" if gave_up else why)
        return self._is_ready

    def _heard(self, limit_s: float = float("inf"), *, least_s: float = 0.0) -> bytes | None:
        """Wait for one line, or the end of the connection.

        Returns None if time is up; or if the start is given up, after at least `least_s`.
        """
        said, began = b"", time.monotonic()
        with contextlib.suppress(ConnectionError):
            while not said.endswith(b"\n"):
                while not select.select([self._link], [], [], _LOOK_S)[0]:
                    waited_s = time.monotonic() - began
                    if waited_s > limit_s or (waited_s > least_s and self._gives_up()):
                        return None
                if not (more := self._link.recv(_LONGEST)):
                    break
                said += more
        return said


def _why_none(options: AgentOptions) -> str:
    if options.container is not None:
        return "they are in a container"
    try:
        command_program.interpreter_words(options.command)
    except SpecError:
        return "the command is no Python script or module"
    return ""
