"""Whether the kernel has killed a process for memory: the counters of this process's control groups (cgroups(7))."""

from __future__ import annotations

import contextlib
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


def oom_kills(mount: Path = MOUNT) -> int:
    """Return how many processes of this process's control groups the kernel has killed for memory; 0 if unknown."""
    kills = 0
    with contextlib.suppress(OSError, IndexError):
        paths = {line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
        version_2 = [Path(f"{mount}{path}/memory.events") for path in paths]
        version_1 = [Path(f"{mount}/memory{path}/memory.oom_control") for path in paths]
        for file in version_2 + version_1:
            with contextlib.suppress(OSError, ValueError):
                fields = dict(line.split() for line in file.read_text().splitlines())
                kills += int(fields.get("oom_kill", 0))
    return kills
