"""When the job ends, by the clock."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Mapping

from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

MARGIN_S = 60.0
"""How long before the job's end it stops by the clock; a quarter of the job's time limit where that is less."""

_CLOCKS_AGREE_S = 30.0


def deadline(world: World, env: Mapping[str, str]) -> float:
    """When to stop by the clock, as time.monotonic() counts; infinite where nobody tells when the job ends.

    A collective: the ranks compare their clocks. `env` is such as os.environ; it has SLURM_JOB_END_TIME, and the time
    limit follows from SLURM_JOB_START_TIME; where that is missing, what is left now counts as the limit.

    The end is the controller's clock's. Where the ranks' clocks differ, or say that the end is over, they are not
    believed: then only signals count.
    """
    text = env.get("SLURM_JOB_END_TIME", "")
    world.barrier()  # one may have waited for its file system: now they look at the same time
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
