"""chain.jsonl: the jobs of a chain (`submit --chain`), and how each has ended. The jobs' agents write it.

Each record has the `time`, in seconds of UNIX time, and the `job`:

{"number": 1, "next": "14", "why": "", "checkpoint": "step-00000100.pt"}    it starts; why no job follows it
{"trains": true}                                                            its agent starts the ranks
{"continues": true}                                                         it has ended; whether the next one resumes
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.errors import one_line
from cluster_ddp.run.files import append_record, read_regular, refresh
from cluster_ddp.run.names import File

_LARGEST = 8 << 20


class Chain(NamedTuple):
    """What a run directory says of its chain."""

    jobs: tuple[str, ...] = ()
    """The jobs that have started, in this order; empty without a chain."""
    next: str = ""
    """The job that follows the last of them; empty if none does."""
    why: str = ""
    """Why none does, if Slurm refused it."""

    @property
    def all(self) -> tuple[str, ...]:
        """All jobs that are known."""
        return (*self.jobs, self.next) if self.next else self.jobs


def read(folder: Path) -> Chain:
    """Return the chain of a run directory. Nothing is raised."""
    starts = [one for one in records(folder) if "number" in one]
    if not starts:
        return Chain()
    last = starts[-1]
    following, why = str(last.get("next")), one_line(str(last.get("why", "")))
    return Chain(tuple(one["job"] for one in starts), following if following.isdigit() else "", why)


def records(folder: Path) -> list[dict[str, Any]]:
    """The records that are whole; those of a damaged file are left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in read_regular(folder / File.CHAIN, _LARGEST).splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                one = json.loads(line)
                if isinstance(one, dict) and re.fullmatch(r"\d{1,12}", str(one.get("job"))):
                    found.append({**one, "job": str(one["job"])})
    return found


def note(folder: Path | None, job: str, record: Mapping[str, Any]) -> None:
    """Append a record of a job. A full disk is no reason to fail."""
    if folder is not None:
        with contextlib.suppress(OSError):
            shared = bool(folder.stat().st_mode & 0o040)
            append_record(folder / File.CHAIN, {"time": round(time.time(), 3), "job": job, **record}, shared=shared)


def is_cancelled(folder: Path | None) -> bool:
    """Whether somebody has cancelled the whole chain."""
    if folder is None:
        return False
    with contextlib.suppress(OSError):
        refresh(folder)
    return (folder / File.CANCELLED).exists()


def in_words(number: int) -> str:
    """Return which job of a chain one is that has so many before it: "the 2nd of the chain"."""
    place = number + 1
    ending = "th" if 10 < place % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"the {place}{ending} of the chain"
