"""CPU time and memory of a job on this node.

From the control group that Slurm makes for its step (cgroups(7)). Version 2: /…/job_12/step_0/user/task_0, one
hierarchy. Version 1: the same path below each controller's mount. Without one, from /proc (proc(5)).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.run.names import Env

MOUNT = Path("/sys/fs/cgroup")
_STEP = re.compile(r"^.*/(?:job_\d+|s[0-9A-Z]+)/step_[^/]+")  # from 26.05 on, a job's folder has its SLUID
_PSS_EVERY_S = 10.0
# Variables that all processes of a job on a node have, and no others.
_MARKS = ("SLURM_JOB_ID", "SLURMD_NODENAME", Env.LOCAL_JOB_ID, "TORCHELASTIC_RUN_ID")


class StepCgroup:
    """The control group of this process's step: all tasks of it on this node. `text` is that of /proc/self/cgroup.

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
        fields = _fields(self._memory / "memory.stat")
        if self._is_v2:
            return fields["anon"] + fields["shmem"]
        return fields["total_rss"] + fields.get("total_shmem", 0)


def memory_limits(folder: Path) -> list[int]:
    """Return the limits of a step's control group for "memory" and of its job's, in bytes; those that there are."""
    limits = []
    for one in (folder, folder.parent):
        for path in (one / "memory.max", one / "memory.limit_in_bytes"):
            if path.is_file() and (text := path.read_text().strip()).isdigit():
                limits.append(int(text))
    return limits


def available_bytes(mount: Path = MOUNT) -> int:
    """Return the memory that this process can still get: of the node (proc(5)), and within the limits of its job."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    room = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError, KeyError):  # no control group of a step
        text = Path("/proc/self/cgroup").read_text()
        used = StepCgroup(text, mount).memory_bytes()
        room = min([room, *(limit - used for limit in memory_limits(step_folder(text, "memory", mount)))])
    return room


def step_folder(text: str, controller: str, mount: Path = MOUNT) -> Path:
    """Return the folder of the step's control group for a controller, such as "memory". Arguments as for `StepCgroup`.

    With version 2 all controllers have one folder.

    Raises:
        FileNotFoundError: this process is in no step's control group.
    """
    folders = _folders(text, mount)
    folder = folders.get("", folders.get(controller))
    if folder is None or not folder.is_dir():
        raise FileNotFoundError("no control group of a step")
    return folder


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


class JobProcesses:
    """The processes of this process's job on this node: those with the same marks in their environment.

    Without marks, those of its session.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._marks = {f"{name}={env[name]}".encode() for name in _MARKS if name in env}
        self._session = os.getsid(0)
        self._is_ours: dict[int, bool] = {}  # by process id; of those that exist
        self._ended_s = 0.0
        self._last: dict[tuple[int, int], processes.Stat] = {}  # by process id and start time
        self._memory, self._memory_pages, self._memory_at_s = 0, 0, -math.inf

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes so far, those that have ended included."""
        now = self._seen()
        self._ended_s += sum(one.cpu_s for key, one in self._last.items() if key not in now)
        self._last = now
        return self._ended_s + sum(one.cpu_s for one in now.values())

    def memory_bytes(self) -> int:
        """Return the memory in use, or up to ten seconds ago if it was more: what several processes share counts once.

        For that (Pss), the kernel walks through a process's pages, which takes 10 ms. So it is read every ten seconds,
        and when there are 2 % more resident pages.
        """
        self.cpu_s()
        now_s, pages = time.monotonic(), sum(one.pages for one in self._last.values())
        if pages > 1.02 * self._memory_pages or now_s - self._memory_at_s >= _PSS_EVERY_S:
            self._memory = sum(_pss(pid) for pid, _ in self._last)
            self._memory_pages, self._memory_at_s = pages, now_s
        return self._memory

    def _seen(self) -> dict[tuple[int, int], processes.Stat]:
        """CPU time and pages of each process of the job. Others are looked at once: there may be thousands."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names are enough
        known = self._is_ours
        self._is_ours = {pid: known[pid] if pid in known else self._looks_like_ours(pid) for pid in pids}
        stats = {pid: processes.stat(pid) for pid, is_ours in self._is_ours.items() if is_ours}
        return {(pid, stat.ticks): stat for pid, stat in stats.items() if stat is not None}

    def _looks_like_ours(self, pid: int) -> bool:
        try:
            if self._marks:
                return self._marks <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            return os.getsid(pid) == self._session
        except OSError:  # another user's, or it has ended
            return False


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
