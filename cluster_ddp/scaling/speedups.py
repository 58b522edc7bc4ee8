"""The figures of a study: medians over the runs of each configuration, speedup, efficiency, and a recommendation."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from cluster_ddp.errors import aligned, counted
from cluster_ddp.scaling.points import Measured, Point

_FEW_NODES = 4  # with so few, a spare node rarely pays


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One configuration. None stands for what was not measured."""

    gpus: int
    """Number of GPUs."""
    nodes: int
    """Number of nodes."""
    runs: int
    """Number of measured runs."""
    samples_per_s: float | None = None
    """Samples per second of all GPUs: the median over the runs."""
    samples_per_s_least: float | None = None
    """Of the slowest run."""
    samples_per_s_most: float | None = None
    """Of the fastest run."""
    speedup: float | None = None
    """How many times as fast as the configuration with the fewest GPUs, times that one's number of GPUs."""
    efficiency: float | None = None
    """Speedup for each GPU: 1 if each added GPU is worth as much as the first ones."""
    waiting_for_data: float | None = None
    """The part of the time that rank 0 waited for batches: 0 to 1."""
    communication: float | None = None
    """The part of a step that all-reduces take and backward does not hide: 0 to 1."""
    gpu_hours_per_epoch: float | None = None
    """GPUs times hours of an epoch's training."""
    training_s: float | None = None
    """Seconds that all steps of the training take, to its end: the median over the runs."""
    seconds: float | None = None
    """From a job's start to its end: the median over the runs."""


def rows(measured: Mapping[Point, Measured], points: Sequence[Point], *, weak: bool) -> list[Row]:
    """Return a row for each configuration of a study, by the number of GPUs.

    If no run has a throughput, the times of the jobs are compared: for all configurations, or for none. If it is a
    `weak` study, more GPUs do more work then, so that equal times mean an efficiency of 1.
    """
    found: list[Row] = []
    for count in sorted({point.gpus for point in points}):
        of_count = [point for point in points if point.gpus == count]
        found.append(_row(of_count[0], [measured[point] for point in of_count if point in measured]))
    work = _rates(found, weak=weak)
    per_gpu = next((rate / gpus for gpus, rate in work.items()), None)
    for at, row in enumerate(found):
        if per_gpu and row.gpus in work:
            speedup = work[row.gpus] / per_gpu
            found[at] = replace(row, speedup=speedup, efficiency=speedup / row.gpus)
    return found


def by_time(found: Sequence[Row]) -> bool:
    """Return whether the times of the jobs are compared, since no configuration has a throughput."""
    return all(row.samples_per_s is None for row in found)


def recommended(found: Sequence[Row], *, min_efficiency: float) -> str:
    """Return which number of GPUs to ask for, in words: the largest that is efficient enough."""
    known = [row for row in found if row.efficiency is not None]
    if len(known) < 2:
        return "No recommendation: it needs two numbers of GPUs that are measured."
    efficient = [row for row in known if row.efficiency is not None and row.efficiency >= min_efficiency]
    best = efficient[-1]
    size = f"--nodes {best.nodes} --gpus-per-node {best.gpus // best.nodes}"
    ask, least = f"Recommendation: {counted(best.gpus, 'GPU')} ({size})", f"{100 * min_efficiency:.0f} %"
    if best is known[0]:
        why = f"no larger number that was measured has an efficiency of {least}"
    else:
        why = f"the most with an efficiency of {least} or more; it is {100 * (best.efficiency or 0):.0f} %"
    return f"{ask}: {why}.{_range(efficient)}{_spare(best)}"


def _range(efficient: Sequence[Row]) -> str:
    """The numbers of such nodes that are efficient, for a job that takes what is free; empty for one number."""
    best = efficient[-1]
    least = min(row.nodes for row in efficient if row.gpus * best.nodes == best.gpus * row.nodes)
    return f" To start with what is free: --nodes {least}-{best.nodes}." if least < best.nodes else ""


def _spare(row: Row) -> str:
    """What a spare node would cost; empty on one node."""
    if row.nodes == 1:
        return ""
    cost = f"{counted(row.gpus // row.nodes, 'GPU')} that wait idle, {100 / row.nodes:.0f} % more"
    rarely = f" With {row.nodes} nodes it rarely pays, but --restarts 3 does." if row.nodes <= _FEW_NODES else ""
    return f" A spare node (--restarts 3 --spare-nodes 1) costs {cost}.{rarely}"


def as_text(found: Sequence[Row]) -> str:
    """Return the table for a terminal."""
    columns = [_cells(row) for row in found]
    table = [tuple(columns[0]), *(tuple(cells.values()) for cells in columns)]
    return "\n".join(map("  ".join, aligned(table, str.rjust)))


def as_csv(found: Sequence[Row]) -> str:
    """Return the table as CSV; what was not measured is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in found)
    return text.getvalue()


def _rates(found: Sequence[Row], *, weak: bool) -> dict[int, float]:
    """Number of GPUs -> work per second, ascending; without what was not measured.

    Work is samples. If only times are known, it is jobs; if these are `weak`, each with the work of its GPUs.
    """
    if by_time(found):
        return {row.gpus: (row.gpus if weak else 1) / row.seconds for row in found if row.seconds}
    return {row.gpus: row.samples_per_s for row in found if row.samples_per_s}


def _row(point: Point, found: Sequence[Measured]) -> Row:
    per_s = [one.samples_per_s for one in found if one.samples_per_s is not None]
    median = _median(per_s)
    samples = max((one.epoch_samples for one in found if one.epoch_samples is not None), default=None)
    return Row(
        gpus=point.gpus,
        nodes=point.nodes,
        runs=len(found),
        samples_per_s=median,
        samples_per_s_least=min(per_s, default=None),
        samples_per_s_most=max(per_s, default=None),
        waiting_for_data=_median(one.waiting_for_data for one in found),
        communication=_median(one.communication for one in found),
        gpu_hours_per_epoch=point.gpus * samples / median / 3600 if samples and median else None,
        training_s=_median(one.training_s for one in found),
        seconds=_median(one.seconds for one in found),
    )


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _cells(row: Row) -> dict[str, str]:
    """Return heading -> text of a row's cells."""
    spread = "-"
    if row.samples_per_s_least is not None and row.samples_per_s_most is not None and row.runs > 1:
        spread = f"{_rounded(row.samples_per_s_least)} … {_rounded(row.samples_per_s_most)}"
    return {
        "GPUS": str(row.gpus),
        "NODES": str(row.nodes),
        "RUNS": str(row.runs),
        "SAMPLES/S": _rounded(row.samples_per_s),
        "FROM … TO": spread,
        "SPEEDUP": _shown(row.speedup, ".2f"),
        "EFFICIENCY": _shown(row.efficiency, ".0%"),
        "DATA": _shown(row.waiting_for_data, ".0%"),
        "COMM": _shown(row.communication, ".0%"),
        "GPU-H/EPOCH": _shown(row.gpu_hours_per_epoch, ".3g"),
        "TO THE END": _shown(row.training_s, ",.0f", " s"),
        "TIME": _shown(row.seconds, ".0f", " s"),
    }


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}".replace("%", " %") + unit


def _rounded(value: float | None) -> str:
    return _shown(value, ".3g" if value is not None and value < 100 else ",.0f")
