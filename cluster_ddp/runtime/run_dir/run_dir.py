"""The run directory: run.json (what ran, where, with what) and metrics.jsonl (what came out, a record a line)."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cluster_ddp._version import __version__
from cluster_ddp.contract import Env, File
from cluster_ddp.errors import RunDirError
from cluster_ddp.files import atomic_write, make_dir, remove_leftovers, reserve_descriptors
from cluster_ddp.runtime.run_dir import final_flush
from cluster_ddp.runtime.run_dir.lock import RunLock
from cluster_ddp.runtime.run_dir.metrics import MetricsFile
from cluster_ddp.runtime.world import World


def default_run_dir(name: str, world: World) -> Path:
    """The run directory of the submission, else runs/<name>-<job id, or date and time>."""
    if submitted := os.environ.get(Env.RUN_DIR):
        return Path(submitted)
    label = world.topology.job_label or time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{name}-{label}"


class RunDir:
    """The folder of one run. Rank 0 writes; on the others the methods do nothing.

    What an earlier run has left in metrics.jsonl is set aside with the first record, or continued after
    `continue_metrics`.

    Args:
        path: made if need be, and locked: a second run in the same folder is an error. Default: the submission's, else
            runs/<name>-<job id, or date and time>.
        world: to know whether to write.
        name: for the default path.

    Raises:
        RunDirError: rank 0 can't write there, or another job is using it.
    """

    def __init__(self, path: str | os.PathLike[str] | None, world: World, *, name: str = "training") -> None:
        self.path, self.world = Path(path or default_run_dir(name, world)), world
        if not world.is_main:
            return
        try:
            self._make()
            self._lock = RunLock(self.path / File.LOCK, world.topology)
            remove_leftovers(self.path)
        except OSError as error:
            raise RunDirError(
                f"Writing to the run directory {self.path}:",
                f"{error.strerror or error}.",
                "choose a directory that you may write to: --run-dir PATH",
            ) from error
        self._metrics = MetricsFile(self.path / File.METRICS)
        final_flush.expect(self._metrics)
        reserve_descriptors()

    @property
    def resume_command(self) -> str:
        """What to type to resume this run, once it has ended."""
        same = f"the same command with {Env.RUN_DIR}={shlex.quote(str(self.path))}"
        return os.environ.get(Env.RESUME) or same

    def describe(self, config: Any) -> None:
        """Write run.json: configuration (a dataclass), topology, versions, command and git commit."""
        if not self.world.is_main:
            return
        description = {
            "config": dataclasses.asdict(config),
            "topology": dataclasses.asdict(self.world.topology),
            "device": str(self.world.device),
            "versions": {
                "cluster_ddp": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda if self.world.device.type == "cuda" else None,
            },
            "command": sys.argv,
            "git_commit": _git_commit(),
            "started": time.time(),
        }
        with atomic_write(self.path / File.RUN) as file:
            file.write(json.dumps(description, indent=2, default=str).encode() + b"\n")

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record with its kind (see `contract.Record`) and time (seconds of UNIX time) to metrics.jsonl.

        It is written in the background; what a full disk does not take is kept, and written with a later record.
        """
        if self.world.is_main:
            record = {"kind": kind, "time": round(time.time(), 3), **values}
            self._metrics.append(json.dumps(record).encode() + b"\n")

    def begin_metrics(self) -> None:
        """Set aside what an earlier run has left in metrics.jsonl, now, before a checkpoint refers to it."""
        if self.world.is_main:
            self._metrics.begin_write()

    @property
    def metrics_bytes(self) -> int:
        """On rank 0: the size of metrics.jsonl with all records so far."""
        return self._metrics.size

    def continue_metrics(self, size: int) -> None:
        """Continue after the first `size` bytes of metrics.jsonl: what follows them will be recorded anew.

        Raises:
            OSError: the file can't be written.
        """
        if self.world.is_main:
            self._metrics.continue_at(size)

    def sync(self) -> None:
        """Let what was recorded outlive the machine, and mend what others have removed: the folder, lock or metrics.

        Raises:
            OSError: the disk is full, say.
            RunDirError: the lock's file was removed, and another job has taken the folder.
        """
        if self.world.is_main:
            self._make()
            self._lock.keep()
            self._metrics.sync()

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        """Write a state dictionary with torch.save."""
        if self.world.is_main:
            with atomic_write(self.path / name) as file:
                torch.save(dict(state), file)

    def _make(self) -> None:
        if not self.path.is_dir():
            make_dir(self.path)


def _git_commit() -> str | None:
    """The commit that the package was run from, "-dirty" if changed; None outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    folder = Path(__file__).parents[2]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
