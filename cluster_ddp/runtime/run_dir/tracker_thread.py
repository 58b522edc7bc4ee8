"""The thread that reads metrics.jsonl as it grows, and feeds the trackers. No step waits for it; it fails no training.

It runs on rank 0 only. A tracker is a mirror of metrics.jsonl, which is cut back when a training resumes. So each start
of a job makes the mirror anew from the records that stay, under the same run id: no step is in it twice, however the
start before ended. A library is imported in the thread, at the first record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cluster_ddp.errors import nearest
from cluster_ddp.run import places
from cluster_ddp.run.files import ensure_dir, read_json
from cluster_ddp.run.names import TRACKERS, File
from cluster_ddp.runtime.run_dir import fenced_writes
from cluster_ddp.runtime.run_dir.fenced_writes import atomic_write
from cluster_ddp.runtime.run_dir.metrics import MetricsFile, set_aside
from cluster_ddp.runtime.run_dir.trackers import BACKENDS, MetricPoint, Run, Tracker, flat

log = logging.getLogger("cluster_ddp")

EVERY_S = 2.0
PATIENCE_S = 60.0
"""Seconds that a training waits at its end for the trackers. metrics.jsonl has all records without them."""
_BLOCK_BYTES = 1 << 20


class Tracking:
    """Feeds trackers in the background until `stop`. One that is unknown, or can't begin, is a warning."""

    def __init__(self, names: Iterable[str], run_dir: Path, records: MetricsFile, *, is_restart: bool) -> None:
        self._run_dir, self._records, self._is_restart = run_dir.absolute(), records, is_restart
        self._names = list(dict.fromkeys(names))
        self._trackers: dict[str, Tracker] = {}
        self._has_begun = False
        self._read = self._count = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Hand over what is left, and end."""
        self._end.set()
        self._thread.join(timeout=PATIENCE_S)
        if self._thread.is_alive():
            words = "Trackers did not end within %.0f s. They may lack the last records, which are in %s."
            log.warning(words, PATIENCE_S, self._records.path)

    def _run(self) -> None:
        try:
            while not self._end.wait(EVERY_S):
                self._feed()
            self._feed()
            for name, tracker in list(self._trackers.items()):
                self._guarded(name, tracker.close)
            for name, tracker in self._trackers.items():
                if tracker.upload:
                    log.info("To upload to %s, after the last start: %s", name, tracker.upload)
        except Exception as error:
            log.warning("Reading %s for trackers failed: %s. They get no more records.", self._records.path, error)

    def _feed(self) -> None:
        """Hand over the records that are new."""
        fenced_writes.check()
        if (written := self._records.written) is None:
            return
        if not self._has_begun:
            self._has_begun = True
            self._begin()
        while self._trackers and self._read < written:
            with open(self._records.path, "rb") as file:
                file.seek(self._read)
                block = file.read(written - self._read)[:_BLOCK_BYTES]
            whole = block.rfind(b"\n") + 1
            if not whole:
                return
            lines = block[:whole].splitlines()
            points = [MetricPoint.of(json.loads(line), number) for number, line in enumerate(lines, self._count)]
            self._count += len(lines)
            for name, tracker in list(self._trackers.items()):
                self._guarded(name, tracker.log, points)
            self._read += whole
            time.sleep(0)  # lets the training's thread run

    def _begin(self) -> None:
        """Make the trackers. A training that does not continue an earlier one has a run of its own."""
        folder = self._run_dir / File.TRACKERS
        try:
            if not self._records.is_continued and not self._is_restart:
                set_aside(folder)
            run_id = _stored_id(folder)
        except OSError as error:
            log.warning("Tracking in %s failed: %s. The training continues without.", folder, error.strerror or error)
            return
        # The libraries refuse some characters, or take them for a search.
        name = places.name_in(self._run_dir) or re.sub(r"-[\d_-]+$", "", self._run_dir.name)
        project = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) or "training"
        title = places.title(self._run_dir).replace("/", "_")
        run = Run(name=title, project=project, folder=folder, id=run_id, config=_config(self._run_dir))
        for name in self._names:
            self._guarded(name, self._make, name, run)

    def _make(self, name: str, run: Run) -> None:
        if name not in BACKENDS:
            raise ValueError(f"there is no such tracker. There are: {', '.join(TRACKERS)}.{nearest(name, TRACKERS)}")
        tracker = BACKENDS[name]()
        ensure_dir(folder := run.folder / name)
        tracker.begin(dataclasses.replace(run, folder=folder))
        self._trackers[name] = tracker

    def _guarded(self, name: str, do: Callable[..., None], *arguments: Any) -> None:
        """Do it. A tracker that fails is dropped, with one warning."""
        try:
            do(*arguments)
        except Exception as error:
            self._trackers.pop(name, None)
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            log.warning(
                "Tracking with %s failed: %s. %s has all records; the training continues.", name, told, File.METRICS
            )


def _stored_id(folder: Path) -> str:
    """The run's id, which the first start has made."""
    path = folder / "id"
    with contextlib.suppress(FileNotFoundError):
        if found := re.fullmatch(r"\w+", path.read_text().strip(), re.ASCII):
            return found[0]
    ensure_dir(folder)
    made = secrets.token_hex(4)
    with atomic_write(path) as file:
        file.write(made.encode() + b"\n")
    return made


def _config(run_dir: Path) -> dict[str, str | int | float | bool]:
    """What run.json says of the run. Commands stay here: they may have a secret, and trackers' records are uploaded."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = read_json(run_dir / File.RUN)
    world_size = found.get("topology", {}).get("world_size")
    kept = {**found.get("config", {}), "world_size": world_size, "git_commit": found.get("git_commit")}
    return dict(flat({**kept, "versions": found.get("versions", {})}))
