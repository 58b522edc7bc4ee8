"""How far a training is, how it ended and what failed: what the end of each file in its run directory says.

metrics.jsonl   its last figures
starts.jsonl    its starts and ends, as the training has noted them
job.jsonl       how its job's starts ended, as the job's agent has noted it
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster_ddp.errors import hours
from cluster_ddp.jobs.report import usage
from cluster_ddp.run import journal
from cluster_ddp.run.files import json_lines, number, tail
from cluster_ddp.run.names import ENDS, File, Record
from cluster_ddp.run.outcome import Outcome

# Enough of the end of metrics.jsonl for the last record of each kind.
_TAIL_BYTES = 64 * 1024
# Of a figure: how it is shown, and a factor.
_WORDS = {
    "epoch": ("epoch {}", 1),
    "progress": ("{:.0f} % done", 100),
    "loss": ("loss {:.4g}", 1),
    "accuracy": ("accuracy {:.2f} %", 100),
    "samples_per_s": ("{:,.0f} samples/s", 1),
}


def figures(run_dir: Path) -> dict[str, Any]:
    """Return the last `epoch`, `progress`, `loss`, `accuracy`, `samples_per_s` of a training, if it has logged them."""
    found: dict[str, Any] = {}
    for record in _last_metrics(run_dir):
        for name in _WORDS.keys() & record.keys():
            if name != "accuracy" or record.get("kind") != Record.TRAIN:
                value = number(record[name])
                if (name, value) != ("samples_per_s", 0.0):  # of a pass without a batch, after a resume
                    found[name] = int(value) if name == "epoch" and value is not None else value
    return found


def last_size(run_dir: Path) -> dict[str, Any]:
    """Return `nodes` and `ranks` of a training's last start, if it has noted them."""
    starts = [one for one in json_lines(run_dir / File.STARTS) if one.get("kind") == "start"]
    return {name: one for name in ("nodes", "ranks") if starts and type(one := starts[-1].get(name)) is int}


def in_words(known: Mapping[str, Any], *names: str) -> list[str]:
    """Return the figures of these names in words, those that are known."""
    chosen = {name: known[name] for name in names if known.get(name) is not None}
    return [_WORDS[name][0].format(_WORDS[name][1] * value) for name, value in chosen.items()]


def line(run_dir: Path) -> str:
    """Return how far a training is and how well it runs, as one line; empty if nothing is known."""
    known, left_s = figures(run_dir), _left_s(run_dir)
    left = [] if left_s is None else [f"{hours(left_s)} left"]
    results = in_words(known, "loss", "accuracy", "samples_per_s")
    return ", ".join([*in_words(known, "epoch", "progress"), *left, *results, *usage.newest(run_dir)])


def _left_s(run_dir: Path) -> float | None:
    """Seconds to the end of the training, at its speed since its last start; None if unknown."""
    began_s = max((number(one.get("time")) or 0.0 for one in json_lines(run_dir / File.STARTS)), default=0.0)
    known = [(number(one.get("time")), number(one.get("progress"))) for one in _last_metrics(run_dir)]
    found = [(time_s, done) for time_s, done in known if time_s is not None and done is not None and time_s >= began_s]
    if len(found) < 2:
        return None
    (first_s, before), (last_s, done) = found[0], found[-1]
    return (1 - done) * (last_s - first_s) / (done - before) if done > before else None


def how_ended(run_dir: Path, job: str) -> str | None:
    """Return how a training ended, as its records say: one of `names.ENDS`, or what else the agent of its job says.

    It is None if the training has not ended, or was killed with its job's agent.
    """
    last = _last_record(run_dir)
    if (state := last.get("state")) in ENDS:
        return str(state)
    if any([one.get("kind") == Record.DONE for one in _last_metrics(run_dir)][-1:]):
        return "COMPLETED"
    ended = last_outcome(run_dir, job)
    return None if ended is None else ended.state


def last_outcome(run_dir: Path, job: str) -> Outcome | None:
    """Return how the last start of a run's job ended; None if it has not, is not known, or the job starts again.

    `job` is the job's label; empty if it is not known: any.
    """
    ended, began_s = journal.last_end(run_dir, job), number(_last_record(run_dir).get("time")) or 0.0
    return None if ended is None or ended.starts_again or ended.time < began_s else ended


def _last_record(run_dir: Path) -> Mapping[str, Any]:
    """The last record of a start or of its end; empty without one."""
    records = [one for one in json_lines(run_dir / File.STARTS) if one.get("kind") in ("start", "end")]
    return records[-1] if records else {}


def saved_step(run_dir: Path) -> int | None:
    """Return the step of a run's newest checkpoint; None if there is none."""
    match = re.fullmatch(r"step-(\d{1,15})\.pt\s*", tail(run_dir / File.PROGRESS))
    return int(match[1]) if match else None


def non_finite_step(run_dir: Path) -> int | None:
    """Return the step at which the last start of a run found NaN or Inf in its weights; None if it found none.

    None also if a later state was saved: then it is finite again.
    """
    step = None
    for record in json_lines(run_dir / File.STARTS):
        if record.get("kind") in ("start", "non_finite"):
            step = record["step"] if record["kind"] == "non_finite" and isinstance(record.get("step"), int) else None
    return None if step is None or step <= (saved_step(run_dir) or 0) else step


def full_disk(run_dir: Path) -> str | None:
    """Return what a running training can't write, and until when it waits for that; None if nothing is known.

    It can't say so itself: its logs are on that disk. Its lock file says until when (`File.LOCK`).
    """
    try:
        space = os.statvfs(run_dir)
        until_s = (run_dir / File.LOCK).stat().st_mtime
    except OSError:
        return None
    free_mb = space.f_bavail * space.f_frsize / 1e6
    hint = f"Hint: make room: df -h {shlex.quote(str(run_dir))}; or see quota"
    if until_s > time.time():
        until = time.strftime("%H:%M:%S", time.localtime(until_s))
        found = f"the training has ended, and waits until {until} to write its last files; the rest is lost then"
        return f"{found}. Its disk has {free_mb:,.0f} MB free. {hint}"
    if space.f_bavail == 0:
        return f"its disk is full: logs, metrics and checkpoints are not written. {hint}"
    return None


def _last_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return json_lines(run_dir / File.METRICS, last_bytes=_TAIL_BYTES)
