"""What could be better in a run, each with the option to change."""

from __future__ import annotations

import math
from collections.abc import Callable

from cluster_ddp.errors import counted
from cluster_ddp.jobs.report.summary import Report, mean_utilization
from cluster_ddp.submission.spec_fields import hours, seconds

_GIB = 1 << 30
# A short run says little about what a long one needs.
_ENOUGH_S = 60.0


def notes(found: Report) -> list[str]:
    """Return what could be better, each with the option to change."""
    said = [note] if (note := _non_finite(found)) else []
    if found.sampled_s < _ENOUGH_S:
        return said
    checks: tuple[Callable[[Report], str], ...] = (
        _data,
        _communication,
        _slow_rank,
        _idle_gpus,
        _gpu_memory,
        _heat,
        _cpus,
        _memory,
        _time,
    )
    return said + [note for check in checks if (note := check(found))]


def _non_finite(found: Report) -> str:
    step, saved = found.status.non_finite_step, found.status.saved_step
    if step is None:
        return ""
    last = "" if saved is None else f" The last good checkpoint is that of step {saved}."
    cure = 'Check the data, or take a lower learning rate. Checkpointer(on_nan="stop") ends such a job.'
    return f"The weights are NaN or Inf since step {step}: nothing was saved from there on.{last} {cure}"


def _data(found: Report) -> str:
    waiting = found.training.waiting_for_data
    if waiting is None or waiting < 0.2:
        return ""
    more = 2 * max(1, int(found.asked.get("cpus_per_task") or 1))
    cure = f"Give loader workers more CPUs: --cpus-per-task {more}; or use fewer GPUs."
    return f"Ranks wait for data {100 * waiting:.0f} % of the time. {cure}"


def _communication(found: Report) -> str:
    part = found.training.parts.get("communication_s", 0.0) / (found.training.step_s or 1.0)
    if part < 0.3:
        return ""
    cure = (
        "Use larger batches, add up gradients (world.accumulate), or use fewer GPUs: cluster-ddp scaling --gpus 1,2,4"
    )
    return f"Communication takes {100 * part:.0f} % of a step. {cure}"


def _slow_rank(found: Report) -> str:
    slowest, rank = found.training.slowest, found.training.slowest_rank
    if slowest is None or rank is None or slowest < 1.3:
        return ""
    words = f"needs {slowest:.1f} times as long for a step as the fastest: all wait for it."
    if len(found.nodes) != found.asked.get("nodes"):  # it ran elsewhere after a restart, or not every node was sampled
        return f"Rank {rank} {words}"
    node = found.nodes[rank // max(1, found.ranks_per_node)].node
    return f"Rank {rank} on {node} {words} If that is the node's fault: --exclude {node}"


def _idle_gpus(found: Report) -> str:
    busy = {f"GPU {at} of {node.node}": gpu.utilization for node in found.nodes for at, gpu in enumerate(node.gpus)}
    known = {name: value for name, value in busy.items() if value is not None}
    idle = [name for name, value in known.items() if value < 0.02]
    went_on_elsewhere = len(found.nodes) > found.nodes_at_once  # a start that was cut short has idle GPUs
    if idle and len(idle) < len(known) and not went_on_elsewhere:
        fewer = len(known) - len(idle)
        return f"Idle all the time: {', '.join(idle)}. Ask for {counted(fewer, 'GPU')}, or use a rank for each."
    mean = mean_utilization(found.nodes)
    if mean is None or mean >= 0.3:
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
    asked, used = found.asked_bytes, found.memory
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
    if found.status.requeues or len(found.training.starts) > 1:  # the time is that of the last start
        return ""
    less_min = max(5, math.ceil(1.5 * used / 60))
    less = f"{less_min // 60}:{less_min % 60:02}:00"
    return f"Time: {hours(used)} of {hours(limit)}. A shorter limit may start sooner: --time {less}"
