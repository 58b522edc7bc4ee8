"""The run directory: run.json (what ran, where and with which versions) and metrics.jsonl (measurements)."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from cluster_ddp._version import __version__
from cluster_ddp.errors import RunDirError, SpecError
from cluster_ddp.run.files import ensure_dir, json_lines, remove_leftovers, reserve_descriptors, to_json
from cluster_ddp.run.names import GLOBAL_STEP, OF_FIRST_RECORD, RECORDS_VERSION, Env, File
from cluster_ddp.runtime.failure import last_progress
from cluster_ddp.runtime.profiling import node_usage
from cluster_ddp.runtime.run_dir import background_writer, fenced_writes
from cluster_ddp.runtime.run_dir.fenced_writes import RunLock, atomic_write
from cluster_ddp.runtime.run_dir.metrics import MetricsFile, set_aside
from cluster_ddp.runtime.run_dir.tracker_thread import Tracking
from cluster_ddp.runtime.world import World

_TAIL_BYTES = 64 * 1024  # has the last records


def default_run_dir(name: str | None, world: World) -> Path:
    """Return the run directory of the submission, else runs/<name>-<job id, or date and time>: one for all ranks.

    Without a name, it is that of Slurm's job, as squeue shows it; else "training".
    """
    if submitted := os.environ.get(Env.RUN_DIR):
        return Path(submitted)
    is_slurms = world.topology.job_id is not None and not world.topology.is_local
    of_job = os.environ.get("SLURM_JOB_NAME", "").replace("/", "_") if is_slurms else ""
    return Path("runs") / f"{name or of_job or 'training'}-{world.topology.job_label or world.run_label}"


class RunDir:
    """The run directory. Rank 0 writes; on other ranks the methods do nothing.

    The metrics.jsonl of an earlier run is renamed at the first record, or continued after `continue_metrics`.

    Args:
        path: is made if missing, and locked: a second run in it is an error. Default: the run directory of the
            submission, else runs/<name>-<job id, or date and time>.
        world: all ranks.
        name: for the default path (default: the job's, else "training").

    Raises:
        RunDirError: on rank 0: it can't be written, or another job is using it.
    """

    def __init__(self, path: str | os.PathLike[str] | None, world: World, *, name: str | None = None) -> None:
        self.path, self.world = Path(path or default_run_dir(name, world)), world
        self.steps: int | None = None
        """Number of steps since the beginning of the training, which a `Checkpointer` counts."""
        self.repeats = False
        """Whether the script's code is run a second time by a resume: its records are there already."""
        self.seen_s: float | None = None
        """On rank 0: when the start before was last seen alive, in seconds of UNIX time; None if that is unknown."""
        self._of_first_record = dict(zip(OF_FIRST_RECORD, (RECORDS_VERSION, world.topology.restart_count)))
        world.run_log[:] = [self.log]
        last_progress.begin_run(self.path)
        if world.is_main:
            self._claim()
        if world.is_main and (names := os.environ.get(Env.TRACK, "").split()):
            tracking = Tracking(names, self.path, self._metrics, is_restart=world.topology.restart_count > 0)
            world.before_leaving(tracking.stop)
        if world.topology.local_rank == 0:
            node_usage.start(self.path, world.topology, os.environ)
            world.before_leaving(node_usage.stop)

    def note_steps(self, steps: int) -> None:
        """Note the number of steps since the beginning of the training."""
        self.steps = steps
        last_progress.note_steps(steps)

    def note_repeats(self, repeats: bool) -> None:
        """Note whether the script's code runs a second time; see `repeats`."""
        self.repeats = repeats

    def _claim(self) -> None:
        """Make it, and lock it."""
        with self.written():
            ensure_dir(self.path)
            self.hold()
            self._lock = RunLock(self.path / File.LOCK, self.world.topology)
            remove_leftovers(self.path)
        self.seen_s = _last_time(self.path / File.METRICS)
        self._metrics = MetricsFile(self.path / File.METRICS)
        background_writer.expect(self._metrics)
        reserve_descriptors()
        with suppress(OSError):  # such as on a full disk: a training can do without it
            self.describe()

    def hold(self) -> None:
        """Let this process write only while the path leads to the folder of now, if there is one to be seen."""
        with suppress(OSError):
            fenced_writes.hold(self.path)

    @contextmanager
    def written(self) -> Iterator[None]:
        """Raise a RunDirError for an OSError of the body, which writes to the run directory."""
        try:
            yield
        except OSError as error:
            asked = f"Writing to the run directory {self.path}:"
            hint = "choose a directory that you may write to: --run-dir PATH"
            raise RunDirError(asked, f"{error.strerror or error}.", hint) from error

    @property
    def resume_command(self) -> str:
        """How to resume this run, if no agent of its job says it: `Env.RESUME`."""
        return f"the same command with {Env.RUN_DIR}={shlex.quote(str(self.path))}"

    def describe(self, config: Any = None) -> None:
        """Write run.json: configuration (a dataclass instance), topology, device, versions, command, git commit, start.

        Raises:
            OSError: the file can't be written.
        """
        if not self.world.is_main:
            return
        description = {
            "config": {} if config is None else dataclasses.asdict(config),
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
            file.write(to_json(description, indent=2, default=str).encode() + b"\n")

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record with its `kind`, `time` (seconds of UNIX time) and `global_step` to metrics.jsonl.

        Without a `Checkpointer`, the first one of each start has `version` and `restart`. A non-finite number becomes
        null. It is written in the background. If the disk is full, records are kept and written later.

        Args:
            kind: see `names.Record`.
            values: the other fields: of types that JSON has, or tensors and arrays of one element.

        Raises:
            SpecError: a value of another type, or with a name that records have: "kind", "time", with a `Checkpointer`
                "global_step", without one "version" and "restart".
            RunDirError: more than 256 MiB of records are waiting to be written, or a newer start of the job has taken
                the run directory.
        """
        own = OF_FIRST_RECORD if self.steps is None else (GLOBAL_STEP,)
        if taken := {"kind", "time", *own} & values.keys():
            name = taken.pop()
            raise SpecError(f"Logging {name!r}:", "each record has one already.", f"another name: {kind}_{name}")
        if self.world.is_main and not self.repeats:
            more = self._of_first_record if self.steps is None else {GLOBAL_STEP: self.steps}
            self._of_first_record = {}
            record = {"kind": kind, "time": round(time.time(), 3), **more, **values}
            self._metrics.append(to_json(record, default=_number).encode() + b"\n")

    def begin_records(self, *, anew: bool) -> None:
        """Rename the metrics.jsonl of an earlier run now, in the background, not at the first record.

        If the training begins `anew`, starts.jsonl is renamed, too, at once: no start before belongs to it.

        Raises:
            OSError: it can't be renamed.
        """
        if self.world.is_main:
            self._metrics.begin_write()
            if anew:
                set_aside(self.path / File.STARTS)

    @property
    def metrics_bytes(self) -> int:
        """On rank 0: the size of metrics.jsonl in bytes, including records that are not written yet."""
        return self._metrics.size

    def continue_metrics(self, size: int) -> None:
        """Continue metrics.jsonl after its first `size` bytes; cut off the rest, since it will be recorded again.

        Raises:
            OSError: the file can't be written.
        """
        if self.world.is_main:
            self._metrics.continue_at(size)

    def sync(self) -> None:
        """Write and fsync all records. Make the folder, its lock and metrics.jsonl again if they were removed.

        Raises:
            OSError: files can't be written, such as on a full disk.
            RunDirError: another job, or a newer start of this one, has taken the run directory.
        """
        if self.world.is_main:
            ensure_dir(self.path)
            self._lock.keep()
            self._metrics.sync()

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        """Write a state dictionary into the run directory with torch.save, whole or not at all.

        Raises:
            OSError: the file can't be written.
        """
        if self.world.is_main:
            with atomic_write(self.path / name) as file:
                torch.save(dict(state), file)


def _last_time(path: Path) -> float | None:
    """When the last record was logged, by the clock of its node, as all times in starts.jsonl."""
    times = [record.get("time") for record in json_lines(path, last_bytes=_TAIL_BYTES)]
    return max((float(time_s) for time_s in times if isinstance(time_s, (int, float))), default=None)


def _number(value: Any) -> Any:
    """A tensor or an array of one element as a number."""
    if getattr(value, "shape", None) is not None and math.prod(value.shape) == 1:
        return value.item()
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    found = "a record holds numbers, text, and lists and dictionaries of them."
    raise SpecError(f"Logging a {type(value).__name__}{shape}:", found, "log one number, such as its mean")


@functools.cache
def _git_commit() -> str | None:
    """The git commit of the script's folder, with "-dirty" if changed; None outside a git checkout.

    A function's script is its runner, which is installed: then it is that of the working directory.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    script = Path(sys.argv[0]).resolve()
    folder = Path.cwd() if not script.is_file() or script.is_relative_to(sys.prefix) else script.parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
