"""What the runs of a folder have cost, since a day: a line for each of them, and the sums."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster_ddp.errors import RunDirError, SpecError, aligned, counted, printable
from cluster_ddp.jobs import find_runs
from cluster_ddp.jobs.report import cost
from cluster_ddp.jobs.report.cost import Cost
from cluster_ddp.jobs.report.gpu_hours import KINDS
from cluster_ddp.jobs.run_record import RunRecord
from cluster_ddp.jobs.status import run_statuses

_LINES = 50  # of more runs, only the newest have a line


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCost:
    """A run and what it has cost."""

    record: RunRecord
    """Its directory."""
    state: str
    """Its state."""
    cost: Cost
    """What it has cost."""


def parse_day(text: str) -> float:
    """Return when a day begins in the local time of this machine, in seconds of UNIX time.

    Raises:
        SpecError: it is not written as 2026-11-01.
    """
    try:
        return datetime.strptime(text, "%Y-%m-%d").timestamp()  # in local time
    except ValueError as error:
        raise SpecError(f"Reading --since {text}:", "it is not a day.", "write it as --since 2026-11-01") from error


def read(folder: Path, since: str | None) -> list[RunCost]:
    """Return the runs of a folder, those submitted on a day and later, in the order of submission.

    Raises:
        SpecError: `since` is not a day.
        RunDirError: there are no such runs.
    """
    since_s = parse_day(since) if since is not None else 0.0
    found = find_runs.in_folder(folder)
    chosen = {one.run_dir: one for one in found if one.began_s >= since_s}
    if not chosen:
        words = (
            f"the newest of its {counted(len(found), 'run')} is from {_day(found[-1])}" if found else "it has no runs"
        )
        hint = "choose an earlier day" if found else "give the folder of the run directories, such as runs/"
        raise RunDirError(f"Adding up the runs of {folder}{f' since {since}' if since else ''}:", f"{words}.", hint)
    site = cost.co2_g_per_kwh()
    return [
        RunCost(
            record=chosen[one.run_dir],
            state=one.state,
            cost=cost.read(one.run_dir, cost.now(one), co2_g_per_kwh=site),
        )
        for one in run_statuses(folder, [])
        if one.run_dir in chosen
    ]


def _day(record: RunRecord) -> str:
    with suppress(OverflowError, OSError, ValueError):  # no time that makes sense
        return time.strftime("%Y-%m-%d", time.localtime(record.began_s))
    return "-"


def as_text(runs: Sequence[RunCost]) -> str:
    """Return a table for a terminal."""
    whole = {name: values for name, values in _columns([one.cost for one in runs]).items() if _known(values)}
    first = max(0, len(runs) - _LINES)
    rows = [["RUN", "STATE", "SUBMITTED", *whole]]
    for at, one in enumerate(runs[first:], first):
        cells = [_cell(values[at]) for values in whole.values()]
        rows.append([one.record.run_dir.name, one.state, _day(one.record), *cells])
    rows.append([f"sum of {len(runs)}", "", "", *(_cell(sum(_known(values))) for values in whole.values())])
    if any(len(_known(values)) < len(runs) for values in whole.values()):
        rows.append(["known of", "", "", *(str(len(_known(values))) for values in whole.values())])
    table = ["  ".join(row).rstrip() for row in aligned([[printable(cell) for cell in row] for row in rows])]
    left_out = [f"(without a line: {counted(first, 'earlier run')})"] if first else []
    shared = ["Of some runs, others used the GPUs, too: energy is that of the whole GPUs."]
    return "\n".join([table[0], *left_out, *table[1:], *(shared if any(one.cost.shared_gpus for one in runs) else [])])


def _columns(costs: Sequence[Cost]) -> dict[str, list[float | None]]:
    of_kinds = {kind.upper(): [one.lost_gpu_hours.get(kind) for one in costs] for kind in KINDS}
    hours = {"GPU HOURS": [one.gpu_hours for one in costs], "KEPT": [one.kept_gpu_hours for one in costs]}
    return {**hours, **of_kinds, "KWH": [one.energy_kwh for one in costs], "CO2 KG": [one.co2_kg for one in costs]}


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _cell(value: float | None) -> str:
    return "-" if value is None else cost.figure(value)


def as_json(runs: Sequence[RunCost]) -> Mapping[str, Any]:
    """Return the same as an object for JSON: each run, the sum of what is known, and of how many runs that is."""
    known = {
        name.lower().replace(" ", "_"): len(_known(values))
        for name, values in _columns([one.cost for one in runs]).items()
    }
    of_runs = [
        {"job": one.record.job, "run_dir": one.record.run_dir, "state": one.state, "submitted": one.record.began_s}
        | {"cost": asdict(one.cost)}
        for one in runs
    ]
    return {"runs": of_runs, "sum": asdict(cost.total([one.cost for one in runs])), "known": known}
