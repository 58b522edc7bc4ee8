"""A run's report in words: on one screen of a terminal, and what could be better, with the option to change."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict

from cluster_ddp.errors import counted, hours, printable
from cluster_ddp.jobs import run_state
from cluster_ddp.jobs.report.summary import Report, bars
from cluster_ddp.jobs.report.training_stats import TrainingStart, TrainingStats
from cluster_ddp.jobs.report.usage import GpuUse, NodeUse, mean_utilization
from cluster_ddp.submission.validation import seconds

_GIB = 1 << 30
_BAR = 20
_NODES = 16  # of more nodes, a line each
# A short run says little about what a long one needs.
_ENOUGH_S = 60.0


def as_text(found: Report) -> str:
    """Return a report as lines for a terminal."""
    status = found.status
    lines = [f"{status.name}, {f'job {status.job}' if status.job else 'no job'}: {status.state}"]
    lines += [f"  Job {status.earlier} was resumed as this one."] if status.earlier else []
    limit = f" of {found.asked['time']}" if found.asked.get("time") else ""
    trained = run_state.in_words(asdict(status), "epoch", "loss", "accuracy", "samples_per_s")
    if found.training.waiting_for_data is not None and not found.training.parts:
        trained.append(f"waited for data {100 * found.training.waiting_for_data:.0f} % of the time")
    printed = [f"{name} {one[0]:.6g} … {one[-1]:.6g} ({len(one)})" for name, one in found.printed.items()]
    facts = {
        "Run directory": status.run_dir,
        "Size": found.size,
        "Ranks": found.ranks_over_time,
        "Time": ", ".join(filter(None, (f"{status.elapsed}{limit}", found.started_again))) if status.elapsed else "",
        "Spare": found.spares,
        "Training": ", ".join(trained),
        "Printed, first … last (how many)": ", ".join(printed),
        "Step": _step(found.training),
    }
    lines += [f"  {name}: {fact}" for name, fact in facts.items() if fact]
    if len(found.training.starts) > 1:
        lines += ["  Starts:", *(f"    {_start(one)}" for one in found.training.starts)]
    if found.failures:
        lost = f"{found.lost_by_failures} of training lost"
        lines += [f"  Failures, {lost}:", *(f"    {one.when} {one.text}" for one in found.failures)]
    if status.failure:
        lines += [f"  Failed first: {status.failure}"]
    if status.end:
        lines += [f"  Ended: {status.end}"]
    lines += ["", *_use(found)]
    if found.cost.bars:
        lines += ["", "Cost", *(_bar(*bar) for bar in found.cost.bars)]
    if said := notes(found):
        lines += ["", "Notes", *(f"  - {note}" for note in said)]
    return "\n".join(printable(line) for line in lines)


def _step(found: TrainingStats) -> str:
    if not found.step_s:
        return ""
    parts = [f"{name.removesuffix('_s')} {100 * value / found.step_s:.0f} %" for name, value in found.parts.items()]
    if found.lacks_communication:
        parts.append("communication not measured")
    return f"{1000 * found.step_s:.3g} ms: {', '.join(parts)}"


def _start(start: TrainingStart) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.time))
    words = [f"{when} from step {start.step}, {counted(start.ranks, 'rank')}."]
    words += [f"The start before: {start.cause.rstrip('.')}."] if start.cause else []
    if start.lost_s is not None:
        words.append(f"Done again: {hours(start.lost_s)}." if start.lost_s else "Nothing was lost.")
    return " ".join(words)


def _use(found: Report) -> list[str]:
    nodes = found.nodes
    if not nodes:
        return ["Use: nothing was recorded. A script with a cluster_ddp.Checkpointer or RunDir records it every 10 s."]
    lines = [f"Use, over {hours(found.sampled_s)}", *(_bar(*bar) for bar in bars(found))]
    if len(nodes) > 1 or any(node.gpus for node in nodes):
        few, changed = len(nodes) <= _NODES, len(nodes) > found.nodes_at_once
        lines += ["", "By node", *(line for node in nodes for line in _node(node, each_gpu=few, timed=changed))]
    return lines


def _node(node: NodeUse, *, each_gpu: bool, timed: bool) -> list[str]:
    words = [f"of {node.cpus} CPUs{f' over {hours(node.seconds)}' if timed else ''}"]
    words += [] if node.memory is None else [f"memory {node.memory / _GIB:.1f} GiB"]
    words += [f"network {node.network}"] if node.network else []
    if node.gpus and not each_gpu:
        busy = ("-" if gpu.utilization is None else f"{100 * gpu.utilization:.0f} %" for gpu in node.gpus)
        words.append(f"GPUs {' '.join(busy)}")
    gpus = node.gpus if each_gpu else ()
    return [_bar(node.node, node.cpu, ", ".join(words)), *(_gpu(at, gpu) for at, gpu in enumerate(gpus))]


def _gpu(number: int, gpu: GpuUse) -> str:
    if gpu.utilization is None:
        return _bar(f"  GPU {number}", None, gpu.words or "unknown")
    return _bar(f"  GPU {number}", gpu.utilization, gpu.words, separator=", " if gpu.words else "")


def _bar(name: str, part: float | None, words: str, separator: str = " ") -> str:
    if part is None:
        return f"  {name:11} {words}"
    full = round(_BAR * part)
    return f"  {name:11} [{'#' * full}{'-' * (_BAR - full)}] {100 * part:3.0f} %{separator}{words}"


def notes(found: Report) -> list[str]:
    """Return what could be better, each with the option to change."""
    said = [*_of_weights(found)]
    if found.sampled_s >= _ENOUGH_S:
        said += [*_of_steps(found), *_of_gpus(found), *_of_requests(found)]
    return said


def _of_weights(found: Report) -> Iterator[str]:
    step, saved = found.status.non_finite_step, found.status.saved_step
    if step is not None:
        last = "" if saved is None else f" The last good checkpoint is that of step {saved}."
        cure = 'Check the data, or take a lower learning rate. Checkpointer(on_nan="stop") ends such a job.'
        yield f"The weights are NaN or Inf since step {step}: nothing was saved from there on.{last} {cure}"


def _of_steps(found: Report) -> Iterator[str]:
    """Data, communication, and a slow rank."""
    training = found.training
    if (waiting := training.waiting_for_data or 0.0) >= 0.2:
        more = 2 * max(1, int(found.asked.get("cpus_per_task") or 1))
        cure = f"Give loader workers more CPUs: --cpus-per-task {more}; or use fewer GPUs."
        yield f"Ranks wait for data {100 * waiting:.0f} % of the time. {cure}"
    if (part := training.parts.get("communication_s", 0.0) / (training.step_s or 1.0)) >= 0.3:
        fewer = "or use fewer GPUs: cluster-ddp scaling --gpus 1,2,4"
        cure = f"Use larger batches, add up gradients (world.accumulate), {fewer}"
        yield f"Communication takes {100 * part:.0f} % of a step. {cure}"
    slowest, rank = training.slowest, training.slowest_rank
    if slowest is not None and rank is not None and slowest >= 1.3:
        words = f"needs {slowest:.1f} times as long for a step as the fastest: all wait for it."
        at = rank // max(1, found.ranks_per_node)
        # It may have run elsewhere after a restart, or not every node was sampled.
        if len(found.nodes) != found.asked.get("nodes") or not 0 <= at < len(found.nodes):
            yield f"Rank {rank} {words}"
        else:
            node = found.nodes[at].node
            yield f"Rank {rank} on {node} {words} If that is the node's fault: --exclude {node}"


def _of_gpus(found: Report) -> Iterator[str]:
    """Idle ones, their memory, and heat."""
    busy = {f"GPU {at} of {node.node}": gpu.utilization for node in found.nodes for at, gpu in enumerate(node.gpus)}
    known = {name: value for name, value in busy.items() if value is not None}
    idle = [name for name, value in known.items() if value < 0.02]
    went_on_elsewhere = len(found.nodes) > found.nodes_at_once  # a start that was cut short has idle GPUs
    mean = mean_utilization(found.nodes)
    if idle and len(idle) < len(known) and not went_on_elsewhere:
        fewer = len(known) - len(idle)
        yield f"Idle all the time: {', '.join(idle)}. Ask for {counted(fewer, 'GPU')}, or use a rank for each."
    elif mean is not None and mean < 0.3:
        cure = "To see how many are worth it: cluster-ddp scaling --gpus 1,2,4"
        yield f"The GPUs are busy {100 * mean:.0f} % of the time. {cure}"
    if (part := found.gpu_memory) and part < 0.3:
        yield f"GPU memory: {100 * part:.0f} % used. A larger batch may be faster."
    if hot := dict.fromkeys(node.node for node in found.nodes for gpu in node.gpus if (gpu.throttled or 0) > 0.1):
        yield f"Heat or power lowered the clocks of GPUs on {', '.join(hot)}: tell your support."


def _of_requests(found: Report) -> Iterator[str]:
    """CPUs, memory and time that the job asked for."""
    asked = found.asked.get("cpus_per_task")
    cpus = max((node.cpu * node.cpus for node in found.nodes), default=0.0) / max(1, found.ranks_per_node)
    fewer = max(1, math.ceil(1.25 * cpus))
    if asked and fewer <= asked / 2:
        yield f"CPUs: each rank used {cpus:.1f} of {asked}: --cpus-per-task {fewer}"
    size, used = found.asked_bytes, found.memory
    if size is not None and used is not None:
        words = f"Memory: {used / _GIB:.1f} of {size / _GIB:.1f} GiB used"
        less = max(1, math.ceil(1.3 * used / _GIB))
        if used > 0.9 * size:
            yield f"{words}, so a little more ends the job: --mem {math.ceil(1.5 * size / _GIB)}G"
        elif less <= size / _GIB / 2:
            yield f"{words} on a node: --mem {less}G"
    limit_s = seconds(found.asked["time"]) if found.asked.get("time") else None
    started_again = found.status.requeues or len(found.training.starts) > 1  # the time is that of the last start
    is_done = found.status.state == "COMPLETED" and not started_again
    if is_done and limit_s is not None and found.elapsed_s and found.elapsed_s <= limit_s / 4:
        less_min = max(5, math.ceil(1.5 * found.elapsed_s / 60))
        cure = f"A shorter limit may start sooner: --time {hours(60 * less_min)}"
        yield f"Time: {hours(found.elapsed_s)} of {hours(limit_s)}. {cure}"
