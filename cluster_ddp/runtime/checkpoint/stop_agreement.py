"""When all ranks stop: how they agree on the step to stop after, at little cost; and before the end of the job's time.

The job's time limit may change while the job runs (scontrol update TimeLimit).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from cluster_ddp.run.files import read_text
from cluster_ddp.run.names import Env
from cluster_ddp.runtime import process_group
from cluster_ddp.runtime.failure import last_progress
from cluster_ddp.runtime.stop_signals import StopFlag
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.variables import node_name

log = logging.getLogger("cluster_ddp")

# How often the ranks exchange their flags. A flag takes two exchanges: the first one sends it, the second one collects
# the result of the first.
AGREE_EVERY_S = 0.5
# If that is too often for gloo (its ring takes longer with more ranks), up to this. Twice this time and a save must fit
# between a warning and the end: KillWait is 30 s by default.
_AT_MOST_EVERY_S = 4.0
_IS_WAITING_S = 0.1
_MAX_STEPS = 128  # if steps suddenly take longer, the next exchange must still come soon
MARGIN_S = 60.0
"""Seconds between the stop and the end of the job's time; at most a quarter of the job's time limit."""

_CLOCKS_AGREE_S = 30.0
_READ_EVERY_S = 2.0


class StopAgreement:
    """One small all-reduce on the CPU every so many steps, which runs during the next steps.

    The number of steps follows from their duration. The ranks exchange that, too, so that it is the same on all.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps_left = self._interval = 1
        self._steps = self._steps_begun = 0
        self._every_s, self._waited_s = AGREE_EVERY_S, 0.0
        self.own_s_of_ranks: list[float] = []
        """What each rank gave as `own_s` to the exchange that was collected last."""
        self._since = time.monotonic()
        # The all-reduce in flight, and the number of steps that its seconds are for.
        self._work: dist.Work | None = None
        self._values, self._made = torch.empty(0), 0

    def is_due(self) -> bool:
        """Return whether to `collect` and `begin` now. Call it once a step on every rank."""
        last_progress.note_step()
        self._steps += 1
        self._steps_left -= 1
        return self._steps_left <= 0

    def collect(self, *flags: bool, own_s: float = 0.0) -> list[bool]:
        """Return for each flag whether any rank had it at the last `begin`. A collective.

        This rank's current flags, in the same number each time, are used if no exchange was begun; and what a step
        costs it alone.

        Raises:
            SpecError: the script has ended the process group.
            RuntimeError: gloo: a rank did not answer in time or is gone.
        """
        if self._world.world_size == 1:
            self.own_s_of_ranks = [own_s]
            return list(flags)
        process_group.check()
        if self._work is None:
            self.begin(*flags, own_s=own_s)
        assert self._work is not None
        start = time.monotonic()
        self._work.wait()
        self._work, self._waited_s = None, time.monotonic() - start
        slowest_s, waited_s, *found = self._values.tolist()
        self._plan(slowest_s, waited_s)
        count = len(found) - self._world.world_size
        self.own_s_of_ranks = found[count:]
        return [value > 0 for value in found[:count]]

    def begin(self, *flags: bool, own_s: float = 0.0) -> None:
        """Begin to exchange this rank's current flags, and what a step costs it alone. A collective."""
        if self._world.world_size == 1:
            return
        now = time.monotonic()
        self._made, self._steps_begun = self._steps - self._steps_begun, self._steps
        of_ranks = [0.0] * self._world.world_size
        of_ranks[self._world.rank] = own_s  # the maximum over the ranks keeps it: others have 0 there
        values = [now - self._since - self._waited_s, self._waited_s, *map(float, flags), *of_ranks]
        self._values, self._since = torch.tensor(values, dtype=torch.float64), now
        self._work = dist.all_reduce(self._values, op=dist.ReduceOp.MAX, async_op=True)

    def finish(self) -> None:
        """Complete the exchange in flight, before the ranks leave. A collective."""
        if self._work is not None:
            self.collect()

    def _plan(self, slowest_s: float, waited_s: float) -> None:
        """Choose the number of steps until the next exchange, from the times of the slowest rank."""
        too_often = waited_s > _IS_WAITING_S
        self._every_s = min(2 * self._every_s, _AT_MOST_EVERY_S) if too_often else AGREE_EVERY_S
        if self._made > 0:
            # Twice as many steps at most: the first ones may have been quick by chance.
            steps = int(self._made * self._every_s / max(slowest_s, 1e-9))
            self._interval = max(1, min(steps, 2 * self._interval, _MAX_STEPS))
        self._steps_left = self._interval


def watch_time_limit(stop_flag: StopFlag, world: World, env: Mapping[str, str]) -> None:
    """Let rank 0 stop in time before the end of the job, also if the end changes later. A collective.

    The end of the job is a time of the controller's clock. If the ranks' clocks differ by more than 30 s, or say that
    the end has passed, they are not used, and only signals count. The end is SLURM_JOB_END_TIME. The time limit follows
    from SLURM_JOB_START_TIME; without that, the time left counts as the limit. The batch script keeps the file of
    `Env.JOB_TIMES` up to date.
    """
    start, end = (_time(env.get(f"SLURM_JOB_{name}_TIME", "")) for name in ("START", "END"))
    if not _clocks_are_right(world, end) or not world.is_main:
        return
    if end is not None:
        stop_flag.stop_at(_deadline(start, end))
    if end is not None or Env.JOB_TIMES in env:
        path = Path(env.get(Env.JOB_TIMES, os.devnull))
        threading.Thread(target=_follow, args=(stop_flag, path, end), name="time limit", daemon=True).start()


def _clocks_are_right(world: World, end: int | None) -> bool:
    world.barrier()  # a rank may have waited for its file system: now all read their clocks at the same time
    clocks = world.gather((node_name(os.environ), time.time()))
    (slow_host, slow), *_, (fast_host, fast) = sorted(clocks * 2, key=lambda clock: clock[1])
    are_right = fast - slow <= _CLOCKS_AGREE_S and (end is None or end > time.time())
    if world.is_main and end is not None and not are_right:
        log.warning(
            "Clocks can't be right: on %s it is %s, on %s %s, and the job's end is at %s. Only signals will stop "
            "the training before its time limit. Hint: tell your cluster's support; see there: timedatectl",
            *(slow_host, _shown(slow), fast_host, _shown(fast), _shown(end)),
        )
    return are_right


def _follow(stop_flag: StopFlag, path: Path, end: int | None) -> None:
    """Read the job's times until the training is over. In a thread: its file system may hang.

    What was written before a suspension does not count after it.
    """
    version, is_over = 0, False
    while not is_over:
        stop_flag.note_suspension()
        version, answer = _newer(path, version)
        if answer is not None:
            before, end = end, _time(answer[2])
            stop_flag.stop_at(float("inf") if end is None else _deadline(_time(answer[1]), end))
            if end != before:
                log.info("The job's end has changed: %s.", f"it ends at {_shown(end)}" if end else "it has none now")
        is_over = stop_flag.is_over.wait(_READ_EVERY_S)


def _newer(path: Path, version: int) -> tuple[int, re.Match[str] | None]:
    """Return the version of the file of the job's times, and what Slurm has answered if that is another version."""
    with contextlib.suppress(OSError):
        seen = path.stat().st_mtime_ns
        if seen != version and (found := re.fullmatch(r"([0-9]{1,11}) ([0-9]{1,11}|NONE)\n", read_text(path))):
            return seen, found
    return version, None  # no answer leaves the end as it was


def _deadline(start: int | None, end: int) -> float:
    """When to stop, on the clock of time.monotonic()."""
    left_s = end - time.time()
    limit_s = left_s if start is None else end - start
    return time.monotonic() + left_s - min(MARGIN_S, max(limit_s, left_s) / 4)


def _time(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,11}", text) else None


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
