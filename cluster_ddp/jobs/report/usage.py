"""How the nodes of a run were used: what its usage-<node>.jsonl files say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.run.files import each_json_line, json_lines, number
from cluster_ddp.run.names import File

_GIB, _MIB = 1 << 30, 1 << 20
_TAIL_BYTES, _MOST_BYTES = 8 * 1024, 64 * _MIB  # several records; those of days
_STALE_S = 60.0
_MOST = 1e18


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """One GPU of a node. None stands for what is not known."""

    utilization: float | None
    """The part of the time in which a kernel ran, 0 to 1: the mean."""
    memory: float | None
    """Bytes in use, at most."""
    memory_total: float | None
    """Bytes that it has."""
    power_w: float | None
    """The mean power."""
    temperature_c: float | None
    """The highest temperature of a record."""
    throttled: float | None
    """The part of the time in which heat or power lowered its clocks."""
    energy_j: float | None
    """The energy that it took while it was sampled, in joules."""
    shared: bool
    """Whether it was seen that others used it, too: then the energy is theirs, too."""

    @property
    def filled(self) -> float | None:
        """The part of its memory that was in use, at most, 0 to 1."""
        return self.memory / self.memory_total if self.memory is not None and self.memory_total else None

    @property
    def words(self) -> str:
        """Its memory, power and temperature, as far as they are known."""
        words = []
        if self.memory is not None:
            of = f" of {self.memory_total / _GIB:.1f}" if self.memory_total else ""
            words.append(f"{self.memory / _GIB:.1f}{of} GiB")
        if self.power_w is not None:
            words.append(f"{self.power_w:.0f} W")
        if self.temperature_c is not None:
            words.append(f"{self.temperature_c:.0f} °C at most")
        if self.throttled:
            words.append(f"slowed by heat or power {100 * self.throttled:.0f} % of the time")
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUse:
    """One node of a run, over all its starts."""

    node: str
    """Its name."""
    seconds: float
    """How long it was sampled."""
    starts: frozenset[int]
    """The ids of the starts in which it was sampled."""
    cpus: int
    """Number of CPUs of the job on it."""
    cpu: float
    """The part of these that was busy, 0 to 1: the mean."""
    memory: float | None
    """Bytes in use, at most; None if unknown."""
    received_per_s: float | None
    """Bytes that the node received in a second, the loopback left out: the mean. It may have had other jobs, too."""
    sent_per_s: float | None
    """Bytes that it sent in a second."""
    gpus: tuple[GpuUse, ...]
    """Its GPUs."""

    @property
    def energy_j(self) -> float | None:
        """The energy that its GPUs took while they were sampled; None if that of one is unknown, or without GPUs."""
        known = [gpu.energy_j for gpu in self.gpus if gpu.energy_j is not None]
        return sum(known) if known and len(known) == len(self.gpus) else None

    @property
    def network(self) -> str:
        """What it received and sent, in words; empty if unknown."""
        if self.received_per_s is None or self.sent_per_s is None:
            return ""
        return f"{self.received_per_s / _MIB:.1f} MiB/s in, {self.sent_per_s / _MIB:.1f} MiB/s out"


def read(run_dir: Path) -> list[NodeUse]:
    """Return the use of each node of a run, in their order; empty if there is no record. Damaged lines are left out."""
    of_nodes: dict[str, list[dict[str, Any]]] = {}
    for record in records(run_dir, last_bytes=_MOST_BYTES):
        of_nodes.setdefault(record["node"], []).append(record)
    return [_node(name, of_node) for name, of_node in of_nodes.items()]


def records(run_dir: Path, **limit: Any) -> Iterable[dict[str, Any]]:
    """Yield the samples of all nodes, one node after the other. Damaged lines are left out."""
    for path in sorted(run_dir.glob(File.USAGE.format("*")), key=lambda path: (len(path.name), path.name)):
        yield from filter(_is_whole, each_json_line(path, **limit))


def newest(run_dir: Path) -> list[str]:
    """Return how busy the nodes were in their last ten seconds, in words: their GPUs, or without GPUs their CPUs."""
    last = []
    for path in run_dir.glob(File.USAGE.format("*")):
        last += [*filter(_is_whole, json_lines(path, last_bytes=_TAIL_BYTES))][-1:]
    times_s = [number(record.get("time")) or 0.0 for record in last]
    now_s = max(times_s, default=0.0)  # a start before may have had more nodes
    last = [record for record, time_s in zip(last, times_s) if time_s > now_s - _STALE_S]
    gpus = [gpu["utilization"] for record in last for gpu in record["gpus"] if "utilization" in gpu]
    if gpus:
        return [f"GPUs {100 * sum(gpus) / len(gpus):.0f} % busy"]
    busy = weighted_mean((record["cpus"], record["cpu"]) for record in last)
    return [] if busy is None else [f"CPUs {100 * busy:.0f} % busy"]


def mean_utilization(nodes: Sequence[NodeUse]) -> float | None:
    """Return how busy the GPUs of nodes were, 0 to 1: the mean over the time; None if unknown."""
    return weighted_mean((node.seconds, gpu.utilization) for node in nodes for gpu in node.gpus)


def weighted_mean(weighted: Iterable[tuple[float, float | None]]) -> float | None:
    """Return the mean of values with weights, those of None left out; None without any."""
    known = [(weight, value) for weight, value in weighted if value is not None]
    return sum(weight * value for weight, value in known) / sum(weight for weight, _ in known) if known else None


def _node(name: str, samples: Sequence[Mapping[str, Any]]) -> NodeUse:
    timed = [(sample["seconds"], sample) for sample in samples]
    gpus: list[list[tuple[float, Mapping[str, Any]]]] = [[] for _ in range(max(len(one["gpus"]) for one in samples))]
    for seconds, sample in timed:
        for at, gpu in enumerate(sample["gpus"]):
            gpus[at].append((seconds, gpu))
    return NodeUse(
        node=name,
        seconds=sum(seconds for seconds, _ in timed),
        starts=frozenset(sample["start_id"] for sample in samples if type(sample.get("start_id")) is int),
        cpus=max(int(sample["cpus"]) for sample in samples),
        cpu=_mean("cpu", timed) or 0.0,
        memory=_most("memory", timed),
        received_per_s=_mean("received_per_s", timed),
        sent_per_s=_mean("sent_per_s", timed),
        gpus=tuple(map(_gpu, gpus)),
    )


def _gpu(timed: Sequence[tuple[float, Mapping[str, Any]]]) -> GpuUse:
    return GpuUse(
        utilization=_mean("utilization", timed),
        memory=_most("memory", timed),
        memory_total=_most("memory_total", timed),
        power_w=_mean("power_w", timed),
        temperature_c=_most("temperature_c", timed),
        throttled=_mean("throttled", timed),
        energy_j=_energy_j(timed),
        shared=any(sample.get("shared") for _, sample in timed),
    )


def _energy_j(timed: Sequence[tuple[float, Mapping[str, Any]]]) -> float | None:
    """By the counter, or else by the mean power of a sample; None if one has neither."""
    if any("energy_j" not in sample and "power_w" not in sample for _, sample in timed):
        return None
    return sum(float(sample.get("energy_j", seconds * sample.get("power_w", 0.0))) for seconds, sample in timed)


def _mean(name: str, timed: Sequence[tuple[float, Mapping[str, Any]]]) -> float | None:
    """The mean of a figure over the seconds of the samples that have it."""
    return weighted_mean((seconds, sample.get(name)) for seconds, sample in timed)


def _most(name: str, timed: Sequence[tuple[float, Mapping[str, Any]]]) -> float | None:
    return max((sample[name] for _, sample in timed if name in sample), default=None)


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Whether a record has what each needs, and all its figures are such."""
    gpus = record.get("gpus")
    if not isinstance(record.get("node"), str) or not isinstance(gpus, list):
        return False
    figures = [record.get(name) for name in ("seconds", "cpus", "cpu")]
    figures += [record.get(name, 0) for name in ("memory", "received_per_s", "sent_per_s")]
    for gpu in gpus:
        figures += gpu.values() if isinstance(gpu, dict) else [None]
    return all(map(_is_figure, figures)) and record["seconds"] > 0 and record["cpus"] >= 1


def _is_figure(value: object) -> bool:
    found = number(value, _MOST)
    return found is not None and found >= 0
