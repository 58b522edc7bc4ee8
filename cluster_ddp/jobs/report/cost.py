"""What a run has cost, over all its jobs, requeues and restarts: GPU hours, what was lost of them, and energy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cluster_ddp.errors import ProfileError
from cluster_ddp.jobs.report import gpu_hours, training_stats, usage
from cluster_ddp.jobs.report.gpu_hours import KINDS, Now
from cluster_ddp.jobs.report.training_stats import Training
from cluster_ddp.jobs.report.usage import NodeUse
from cluster_ddp.jobs.status import RunStatus

_J_PER_KWH = 3.6e6
_NODES = 16  # of more, each one's energy is not said


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a run has cost so far. None, or a missing kind or node, stands for what is not known."""

    gpu_hours: float | None = None
    """Of all GPUs that its jobs had, spare nodes included, from each start of a job by Slurm to its end."""
    kept_gpu_hours: float | None = None
    """Without what was lost; None unless all kinds are known."""
    lost_gpu_hours: Mapping[str, float] = field(default_factory=dict)
    """By kind: see `gpu_hours.KINDS`."""
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
        return ", ".join(f"{kind} {figure(hours)}" for kind, hours in self.lost_gpu_hours.items() if hours)

    @property
    def energy_words(self) -> str:
        """The energy and its CO2, in words; empty if unknown."""
        if self.energy_kwh is None:
            return ""
        of_nodes = self.energy_kwh_by_node
        by_node = ", ".join(f"{name} {figure(kwh)}" for name, kwh in of_nodes.items())
        words = f"{figure(self.energy_kwh)} kWh of the GPUs alone"
        words += f" ({by_node})" if 1 < len(of_nodes) <= _NODES else ""
        words += "" if self.co2_kg is None else f", {figure(self.co2_kg)} kg of CO2"
        return words + (". Others used these GPUs, too" if self.shared_gpus else "")

    @property
    def bars(self) -> list[tuple[str, float | None, str]]:
        """As `summary.bars` has them; empty if nothing is known."""
        made: list[tuple[str, float | None, str]] = []
        if self.gpu_hours is not None:
            kept = "" if self.kept is None else "of "
            words = f"{kept}{figure(self.gpu_hours)}{' kept' if kept else ''}"
            lost = f"; lost: {self.lost_words}" if self.lost_words else ""
            made.append(("GPU hours", self.kept, words + lost))
        return made + ([("Energy", None, self.energy_words)] if self.energy_words else [])

    @property
    def line(self) -> str:
        """All in a line; empty if nothing is known."""
        hours = "" if self.gpu_hours is None else f"{figure(self.gpu_hours)} GPU hours"
        hours += f", {figure(self.kept_gpu_hours)} kept" if self.kept_gpu_hours is not None else ""
        hours += f" (lost: {self.lost_words})" if hours and self.lost_words else ""
        said = "; ".join(filter(None, (hours, self.energy_words)))
        return f"Cost: {said}" if said else ""


def figure(value: float) -> str:
    """Return a number with three digits; one that is very small only as that."""
    if 0 < value < 0.0001:
        return "<0.0001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def read(run_dir: Path, now: Now, *, co2_g_per_kwh: float | None = None) -> Cost:
    """Return what a run has cost."""
    return of(run_dir, now, training_stats.read(run_dir), usage.read(run_dir), co2_g_per_kwh=co2_g_per_kwh)


def of(
    run_dir: Path, now: Now, training: Training, nodes: Sequence[NodeUse], *, co2_g_per_kwh: float | None = None
) -> Cost:
    """Return what a run has cost, whose training and use of nodes are read already."""
    by_node = {node.node: node.energy_j / _J_PER_KWH for node in nodes if node.energy_j is not None}
    kwh = sum(by_node.values()) if by_node and len(by_node) == len(nodes) else None
    hours, lost = gpu_hours.read(run_dir, now, training)
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
        every = list(values)
        known = [value for value in every if value is not None]
        return sum(known) if known and (partly or len(known) == len(every)) else None

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


def now(status: RunStatus) -> Now:
    """Return what the scheduler says of a run. The records of a chain have the id of its first job."""
    job = next(iter(status.chain), status.job)
    return Now(job=job, state=status.state, elapsed=status.elapsed, requeues=status.requeues)


def co2_g_per_kwh() -> float | None:
    """Return how much CO2 a kWh makes, as cluster.toml says for this folder; None if it does not, or can't be used."""
    from cluster_ddp.submission.cli import settings_files

    with suppress(ProfileError, OSError):  # a submission says what is wrong with it; this folder may be gone
        found: float | None = settings_files.load(None, folder=Path.cwd(), env=os.environ).values.get("co2_g_per_kwh")
        return found
    return None
