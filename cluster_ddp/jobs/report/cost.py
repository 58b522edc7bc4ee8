"""What runs have cost, over all their jobs, requeues and restarts: GPU hours, what was lost of them, and energy.

Of one run, as a value and in words; of the runs of a folder since a day, as a table with sums.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster_ddp.errors import RunDirError, SpecError, aligned, counted, printable
from cluster_ddp.jobs import find_runs
from cluster_ddp.jobs.report import lost_gpu_hours, training_stats, usage
from cluster_ddp.jobs.report.training_stats import TrainingStats
from cluster_ddp.jobs.report.usage import NodeUse
from cluster_ddp.jobs.run_record import RunRecord
from cluster_ddp.jobs.status import RunStatus, statuses_of
from cluster_ddp.run import journal, places

_J_PER_KWH = 3.6e6
_NODES = 16  # of more, each one's energy is not said
_LINES = 50  # of more runs, only the newest have a line


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a run has cost so far. None, or a missing node, stands for what is not known."""

    gpu_hours: float | None = None
    """Of all GPUs that its jobs had, spare nodes included, from each start of a job by Slurm to its end."""
    kept_gpu_hours: float | None = None
    """Without what was lost."""
    lost_gpu_hours: float | None = None
    """Until the training began, in steps after the newest checkpoint, by nodes that waited, and in saves."""
    most_lost: str = ""
    """In which of these most was lost; empty if nothing was, and of several runs."""
    energy_kwh: float | None = None
    """Of the GPUs, while they were sampled; None if those of a node were not, in a start in which others were."""
    energy_kwh_by_node: Mapping[str, float] = field(default_factory=dict)
    """The same by node."""
    shared_gpus: bool = False
    """Whether others were seen on its GPUs: their energy is included, too."""

    @property
    def kept(self) -> float | None:
        """The part of the GPU hours that was kept, 0 to 1."""
        return self.kept_gpu_hours / self.gpu_hours if self.kept_gpu_hours is not None and self.gpu_hours else None

    @property
    def lost_words(self) -> str:
        """What was lost, in words: "1.1 lost, most by nodes that waited"; empty if nothing, or it is not known."""
        most = f", most {self.most_lost}" if self.most_lost else ""
        return f"{_figure(self.lost_gpu_hours)} lost{most}" if self.lost_gpu_hours else ""

    @property
    def energy_words(self) -> str:
        """The energy in words; empty if unknown."""
        if self.energy_kwh is None:
            return "not measured on all nodes" if self.energy_kwh_by_node else ""
        of_nodes = self.energy_kwh_by_node
        by_node = ", ".join(f"{name} {_figure(kwh)}" for name, kwh in of_nodes.items())
        words = f"{_figure(self.energy_kwh)} kWh of the GPUs alone"
        words += f" ({by_node})" if 1 < len(of_nodes) <= _NODES else ""
        return words + (". Others used these GPUs, too" if self.shared_gpus else "")

    @property
    def bars(self) -> list[tuple[str, float | None, str]]:
        """As `summary.bars` has them; empty if nothing is known."""
        made: list[tuple[str, float | None, str]] = []
        if self.gpu_hours is not None:
            words = _figure(self.gpu_hours) if self.kept is None else f"of {_figure(self.gpu_hours)} kept"
            made.append(("GPU hours", self.kept, words + (f"; {self.lost_words}" if self.lost_words else "")))
        return made + ([("Energy", None, self.energy_words)] if self.energy_words else [])

    @property
    def line(self) -> str:
        """All in a line; empty if nothing is known."""
        hours = "" if self.gpu_hours is None else f"{_figure(self.gpu_hours)} GPU hours"
        hours += f", {_figure(self.kept_gpu_hours)} kept" if self.kept_gpu_hours is not None else ""
        hours += f" ({self.lost_words})" if self.lost_words else ""
        energy = f"energy {self.energy_words}" if self.energy_words and self.energy_kwh is None else self.energy_words
        said = "; ".join(filter(None, (hours, energy)))
        return f"Cost: {said}" if said else ""


def _figure(value: float) -> str:
    """Return a number with three digits; one that is very small only as that."""
    if 0 < value < 0.0001:
        return "<0.0001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def read(status: RunStatus) -> Cost:
    """Return what a run has cost."""
    if status.run_dir is None:
        return Cost()
    return of(status, training_stats.read(status.run_dir), usage.read(status.run_dir))


def of(status: RunStatus, training: TrainingStats, nodes: Sequence[NodeUse]) -> Cost:
    """Return what a run has cost, whose training and use of nodes are read already."""
    by_node = {node.node: node.energy_j / _J_PER_KWH for node in nodes if node.energy_j is not None}
    training_nodes = {one.id: one.training for one in journal.starts(status.run_dir or Path())}
    sampled = Counter(start for node in nodes for start in node.starts if node.node in by_node)
    is_whole = len(by_node) == len(nodes) and all(sampled[one] >= training_nodes.get(one, 0) for one in sampled)
    kwh = sum(by_node.values()) if by_node and is_whole else None
    hours, lost, most = lost_gpu_hours.read(status, training)
    return Cost(
        gpu_hours=hours,
        kept_gpu_hours=None if hours is None or lost is None else max(0.0, hours - lost),
        lost_gpu_hours=lost,
        most_lost=most,
        energy_kwh=kwh,
        energy_kwh_by_node=by_node,
        shared_gpus=any(gpu.shared for node in nodes for gpu in node.gpus),
    )


def total(costs: Sequence[Cost], *, partly: bool = True) -> Cost:
    """Return the sum of several runs: of what is known, or of the figures that are known of all (not `partly`)."""

    def added(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known and (partly or len(known) == len(costs)) else None

    return Cost(
        gpu_hours=added(one.gpu_hours for one in costs),
        kept_gpu_hours=added(one.kept_gpu_hours for one in costs),
        lost_gpu_hours=added(one.lost_gpu_hours for one in costs),
        most_lost=costs[0].most_lost if len(costs) == 1 else "",
        energy_kwh=added(one.energy_kwh for one in costs),
        energy_kwh_by_node=costs[0].energy_kwh_by_node if len(costs) == 1 else {},
        shared_gpus=any(one.shared_gpus for one in costs),
    )


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
    return [(one, status, read(status)) for one, status in zip(chosen, statuses_of(chosen))]


def _day(record: RunRecord) -> str:
    with suppress(OverflowError, OSError, ValueError):  # no time that makes sense
        return time.strftime("%Y-%m-%d", time.localtime(record.began_s))
    return "-"


def _columns(costs: Sequence[Cost]) -> dict[str, list[float | None]]:
    return {
        "GPU HOURS": [one.gpu_hours for one in costs],
        "KEPT": [one.kept_gpu_hours for one in costs],
        "LOST": [one.lost_gpu_hours for one in costs],
        "KWH": [one.energy_kwh for one in costs],
    }


def _known(values: Sequence[float | None]) -> int:
    return sum(value is not None for value in values)


def as_text(runs: Runs) -> str:
    """Return a table of runs for a terminal, with the sums."""
    costs = [cost for _, _, cost in runs]
    figures = {name: values for name, values in _columns([*costs, total(costs)]).items() if values[-1] is not None}
    names = [(places.title(record.run_dir), status.state, _day(record)) for record, status, _ in runs]
    names.append((f"sum of {len(runs)}", "", ""))
    first = max(0, len(runs) - _LINES)
    most_lost = [*(cost.most_lost for cost in costs), ""]
    rows = [["RUN", "STATE", "SUBMITTED", *figures, "MOST LOST" if any(most_lost) else ""]]
    for at, name in enumerate(names[first:], first):
        cells = (values[at] for values in figures.values())
        rows.append([*name, *("-" if value is None else _figure(value) for value in cells), most_lost[at]])
    known = [_known(values[:-1]) for values in figures.values()]
    if min(known, default=len(runs)) < len(runs):
        rows.append(["known of", "", "", *map(str, known), ""])
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
