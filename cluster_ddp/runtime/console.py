"""What a rank prints: lines, an error of all ranks once a node, and the bar that shows an epoch's progress.

A full disk or a closed pipe does not end a training.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from cluster_ddp import processes
from cluster_ddp.run.names import SEED, Env
from cluster_ddp.slurm.variables import node_name

# What all ranks of this start on this node have in common.
_COMMON = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "MASTER_PORT")
# The same below our agent: a rank that waited for its start began with an older port.
_COMMON_OF_OURS = (*_COMMON[:-1], Env.SECRET)
_LOCAL_RANK = ("SLURM_LOCALID", "LOCAL_RANK")
_SILENCE_S = 4.0
_POLL_S = 0.2


def say(text: str, end: str = "\n") -> None:
    """Print a text and `end` at once. If stdout fails, say so once on stderr and drop all later lines."""
    try:
        try:
            print(text, end=end, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), end=end, flush=True)
    except (OSError, ValueError) as error:  # ValueError: somebody closed it
        # Its buffer would fail again at exit, and Python would end with status 120.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        complain(f"stdout takes no more output ({error}); training continues without it.")


def complain(text: str) -> None:
    """Write a line to stderr in one piece, so that lines of several ranks don't mix. Failures are ignored."""
    if sys.stderr is None:  # there was none when Python started
        return
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def first_rank_has_said_it(env: Mapping[str, str]) -> bool:
    """Return whether the first rank of this node has ended, and so has said what is wrong; then a line names it.

    For an error that all ranks have before they find each other, such as a wrong launch. No rank can ask another one
    then. But Linux knows whether the first rank of the node still runs; if so, it does not have the error. Any other
    rank waits for that, at most four seconds. By then srun (--kill-on-bad-exit) has often ended it; without that
    option, srun ends no task because another has failed. `env` is the environment this process was started with.
    """
    name = next((name for name in _LOCAL_RANK if env.get(name)), None)
    if name is None or env[name] == "0":
        return False
    common = {key: env[key] for key in (_COMMON_OF_OURS if Env.NOTES in env else _COMMON) if env.get(key)}
    own = {**common, name: env[name]}
    # In a container of this rank alone it sees no other: the first process there is its parent, or has its environment.
    is_alone = os.getppid() <= 1 or own.items() <= processes.environment(1).items()
    # A forked rank has the environment of its parent there.
    can_see = bool(common) and not is_alone and os.getpid() in _ranks(own, env)
    deadline = time.monotonic() + _SILENCE_S
    while time.monotonic() < deadline:
        if can_see and not _ranks({**common, name: "0"}, env):
            rank = env.get("SLURM_PROCID") or env.get("RANK") or "?"
            complain(f"[rank {rank} {node_name(os.environ)}] stopped: this node's first rank failed (see its error).")
            return True
        time.sleep(_POLL_S)
    return False


def _ranks(values: Mapping[str, str], env: Mapping[str, str]) -> list[int]:
    """Processes with such an environment, without agents, which have no notes, and seeds: both may outlive ranks."""
    found = processes.environments(values)
    are_ranks = [pid for pid, of_it in found.items() if Env.NOTES not in env or Env.NOTES in of_it]
    return [pid for pid in are_ranks if processes.name(pid) != SEED]


class Progress:
    """A context manager that shows a bar on a terminal, and prints the lines of `update` elsewhere.

    Args:
        title: text before the bar.
        total: the value of `done` in `update` at which the bar is full.
        enabled: False on ranks that print nothing.
    """

    def __init__(self, title: str, *, total: int, enabled: bool) -> None:
        self.enabled = enabled
        self._bar = None
        if enabled and sys.stdout.isatty():
            from rich.progress import Progress as Bar

            self._bar = Bar(transient=True)
            self._task = self._bar.add_task(title, total=total)

    def update(self, done: int, line: str) -> None:
        """Show progress.

        Args:
            done: how much of the total is done.
            line: the same in words. With a bar it is printed only when the bar is full.
        """
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            if done == self._bar.tasks[0].total:
                self._bar.console.print(line, markup=False, highlight=False)
        elif self.enabled:
            say(line)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
