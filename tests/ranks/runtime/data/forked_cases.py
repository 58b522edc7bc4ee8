"""Run many small trainings of a few ranks each, some at a time, all forked from one process that has imported torch.

Takes the time limit of each in seconds, and reads the cases of test_workers_end.py from its input. Prints
{name: {"statuses": […], "left": is any process left}}. Each rank runs its script as `python script.py` would, to the
very end of its interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from cluster_ddp.runtime.fork import forked_program
from cluster_ddp.runtime.fork.forked_program import ForkedProgram

_AT_ONCE = 4
_PR_SET_PDEATHSIG = 1  # sys/prctl.h
_TIME_LIMIT_S = float(sys.argv[1])


class Case:
    """A case's ranks, in a process group of their own, as the processes of a step are."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.name, self.folder, self.warning = case["name"], Path(case["folder"]), case["warning"]
        self.statuses: dict[int, int | None] = {}
        self.group = 0
        (self.folder / "0.log").touch()
        for rank, env in enumerate(case["environments"]):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, self.group)
                _become(self.folder / f"{rank}.log", env)
                program = ForkedProgram(name=case["script"], is_module=False, arguments=())
                program.prepare()
                program.run()
                sys.exit(0)
            self.group = self.group or pid
            with contextlib.suppress(OSError):  # whoever of both comes first
                os.setpgid(pid, self.group)
            self.statuses[pid] = None
        self.give_up_at = time.monotonic() + _TIME_LIMIT_S

    def has_ended(self) -> bool:
        """Warn it where it is time to; whether all its ranks have ended. At the time limit they are killed."""
        if self.warning and "at step 3" in (self.folder / "0.log").read_text():
            with contextlib.suppress(ProcessLookupError):  # it failed just then
                os.killpg(self.group, signal.Signals[f"SIG{self.warning}"])
            self.warning = None
        if time.monotonic() > self.give_up_at:
            os.killpg(self.group, signal.SIGKILL)
        for pid in [pid for pid, status in self.statuses.items() if status is None]:
            ended, wait_status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.statuses[pid] = os.waitstatus_to_exitcode(wait_status)
        return None not in self.statuses.values()

    def outcome(self) -> dict[str, Any]:
        """How its ranks ended, and whether any process of theirs is left, which is killed."""
        try:
            os.killpg(self.group, signal.SIGKILL)
            is_any_left = True
        except ProcessLookupError:
            is_any_left = False
        return {"statuses": [*self.statuses.values()], "left": is_any_left}


def _become(log: Path, env: dict[str, str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # however the tests end, nothing is left
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    os.environ.update(env)


def main() -> None:
    """Run them all."""
    waiting = json.load(sys.stdin)
    assert not forked_program.load()
    running: list[Case] = []
    outcomes = {}
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            running.append(Case(waiting.pop(0)))
        for case in [case for case in running if case.has_ended()]:
            outcomes[case.name] = case.outcome()
            running.remove(case)
        time.sleep(0.05)
    print(json.dumps(outcomes))


main()
