"""When to stop before the end of the job's time, which may change while the job runs (scontrol update TimeLimit)."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.protocol import Env
from cluster_ddp.run_files import read_text
from cluster_ddp.runtime.stop_signals import StopFlag
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.variables import node_name

log = logging.getLogger("cluster_ddp")

MARGIN_S = 60.0
"""Seconds between the stop and the end of the job's time; at most a quarter of the job's time limit."""

_CLOCKS_AGREE_S = 30.0
_READ_EVERY_S = 10.0


def watch(stop_flag: StopFlag, world: World, env: Mapping[str, str]) -> None:
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
    if path := env.get(Env.JOB_TIMES):
        threading.Thread(target=_follow, args=(stop_flag, Path(path), end), name="time limit", daemon=True).start()


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
    """Read the job's times until the training is over. In a thread: its file system may hang."""
    while not stop_flag.is_over.wait(_READ_EVERY_S):
        try:
            found = re.fullmatch(r"([0-9]{1,11}) ([0-9]{1,11}|NONE)\n", read_text(path))
        except OSError:
            continue
        if not found or _time(found[2]) == end:  # no answer of Slurm's leaves the end as it was
            continue
        end = _time(found[2])
        stop_flag.stop_at(float("inf") if end is None else _deadline(_time(found[1]), end))
        log.info("The job's time limit was changed: %s.", f"it ends at {_shown(end)}" if end else "it has none now")


def _deadline(start: int | None, end: int) -> float:
    """When to stop, on the clock of time.monotonic()."""
    left_s = end - time.time()
    limit_s = left_s if start is None else end - start
    return time.monotonic() + left_s - min(MARGIN_S, max(limit_s, left_s) / 4)


def _time(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,11}", text) else None


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
