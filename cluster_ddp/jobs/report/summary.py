"""What became of a run: its state and time, its training, how its nodes were used.

In the manner of Princeton's jobstats (https://github.com/PrincetonUniversity/jobstats).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_ddp.agent.launch_options import mebibytes
from cluster_ddp.errors import SpecError, counted, hours
from cluster_ddp.jobs.report import cost, training_stats, usage
from cluster_ddp.jobs.report.cost import Cost
from cluster_ddp.jobs.report.training_stats import TrainingStats
from cluster_ddp.jobs.report.usage import NodeUse, mean_utilization
from cluster_ddp.jobs.status import RunStatus
from cluster_ddp.run import journal, spec_file
from cluster_ddp.run.files import is_count
from cluster_ddp.run.start import Failed
from cluster_ddp.slurm.job_status import elapsed_s
from cluster_ddp.submission.validation import seconds

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that is known of a run. None stands for what is not."""

    status: RunStatus
    """Its state and last figures."""
    asked: Mapping[str, Any]
    """The fields of the job's specification; empty if no submission made the run."""
    training: TrainingStats
    """Where the time of its steps went, and its starts."""
    nodes: list[NodeUse] = field(default_factory=list)
    """How the nodes were used."""
    failures: Sequence[Failed] = ()
    """What has failed, in the last job of the run."""
    cost: Cost = field(default_factory=Cost)
    """What it has cost."""
    printed: Mapping[str, list[float]] = field(default_factory=dict)
    """Figures that rank 0 has printed, by name, if they were asked for."""

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since the job's last start, or from it to its end."""
        return elapsed_s(self.status.elapsed) if self.status.elapsed else None

    @property
    def nodes_at_once(self) -> int:
        """How many of `nodes` it had at the same time, at most: after a restart, it may have had others."""
        asked = self.asked.get("max_nodes") or self.asked.get("nodes")
        return min(int(asked or len(self.nodes)), len(self.nodes))

    @property
    def sampled_s(self) -> float:
        """Seconds for which its nodes were sampled, over all starts; of a range of nodes, at least."""
        if self.asked.get("max_nodes"):
            return max((node.seconds for node in self.nodes), default=0.0)
        return sum(node.seconds for node in self.nodes) / max(1, self.nodes_at_once)

    @property
    def memory(self) -> float | None:
        """The most memory of a node, in bytes."""
        return max((node.memory for node in self.nodes if node.memory is not None), default=None)

    @property
    def gpu_memory(self) -> float | None:
        """The part of the memory of the fullest GPU that was in use, at most, 0 to 1."""
        filled = (gpu.filled for node in self.nodes for gpu in node.gpus)
        return max((part for part in filled if part is not None), default=None)

    @property
    def asked_bytes(self) -> float | None:
        """The memory of a node that the job asked for, in bytes; None if it named no size, or all of a node."""
        mem = self.asked.get("mem")
        return float(mebibytes(mem) << 20) or None if mem else None

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on a node, as the job asked for."""
        return int(self.asked.get("gpus_per_node", 1)) // int(self.asked.get("gpus_per_task", 1))

    @property
    def size(self) -> str:
        """How large the job is, in words; empty if no submission made it."""
        if not self.asked:
            return ""
        gpus, least = counted(self.asked["gpus_per_node"], "GPU"), self.asked["nodes"]
        if most := self.asked.get("max_nodes"):
            return f"{least}-{most} nodes x {gpus}, {least * self.ranks_per_node}-{most * self.ranks_per_node} ranks"
        return f"{counted(least, 'node')} x {gpus}, {counted(least * self.ranks_per_node, 'rank')}"

    @property
    def ranks_over_time(self) -> str:
        """The number of ranks from each step on at which it changed, in words; empty if it never did."""
        words: list[str] = []
        for one, before in zip(self.training.starts, (None, *self.training.starts)):
            if before is None or one.ranks != before.ranks:
                words.append(f"{f'from step {one.step}: ' if words else ''}{one.ranks}")
        return ", ".join(words) if len(words) > 1 else ""

    @property
    def lost_by_failures(self) -> str:
        """How much of the training was lost by failures, as far as it is known: H:MM:SS."""
        return hours(sum(one.lost_s or 0.0 for one in self.failures))

    @property
    def started_again(self) -> str:
        """How often the job was started again, in words; empty if never."""
        counts = {"restart": self.status.restarts, "requeue": self.status.requeues}
        return ", ".join(counted(count, noun) for noun, count in counts.items() if count)

    @property
    def spares(self) -> str:
        """How many of its nodes are spares, in words; empty without any."""
        spares = self.asked.get("spare_nodes")
        return f"{spares} of {self.asked['nodes'] + spares} nodes" if spares else ""


def report(status: RunStatus, *, metric: re.Pattern[str] | None = None) -> Report:
    """Read the report of a run.

    `metric` finds figures in what rank 0 has printed (see `training_stats.compiled`).
    """
    run_dir = status.run_dir
    if run_dir is None:
        return Report(status=status, asked={}, training=TrainingStats())
    training, nodes = training_stats.read(run_dir), usage.read(run_dir)
    return Report(
        status=status,
        asked=_asked(run_dir),
        failures=journal.failures(run_dir),
        cost=cost.of(status, training, nodes),
        training=training,
        nodes=nodes,
        printed=training_stats.printed(run_dir, metric) if metric is not None else {},
    )


def _asked(run_dir: Path) -> dict[str, Any]:
    """What the job asked for, as far as the report uses it and it makes sense; nothing if its size does not."""
    try:
        spec = dict(spec_file.raw(run_dir)["spec"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    found = {name: spec.get(name, 1) for name in ("nodes", "gpus_per_node", "gpus_per_task")}
    if not all(map(is_count, found.values())):
        return {}
    found |= {name: spec[name] for name in ("spare_nodes", "max_nodes") if is_count(spec.get(name))}
    found["cpus_per_task"] = spec["cpus_per_task"] if is_count(spec.get("cpus_per_task")) else None
    limit, mem = spec.get("time"), spec.get("mem")
    with suppress(SpecError):
        found |= {"time": limit} if limit and seconds(limit) else {}
    with suppress(ValueError, KeyError, AttributeError):
        found |= {"mem": mem} if mem and mebibytes(mem) >= 0 else {}
    return found


def bars(found: Report) -> list[tuple[str, float | None, str]]:
    """Return how much of its CPUs, memory and GPUs a run has used, over all nodes and the time that it had each.

    Returns:
        What was used; the part of it, 0 to 1, None if it is not known how much there was; how much of what, in words.
    """
    nodes = found.nodes
    if not nodes:
        return []
    cpu_s = sum(node.cpus * node.seconds for node in nodes)
    used = sum(node.cpu * node.cpus * node.seconds for node in nodes) / cpu_s
    made: list[tuple[str, float | None, str]] = [("CPUs", used, f"of {round(cpu_s / found.sampled_s)}")]
    if (most := found.memory) is not None and (asked := found.asked_bytes) is not None:
        words = f"at most: {most / _GIB:.1f} of {asked / _GIB:.1f} GiB on a node"
        made.append(("Memory", min(1.0, most / asked), words))
    elif most is not None:
        made.append(("Memory", None, f"{most / _GIB:.1f} GiB on a node at most"))
    if (busy := mean_utilization(nodes)) is not None:
        count = round(sum(len(node.gpus) * node.seconds for node in nodes) / found.sampled_s)
        made.append(("GPUs", busy, f"of {count}"))
    if (filled := found.gpu_memory) is not None:
        made.append(("GPU memory", filled, "at most, of the fullest GPU"))
    return made
