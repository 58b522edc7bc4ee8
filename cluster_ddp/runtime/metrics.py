"""The run folder: run.json (what ran, where, with what) and metrics.jsonl (what came out, a record a line)."""

from __future__ import annotations

import dataclasses
import json
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
from cluster_ddp.files import atomic_write
from cluster_ddp.runtime.world import World


class RunDir:
    """The folder of one run. Rank 0 writes; on the others the methods do nothing.

    Args:
        path: made if need be.
        world: to know whether to write.

    Raises:
        RunDirError: rank 0 can't write there.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.world = path, world
        if not world.is_main:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._metrics = open(path / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
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
        """Append a record with its kind ("train", "test", "done") and time (seconds of UNIX time) to metrics.jsonl."""
        if self.world.is_main:
            record = {"kind": kind, "time": round(time.time(), 3), **values}
            self._metrics.write(json.dumps(record) + "\n")
            self._metrics.flush()

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        """Write a state dictionary with torch.save."""
        if self.world.is_main:
            with atomic_write(self.path / name) as file:
                torch.save(dict(state), file)


def _git_commit() -> str | None:
    """The commit that the package was run from, "-dirty" if changed; None outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    folder = Path(cluster_ddp.__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
