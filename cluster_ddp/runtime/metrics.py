"""The run folder: run.json (what ran, where, with what) and metrics.jsonl (what came out, a record a line)."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import cluster_ddp
from cluster_ddp.errors import RunDirError
from cluster_ddp.files import atomic_write, sync_folder
from cluster_ddp.runtime.lock import RunLock
from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")


def default_run_dir(name: str, world: World) -> Path:
    """The run folder of the submission, else runs/<name>-<job id, or date and time>."""
    if submitted := os.environ.get("CLUSTER_DDP_RUN_DIR"):
        return Path(submitted)
    label = world.topology.job_label or time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{name}-{label}"


class RunDir:
    """The folder of one run. Rank 0 writes; on the others the methods do nothing.

    What an earlier run has left in metrics.jsonl is set aside with the first record, or continued after
    `continue_metrics`.

    Args:
        path: made if need be, and locked: a second run in the same folder is an error.
        world: to know whether to write.

    Raises:
        RunDirError: rank 0 can't write there, or another job is using it.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.world = path, world
        self._metrics = path / "metrics.jsonl"
        self._file: int | None = None
        self._size = 0
        self._unwritten = b""
        self._failed = False
        if not world.is_main:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(path / ".lock", world.topology)
        except OSError as error:
            raise RunDirError(
                f"Writing to the run folder {path}:",
                f"{error.strerror or error}.",
                "choose a folder you may write to: --run-dir PATH",
            ) from error

    def describe(self, config: Any) -> None:
        """Write run.json: configuration (a dataclass), topology, versions, command and git commit."""
        if not self.world.is_main:
            return
        description = {
            "config": dataclasses.asdict(config),
            "topology": dataclasses.asdict(self.world.topology),
            "device": str(self.world.device),
            "versions": {
                "cluster_ddp": cluster_ddp.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda if self.world.device.type == "cuda" else None,
            },
            "command": sys.argv,
            "git_commit": _git_commit(),
            "started": time.time(),
        }
        with atomic_write(self.path / "run.json") as file:
            file.write(json.dumps(description, indent=2, default=str).encode() + b"\n")

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record with its kind ("train", "test", "done") and time (seconds of UNIX time) to metrics.jsonl.

        What a full disk does not take is kept, and written with the next record.
        """
        if not self.world.is_main:
            return
        record = {"kind": kind, "time": round(time.time(), 3), **values}
        self._unwritten += json.dumps(record).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what could not be written before."""
        if not self.world.is_main:
            return
        try:
            if self._file is None:
                set_aside(self._metrics)
                self._file = self._open()
            while self._unwritten:
                written = os.pwrite(self._file, self._unwritten, self._size)
                self._size, self._unwritten = self._size + written, self._unwritten[written:]
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.error("Writing to %s failed: %s. Training goes on; tried again.", self._metrics, error.strerror)
            self._failed = True

    def begin_metrics(self) -> None:
        """Set aside what an earlier run has left in metrics.jsonl, now, before a checkpoint refers to it."""
        self.flush()

    @property
    def metrics_bytes(self) -> int:
        """The size of metrics.jsonl with all records so far."""
        return self._size + len(self._unwritten)

    def continue_metrics(self, size: int) -> None:
        """Go on after the first `size` bytes of metrics.jsonl: what follows them will be recorded anew.

        Raises:
            OSError: the file can't be written.
        """
        if not self.world.is_main:
            return
        self._file = self._open()
        found = os.fstat(self._file).st_size
        if found < size:
            log.warning("%s has lost the last %d bytes before the checkpoint.", self._metrics, size - found)
            size = os.pread(self._file, found, 0).rfind(b"\n") + 1  # whole lines
        self._size = size
        os.ftruncate(self._file, self._size)

    def sync(self) -> None:
        """Let what was recorded outlive the machine.

        Raises:
            OSError: the disk is full, say.
        """
        if self._failed:
            raise OSError(errno.ENOSPC, f"{self._metrics.name} takes no more records")
        if self._file is not None:
            os.fsync(self._file)
            sync_folder(self.path)

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        """Write a state dictionary with torch.save."""
        if self.world.is_main:
            with atomic_write(self.path / name) as file:
                torch.save(dict(state), file)

    def _open(self) -> int:
        return os.open(self._metrics, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def set_aside(path: Path) -> None:
    """Rename a file or folder of an earlier run, if there is one, to name.1, name.2 … before its extension."""
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    numbers = itertools.count(1)
    others = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in numbers)
    other = next(other for other in others if not other.exists())
    log.info("%s is an earlier run's: it is now %s.", path, other.name)
    path.rename(other)


def _git_commit() -> str | None:
    """The commit that the package was run from, "-dirty" if changed; None outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    folder = Path(cluster_ddp.__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
