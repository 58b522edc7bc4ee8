"""What runs have cost, over all their jobs, requeues and restarts: GPU hours, what was lost of them, and energy.

Of one run, as a value and in words; of the runs of a folder since a day, as a table with sums.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster_ddp.errors import ProfileError, RunDirError, SpecError, aligned, counted, printable
from cluster_ddp.jobs import find_runs
from cluster_ddp.jobs.report import lost_gpu_hours, training_stats, usage
from cluster_ddp.jobs.report.lost_gpu_hours import KINDS
from cluster_ddp.jobs.report.training_stats import Training
from cluster_ddp.jobs.report.usage import NodeUse
from cluster_ddp.jobs.run_record import RunRecord
from cluster_ddp.jobs.status import RunStatus, statuses_of

_J_PER_KWH = 3.6e6
_NODES = 16  # of more, each one's energy is not said
_LINES = 50  # of more runs, only the newest have a line


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a run has cost so far. None, or a missing kind or node, stands for what is not known."""

    gpu_hours: float | None = None
    """Of all GPUs that its jobs had, spare nodes included, from each start of a job by Slurm to its end."""
    kept_gpu_hours: float | None = None
    """Without what was lost; None unless all kinds are known."""
    lost_gpu_hours: Mapping[str, float] = field(default_factory=dict)
    """By kind: see `lost_gpu_hours.KINDS`."""
    energy_kwh: float | None = None
    """Of the GPUs, while they were sampled."""
    energy_kwh_by_node: Mapping[str, float] = field(default_factory=dict)
    """The same by node."""
    shared_gpus: bool = False
    """Whether others were seen on its GPUs: their energy is included, too."""
    co2_kg: float | None = None
    """Of that energy, if the site has said how much a kWh makes."""

    @property
    def kept(self) -> float | None:
        """The part of the GPU hours that was kept, 0 to 1."""
        return self.kept_gpu_hours / self.gpu_hours if self.kept_gpu_hours is not None and self.gpu_hours else None

    @property
    def lost_words(self) -> str:
        """What was lost, in words: "starts 0.4, steps 0.7"; empty if nothing, or nothing is known."""
        return ", ".join(f"{kind} {_figure(hours)}" for kind, hours in self.lost_gpu_hours.items() if hours)

    @property
    def energy_words(self) -> str:
        """The energy and its CO2, in words; empty if unknown."""
        if self.energy_kwh is None:
            return ""
        of_nodes = self.energy_kwh_by_node
        by_node = ", ".join(f"{name} {_figure(kwh)}" for name, kwh in of_nodes.items())
        words = f"{_figure(self.energy_kwh)} kWh of the GPUs alone"
        words += f" ({by_node})" if 1 < len(of_nodes) <= _NODES else ""
        words += "" if self.co2_kg is None else f", {_figure(self.co2_kg)} kg of CO2"
        return words + (". Others used these GPUs, too" if self.shared_gpus else "")

    @property
    def bars(self) -> list[tuple[str, float | None, str]]:
        """As `summary.bars` has them; empty if nothing is known."""
        made: list[tuple[str, float | None, str]] = []
        if self.gpu_hours is not None:
            words = _figure(self.gpu_hours) if self.kept is None else f"of {_figure(self.gpu_hours)} kept"
            made.append(("GPU hours", self.kept, words + (f"; lost: {self.lost_words}" if self.lost_words else "")))
        return made + ([("Energy", None, self.energy_words)] if self.energy_words else [])

    @property
    def line(self) -> str:
        """All in a line; empty if nothing is known."""
        hours = "" if self.gpu_hours is None else f"{_figure(self.gpu_hours)} GPU hours"
        hours += f", {_figure(self.kept_gpu_hours)} kept" if self.kept_gpu_hours is not None else ""
        hours += f" (lost: {self.lost_words})" if hours and self.lost_words else ""
        said = "; ".join(filter(None, (hours, self.energy_words)))
        return f"Cost: {said}" if said else ""


def _figure(value: float) -> str:
    """Return a number with three digits; one that is very small only as that."""
    if 0 < value < 0.0001:
        return "<0.0001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def read(status: RunStatus, *, co2_g_per_kwh: float | None = None) -> Cost:
    """Return what a run has cost."""
    if status.run_dir is None:
        return Cost()
    return of(status, training_stats.read(status.run_dir), usage.read(status.run_dir), co2_g_per_kwh=co2_g_per_kwh)


def of(status: RunStatus, training: Training, nodes: Sequence[NodeUse], *, co2_g_per_kwh: float | None = None) -> Cost:
    """Return what a run has cost, whose training and use of nodes are read already."""
    by_node = {node.node: node.energy_j / _J_PER_KWH for node in nodes if node.energy_j is not None}
    kwh = sum(by_node.values()) if by_node and len(by_node) == len(nodes) else None
    hours, lost = lost_gpu_hours.read(status, training)
    is_all = hours is not None and lost.keys() == {*KINDS}
    return Cost(
        gpu_hours=hours,
        kept_gpu_hours=max(0.0, hours - sum(lost.values())) if hours is not None and is_all else None,
        lost_gpu_hours=lost,
        energy_kwh=kwh,
        energy_kwh_by_node=by_node,
        shared_gpus=any(gpu.shared for node in nodes for gpu in node.gpus),
        co2_kg=None if kwh is None or co2_g_per_kwh is None else kwh * co2_g_per_kwh / 1000,
    )


def total(costs: Sequence[Cost], *, partly: bool = True) -> Cost:
    """Return the sum of several runs: of what is known, or of the figures that are known of all (not `partly`)."""

    def added(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known and (partly or len(known) == len(costs)) else None

    lost = {kind: added(one.lost_gpu_hours.get(kind) for one in costs) for kind in KINDS}
    return Cost(
        gpu_hours=added(one.gpu_hours for one in costs),
        kept_gpu_hours=added(one.kept_gpu_hours for one in costs),
        lost_gpu_hours={kind: hours for kind, hours in lost.items() if hours is not None},
        energy_kwh=added(one.energy_kwh for one in costs),
        energy_kwh_by_node=costs[0].energy_kwh_by_node if len(costs) == 1 else {},
        shared_gpus=any(one.shared_gpus for one in costs),
        co2_kg=added(one.co2_kg for one in costs),
    )


def co2_g_per_kwh() -> float | None:
    """Return how much CO2 a kWh makes, as cluster.toml says for this folder; None if it does not, or can't be used."""
    from cluster_ddp.submission.cli import settings_files

    with suppress(ProfileError, OSError):  # a submission says what is wrong with it; this folder may be gone
        found: float | None = settings_files.load(None, folder=Path.cwd(), env=os.environ).values.get("co2_g_per_kwh")
        return found
    return None


def parse_day(text: str) -> float:
    """Return when a day begins in the local time of this machine, in seconds of UNIX time.

    Raises:
        SpecError: it is not written as 2026-11-01.
    """
    try:
        return datetime.strptime(text, "%Y-%m-%d").timestamp()  # in local time
    except ValueError as error:
        raise SpecError(f"Reading --since {text}:", "it is not a day.", "write it as --since 2026-11-01") from error


Runs = Sequence[tuple[RunRecord, RunStatus, Cost]]
"""Runs, with what became of each, and what it has cost."""


def of_folder(folder: Path, since: str | None) -> Runs:
    """Return the runs of a folder, those submitted on a day and later, in the order of submission.

    Raises:
        SpecError: `since` is not a day.
        RunDirError: there are no such runs.
    """
    since_s = parse_day(since) if since is not None else 0.0
    found = find_runs.in_folder(folder)
    chosen = [one for one in found if one.began_s >= since_s]
    if not chosen:
        is_empty, hint = "it has no runs", "give the folder of the run directories, such as runs/"
        if found:
            is_empty = f"the newest of its {counted(len(found), 'run')} is from {_day(found[-1])}"
            hint = "choose an earlier day"
        raise RunDirError(f"Adding up the runs of {folder}{f' since {since}' if since else ''}:", f"{is_empty}.", hint)
    site = co2_g_per_kwh()
    return [(one, status, read(status, co2_g_per_kwh=site)) for one, status in zip(chosen, statuses_of(chosen))]


def _day(record: RunRecord) -> str:
    with suppress(OverflowError, OSError, ValueError):  # no time that makes sense
        return time.strftime("%Y-%m-%d", time.localtime(record.began_s))
    return "-"


def _columns(costs: Sequence[Cost]) -> dict[str, list[float | None]]:
    of_kinds = {kind.upper(): [one.lost_gpu_hours.get(kind) for one in costs] for kind in KINDS}
    hours = {"GPU HOURS": [one.gpu_hours for one in costs], "KEPT": [one.kept_gpu_hours for one in costs]}
    return {**hours, **of_kinds, "KWH": [one.energy_kwh for one in costs], "CO2 KG": [one.co2_kg for one in costs]}


def _known(values: Sequence[float | None]) -> int:
    return sum(value is not None for value in values)


def as_text(runs: Runs) -> str:
    """Return a table of runs for a terminal, with the sums."""
    costs = [cost for _, _, cost in runs]
    figures = {name: values for name, values in _columns([*costs, total(costs)]).items() if values[-1] is not None}
    names = [(record.run_dir.name, status.state, _day(record)) for record, status, _ in runs]
    names.append((f"sum of {len(runs)}", "", ""))
    first = max(0, len(runs) - _LINES)
    rows = [["RUN", "STATE", "SUBMITTED", *figures]]
    for at, name in enumerate(names[first:], first):
        cells = (values[at] for values in figures.values())
        rows.append([*name, *("-" if value is None else _figure(value) for value in cells)])
    known = [_known(values[:-1]) for values in figures.values()]
    if min(known, default=len(runs)) < len(runs):
        rows.append(["known of", "", "", *map(str, known)])
    lines = ["  ".join(row).rstrip() for row in aligned([[printable(cell) for cell in row] for row in rows])]
    lines[1:1] = [f"(without a line: {counted(first, 'earlier run')})"] if first else []
    shared = ["Of some runs, others used the GPUs, too: energy is that of the whole GPUs."]
    return "\n".join(lines + (shared if any(one.shared_gpus for one in costs) else []))


def as_json(runs: Runs) -> Mapping[str, Any]:
    """Return the same as an object for JSON: each run, the sum of what is known, and of how many runs that is."""
    costs = [cost for _, _, cost in runs]
    known = {name.lower().replace(" ", "_"): _known(values) for name, values in _columns(costs).items()}
    of_runs = [
        {"job": one.job, "run_dir": one.run_dir, "state": status.state, "submitted": one.began_s, "cost": asdict(cost)}
        for one, status, cost in runs
    ]
    return {"runs": of_runs, "sum": asdict(total(costs)), "known": known}
