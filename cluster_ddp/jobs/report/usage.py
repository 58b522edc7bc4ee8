"""How the nodes of a run were used: what its usage-<node>.jsonl files say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.protocol import File
from cluster_ddp.run_files import each_json_line, json_lines

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
    def network(self) -> str:
        """What it received and sent, in words; empty if unknown."""
        if self.received_per_s is None or self.sent_per_s is None:
            return ""
        return f"{self.received_per_s / _MIB:.1f} MiB/s in, {self.sent_per_s / _MIB:.1f} MiB/s out"


def read(run_dir: Path) -> list[NodeUse]:
    """Return the use of each node of a run, in their order; empty if there is no record. Damaged lines are left out."""
    of_nodes: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(run_dir.glob(File.USAGE.format("*")), key=lambda path: (len(path.name), path.name)):
        for record in filter(is_whole, each_json_line(path, last_bytes=_MOST_BYTES)):
            of_nodes.setdefault(record["node"], []).append(record)
    return [_node(name, records) for name, records in of_nodes.items()]


def newest(run_dir: Path) -> list[str]:
    """Return how busy the nodes were in their last ten seconds, in words: their GPUs, or without GPUs their CPUs."""
    last = []
    for path in run_dir.glob(File.USAGE.format("*")):
        last += [*filter(is_whole, json_lines(path, last_bytes=_TAIL_BYTES))][-1:]
    now_s = max((_time_s(record) for record in last), default=0.0)
    last = [record for record in last if _time_s(record) > now_s - _STALE_S]  # a start before may have had more nodes
    gpus = [gpu["utilization"] for record in last for gpu in record["gpus"] if "utilization" in gpu]
    if gpus:
        return [f"GPUs {100 * sum(gpus) / len(gpus):.0f} % busy"]
    cpus = sum(record["cpus"] for record in last)
    return [f"CPUs {100 * sum(record['cpu'] * record['cpus'] for record in last) / cpus:.0f} % busy"] if cpus else []


def _node(name: str, records: Sequence[Mapping[str, Any]]) -> NodeUse:
    seconds = sum(record["seconds"] for record in records)
    timed = [(record["seconds"], record) for record in records]
    return NodeUse(
        node=name,
        seconds=seconds,
        cpus=max(int(record["cpus"]) for record in records),
        cpu=sum(record["cpu"] * record["seconds"] for record in records) / seconds,
        memory=max((record["memory"] for record in records if "memory" in record), default=None),
        received_per_s=_mean("received_per_s", timed),
        sent_per_s=_mean("sent_per_s", timed),
        gpus=tuple(
            _gpu([(record["seconds"], record["gpus"][at]) for record in records if len(record["gpus"]) > at])
            for at in range(max(len(record["gpus"]) for record in records))
        ),
    )


def _gpu(samples: Sequence[tuple[float, Mapping[str, float]]]) -> GpuUse:
    def most(name: str) -> float | None:
        return max((sample[name] for _, sample in samples if name in sample), default=None)

    return GpuUse(
        utilization=_mean("utilization", samples),
        memory=most("memory"),
        memory_total=most("memory_total"),
        power_w=_mean("power_w", samples),
        temperature_c=most("temperature_c"),
        throttled=_mean("throttled", samples),
    )


def _mean(name: str, samples: Sequence[tuple[float, Mapping[str, Any]]]) -> float | None:
    """The mean of a figure over the seconds of the samples that have it."""
    known = [(seconds, sample[name]) for seconds, sample in samples if name in sample]
    return sum(seconds * value for seconds, value in known) / sum(seconds for seconds, _ in known) if known else None


def _time_s(record: Mapping[str, Any]) -> float:
    time_s = record.get("time")
    return float(time_s) if isinstance(time_s, (int, float)) else 0.0


def is_whole(record: Mapping[str, Any]) -> bool:
    """Return whether a record has what each needs, and all its figures are such."""
    gpus = record.get("gpus")
    if not isinstance(record.get("node"), str) or not isinstance(gpus, list):
        return False
    has_all = all(_is_figure(record.get(name)) for name in ("seconds", "cpus", "cpu"))
    figures = [record.get(name, 0) for name in ("memory", "received_per_s", "sent_per_s")]
    for gpu in gpus:
        figures += gpu.values() if isinstance(gpu, dict) else [None]
    return has_all and record["seconds"] > 0 and record["cpus"] >= 1 and all(map(_is_figure, figures))


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < _MOST
