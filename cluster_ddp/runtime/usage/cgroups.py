"""CPU time and memory of a job on this node, from the control group that Slurm makes for its step (cgroups(7)).

Version 2: /…/job_12/step_0/user/task_0, one hierarchy. Version 1: the same path below each controller's mount.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
_STEP = re.compile(r"^.*/job_\d+/step_[^/]+")


class StepCgroup:
    """The control group of this process's step: all tasks of it on this node.

    Args:
        text: the content of /proc/self/cgroup.
        mount: where the control groups are mounted.

    Raises:
        OSError: this process is in no step's control group, or it can't be read.
    """

    def __init__(self, text: str, mount: Path = MOUNT) -> None:
        folders = _folders(text, mount)
        self._is_v2 = "" in folders and (folders[""] / "cpu.stat").exists()
        if self._is_v2:
            self._cpu = self._memory = folders[""]
        else:
            try:
                self._cpu, self._memory = folders["cpuacct"], folders["memory"]
            except KeyError as error:
                raise FileNotFoundError("no control group of a step") from error
        self.cpu_s()
        self.memory_bytes()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes so far."""
        if self._is_v2:
            return _fields(self._cpu / "cpu.stat")["usage_usec"] / 1e6
        return int((self._cpu / "cpuacct.usage").read_text()) / 1e9

    def memory_bytes(self) -> int:
        """Return the memory in use: of the processes, and what they share, but without the cache of files."""
        if self._is_v2:
            fields = _fields(self._memory / "memory.stat")
            return fields["anon"] + fields["shmem"]
        fields = _fields(self._memory / "memory.stat")
        return fields["total_rss"] + fields.get("total_shmem", 0)


def step_folder(text: str, controller: str, mount: Path = MOUNT) -> Path:
    """Return the folder of the step's control group for a controller, such as "memory".

    Args:
        text: the content of /proc/self/cgroup.
        controller: its name; with version 2 all have one folder.
        mount: where the control groups are mounted.

    Raises:
        FileNotFoundError: this process is in no step's control group.
    """
    folders = _folders(text, mount)
    folder = folders.get("", folders.get(controller))
    if folder is None or not folder.is_dir():
        raise FileNotFoundError("no control group of a step")
    return folder


def oom_kills(mount: Path = MOUNT) -> int:
    """Return how many processes of this process's control groups the kernel has killed for memory; 0 if unknown."""
    kills = 0
    with contextlib.suppress(OSError, ValueError):
        paths = {line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
        for file in [f"{mount}{path}/memory.events" for path in paths] + [
            f"{mount}/memory{path}/memory.oom_control" for path in paths
        ]:
            with contextlib.suppress(OSError, KeyError):
                kills += _fields(Path(file))["oom_kill"]
    return kills


def _folders(text: str, mount: Path) -> dict[str, Path]:
    """Controller ("" for version 2) -> folder of the step's control group."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if match := _STEP.match(path):
            for controller in controllers.split(","):
                below = mount / controllers if (mount / controllers).is_dir() else mount / controller
                found[controller] = Path(f"{below}{match[0]}")
    return found


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
