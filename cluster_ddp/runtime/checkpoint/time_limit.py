"""When to stop before the end of the job's time."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Mapping

from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

MARGIN_S = 60.0
"""Seconds between the stop and the end of the job's time; at most a quarter of the job's time limit."""

_CLOCKS_AGREE_S = 30.0


def deadline(world: World, env: Mapping[str, str]) -> float:
    """Return when to stop, on the clock of time.monotonic(); infinite if the end of the job is unknown. A collective.

    The end of the job is a time of the controller's clock. If the ranks' clocks differ by more than 30 s, or say that
    the end has passed, they are not used, and only signals count.

    Args:
        world: all ranks.
        env: an environment, such as os.environ. The end is SLURM_JOB_END_TIME. The time limit follows from
            SLURM_JOB_START_TIME; without that, the time left counts as the limit.
    """
    text = env.get("SLURM_JOB_END_TIME", "")
    world.barrier()  # a rank may have waited for its file system: now all read their clocks at the same time
    clocks = world.gather((socket.gethostname(), time.time()))
    if not re.fullmatch("[0-9]{1,11}", text):
        return float("inf")
    (slow_host, slow), *_, (fast_host, fast) = sorted(clocks * 2, key=lambda clock: clock[1])
    left_s = int(text) - time.time()
    if fast - slow > _CLOCKS_AGREE_S or left_s <= 0:
        if world.is_main:
            log.warning(
                "Clocks can't be right: on %s it is %s, on %s %s, and the job's end is at %s. Only signals will stop "
                "the training before its time limit. Hint: tell your cluster's support; see there: timedatectl",
                *(slow_host, _shown(slow), fast_host, _shown(fast), _shown(int(text))),
            )
        return float("inf")
    start = env.get("SLURM_JOB_START_TIME", "")
    limit_s = int(text) - int(start) if re.fullmatch("[0-9]{1,11}", start) else left_s
    return time.monotonic() + left_s - min(MARGIN_S, max(limit_s, left_s) / 4)


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
