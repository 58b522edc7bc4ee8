"""What became of a run, on one screen: its state and time, how its nodes were used, and which options to change.

In the manner of Princeton's jobstats (https://github.com/PrincetonUniversity/jobstats).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_ddp.contract import File, Record
from cluster_ddp.errors import counted, printable
from cluster_ddp.files import json_lines
from cluster_ddp.jobs import usage
from cluster_ddp.jobs.status import RunStatus
from cluster_ddp.jobs.usage import NodeUse
from cluster_ddp.launch.notation import mebibytes, seconds
from cluster_ddp.slurm.job_status import elapsed_s

_GIB = 1 << 30
_BAR = 20
# A short run says little about what a long one needs.
_ENOUGH_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that is known of a run. None stands for what is not."""

    status: RunStatus
    """Its state and last figures."""
    asked: Mapping[str, Any]
    """The fields of the job's specification; empty if no submission made the run."""
    waiting_for_data: float | None
    """The part of the training's time in which rank 0 waited for batches, 0 to 1: the median of the records."""
    nodes: list[NodeUse] = field(default_factory=list)
    """How the nodes were used."""

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since the job's last start, or from it to its end."""
        return elapsed_s(self.status.elapsed) if self.status.elapsed else None

    @property
    def memory(self) -> float | None:
        """The most memory of a node, in bytes."""
        return max((node.memory for node in self.nodes if node.memory is not None), default=None)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on a node, as the job asked for."""
        return int(self.asked.get("gpus_per_node", 1)) // int(self.asked.get("gpus_per_task", 1))


def report(status: RunStatus) -> Report:
    """Read the report of a run.

    Args:
        status: its state, with its run directory.
    """
    run_dir = status.run_dir or Path()
    try:
        asked = json.loads((run_dir / File.SPEC).read_text())["spec"]
    except (OSError, ValueError, KeyError, TypeError):
        asked = {}
    return Report(status=status, asked=asked, waiting_for_data=_waiting(run_dir), nodes=usage.read(run_dir))


def as_text(found: Report) -> str:
    """Return a report as lines for a terminal."""
    status, asked = found.status, found.asked
    lines = [f"{status.name}, {f'job {status.job}' if status.job else 'no job'}: {status.state}"]
    lines += [f"  Run directory: {status.run_dir}"]
    if asked:
        nodes, gpus = counted(asked["nodes"], "node"), counted(asked["gpus_per_node"], "GPU")
        lines += [f"  Size: {nodes} x {gpus}, {counted(asked['nodes'] * found.ranks_per_node, 'rank')}"]
    if status.elapsed:
        limit = f" of {asked['time']}" if asked.get("time") else ""
        again = f", {counted(status.restarts, 'restart')}" if status.restarts else ""
        lines += [f"  Time: {status.elapsed}{limit}{again}"]
    if trained := _trained(found):
        lines += [f"  Training: {', '.join(trained)}"]
    if status.failure:
        lines += [f"  Failed first: {status.failure}"]
    lines += ["", *_use(found)]
    if said := notes(found):
        lines += ["", "Notes", *(f"  - {note}" for note in said)]
    return "\n".join(printable(line) for line in lines)


def notes(found: Report) -> list[str]:
    """Return what could be better, each with the option to change."""
    if sum(node.seconds for node in found.nodes) < _ENOUGH_S * max(1, len(found.nodes)):
        return []
    checks: tuple[Callable[[Report], str], ...] = (_data, _idle_gpus, _gpu_memory, _heat, _cpus, _memory, _time)
    return [note for check in checks if (note := check(found))]


def _trained(found: Report) -> list[str]:
    status, parts = found.status, []
    if status.epoch is not None:
        parts.append(f"epoch {status.epoch}")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    if status.accuracy is not None:
        parts.append(f"accuracy {100 * status.accuracy:.2f} %")
    if status.samples_per_s is not None:
        parts.append(f"{status.samples_per_s:,.0f} samples/s")
    if found.waiting_for_data is not None:
        parts.append(f"waited for data {100 * found.waiting_for_data:.0f} % of the time")
    return parts


def _use(found: Report) -> list[str]:
    nodes = found.nodes
    if not nodes:
        return ["Use: nothing was recorded. A script records it with a cluster_ddp.Checkpointer or RunDir."]
    gpus = [gpu for node in nodes for gpu in node.gpus]
    busy = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    filled = [gpu.memory / gpu.memory_total for gpu in gpus if gpu.memory is not None and gpu.memory_total]
    cpus = sum(node.cpus for node in nodes)
    of_cpus = sum(node.cpu * node.cpus for node in nodes) / cpus
    lines = [f"Use, over {_duration(max(node.seconds for node in nodes))}", _bar("CPUs", of_cpus, f"of {cpus}")]
    if found.memory is not None:
        lines.append(_memory_line(found, found.memory))
    if busy:
        lines.append(_bar("GPUs", statistics.fmean(busy), f"of {len(busy)}"))
    if filled:
        lines.append(_bar("GPU memory", max(filled), "at most, of the fullest GPU"))
    return lines + (["", "By node", *(_node_line(node) for node in nodes)] if len(nodes) > 1 or gpus else [])


def _memory_line(found: Report, used: float) -> str:
    asked = _bytes(found.asked.get("mem"))
    if asked is None:
        return f"  {'Memory':11} {used / _GIB:.1f} GiB on a node at most"
    return _bar("Memory", min(1.0, used / asked), f"at most: {used / _GIB:.1f} of {asked / _GIB:.1f} GiB on a node")


def _node_line(node: NodeUse) -> str:
    memory = "" if node.memory is None else f", memory {node.memory / _GIB:.1f} GiB"
    gpus = " ".join("-" if gpu.utilization is None else f"{100 * gpu.utilization:.0f} %" for gpu in node.gpus)
    return f"  {node.node}: CPUs {100 * node.cpu:.0f} % of {node.cpus}{memory}{f', GPUs {gpus}' if gpus else ''}"


def _bar(name: str, part: float, words: str) -> str:
    full = round(_BAR * part)
    return f"  {name:11} [{'#' * full}{'-' * (_BAR - full)}] {100 * part:3.0f} % {words}"


def _data(found: Report) -> str:
    waiting = found.waiting_for_data
    if waiting is None or waiting < 0.2:
        return ""
    more = 2 * max(1, int(found.asked.get("cpus_per_task") or 1))
    cure = f"Give loader workers more CPUs: --cpus-per-task {more}; or use fewer GPUs."
    return f"Ranks wait for data {100 * waiting:.0f} % of the time. {cure}"


def _idle_gpus(found: Report) -> str:
    busy = {f"GPU {at} of {node.node}": gpu.utilization for node in found.nodes for at, gpu in enumerate(node.gpus)}
    known = {name: value for name, value in busy.items() if value is not None}
    if not known:
        return ""
    idle = [name for name, value in known.items() if value < 0.02]
    if idle and len(idle) < len(known):
        fewer = len(known) - len(idle)
        return f"Idle all the time: {', '.join(idle)}. Ask for {counted(fewer, 'GPU')}, or use a rank for each."
    mean = statistics.fmean(known.values())
    if mean >= 0.3:
        return ""
    cure = "To see how many are worth it: cluster-ddp scaling --gpus 1,2,4"
    return f"The GPUs are busy {100 * mean:.0f} % of the time. {cure}"


def _gpu_memory(found: Report) -> str:
    gpus = [gpu for node in found.nodes for gpu in node.gpus if gpu.memory is not None and gpu.memory_total]
    filled = max((gpu.memory / gpu.memory_total for gpu in gpus if gpu.memory and gpu.memory_total), default=1.0)
    return f"GPU memory: {100 * filled:.0f} % used. A larger batch may be faster." if filled < 0.3 else ""


def _heat(found: Report) -> str:
    hot = [node.node for node in found.nodes for gpu in node.gpus if (gpu.throttled or 0) > 0.1]
    return (
        f"Heat or power lowered the clocks of GPUs on {', '.join(dict.fromkeys(hot))}: tell your support."
        if hot
        else ""
    )


def _cpus(found: Report) -> str:
    asked = found.asked.get("cpus_per_task")
    used = max((node.cpu * node.cpus for node in found.nodes), default=0.0) / max(1, found.ranks_per_node)
    fewer = max(1, math.ceil(1.25 * used))
    if not asked or fewer > asked / 2:
        return ""
    return f"CPUs: each rank used {used:.1f} of {asked}: --cpus-per-task {fewer}"


def _memory(found: Report) -> str:
    asked, used = _bytes(found.asked.get("mem")), found.memory
    if asked is None or used is None:
        return ""
    if used > 0.9 * asked:
        more = math.ceil(1.5 * asked / _GIB)
        return f"Memory: {used / _GIB:.1f} of {asked / _GIB:.1f} GiB used, so a little more ends the job: --mem {more}G"
    less = max(1, math.ceil(1.3 * used / _GIB))
    if less > asked / _GIB / 2:
        return ""
    return f"Memory: {used / _GIB:.1f} of {asked / _GIB:.1f} GiB used on a node: --mem {less}G"


def _time(found: Report) -> str:
    limit = seconds(found.asked["time"]) if found.asked.get("time") else None
    used = found.elapsed_s
    if limit is None or not used or found.status.state != "COMPLETED" or used > limit / 4:
        return ""
    less_min = max(5, math.ceil(1.5 * used / 60))
    less = f"{less_min // 60}:{less_min % 60:02}:00"
    return f"Time: {_duration(used)} of {_duration(limit)}. A shorter limit may start sooner: --time {less}"


def _waiting(run_dir: Path) -> float | None:
    records = (one for one in json_lines(run_dir / File.METRICS) if one.get("kind") == Record.TRAIN)
    values = [one.get("waiting_for_data") for one in records]
    found = [float(value) for value in values if isinstance(value, (int, float)) and 0 <= value <= 1]
    return statistics.median(found) if found else None


def _duration(duration_s: float) -> str:
    minutes, rest_s = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}"


def _bytes(mem: str | None) -> float | None:
    """A size as --mem takes it; None for 0, which is all of a node."""
    return float(mebibytes(mem) << 20) or None if mem else None
