"""What the job's agent writes into the job's log, and the last lines of that and of the tasks' logs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.errors import printable
from cluster_ddp.run.files import tail
from cluster_ddp.run.names import TO_RESUME, Env, File
from cluster_ddp.run.outcome import Outcome

_LOG_BYTES = 100_000
_STDERR = 2
_JOB_LOG = Path(f"/proc/self/fd/{_STDERR}")


def show(ended: Outcome, log: Path | None, env: Mapping[str, str]) -> None:
    """Say what failed first, if something did; and its log, if it has one of its own."""
    if not ended.failure:
        return
    say(f"Failed first, with status {ended.status}: {ended.failure}")
    if log is not None and log.exists() and ended.first is not None and ended.first.text in ended.failure:
        say(f"  Its log: {log}")
    if "for memory" in ended.failure:
        given = env.get("SLURM_MEM_PER_NODE")
        than = f" than {given} MB" if given else ""
        more = f"ask for more memory per node{than}: --mem, or as needed: --max-mem"
        say(f"  Hint: {more}; or use fewer loader workers, or smaller batches")


def show_how_to_resume(status: int, env: Mapping[str, str]) -> None:
    """Say which command resumes the run, if it has failed or was stopped, and has a checkpoint."""
    folder, command = env.get(Env.RUN_DIR), env.get(Env.RESUME)
    if status and folder and command and Path(folder, File.CHECKPOINTS).exists():
        say(f"{TO_RESUME}{command}")


def say(text: str) -> None:
    """Write a text to the job's log. A full disk is no reason to fail, not even at the end with what is buffered.

    Parts of it may come from files that others can write: no control character gets through.
    """
    lines = "\n".join(map(printable, text.expandtabs().split("\n")))
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"{lines}\n".encode(errors="replace"))


class Logs:
    """The logs of a start: only what is written from the making of this object on, since logs are appended to."""

    def __init__(self, folder: Path | None) -> None:
        before = [_JOB_LOG, *(folder.glob(File.TASK_LOG.format("*")) if folder is not None else ())]
        self._sizes = {path: _size(path) for path in before}

    def of_job(self) -> str:
        """Return the end of the job's log: what srun and Slurm say in it. Empty if it is no file."""
        return self.of(_JOB_LOG)

    def of(self, path: Path) -> str:
        """Return the end of a log; empty if it can't be read, or is no file."""
        return tail(path, _LOG_BYTES, since=self._sizes.get(path, 0)).replace("\0", "")


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
