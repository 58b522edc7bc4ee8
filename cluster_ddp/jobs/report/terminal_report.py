"""A run's report on one screen of a terminal."""

from __future__ import annotations

import time

from cluster_ddp.errors import counted, printable
from cluster_ddp.jobs import progress
from cluster_ddp.jobs.report.notes import notes
from cluster_ddp.jobs.report.step_breakdown import Start, Training
from cluster_ddp.jobs.report.summary import Report, bars
from cluster_ddp.jobs.report.usage import GpuUse, NodeUse
from cluster_ddp.submission.spec_fields import hours

_GIB = 1 << 30
_BAR = 20
_NODES = 16  # of more nodes, a line each


def as_text(found: Report) -> str:
    """Return a report as lines for a terminal."""
    status, asked = found.status, found.asked
    lines = [f"{status.name}, {f'job {status.job}' if status.job else 'no job'}: {status.state}"]
    lines += [f"  Job {status.earlier} was resumed as this one."] if status.earlier else []
    lines += [f"  Run directory: {status.run_dir}"] if status.run_dir else []
    if asked:
        nodes, gpus = counted(asked["nodes"], "node"), counted(asked["gpus_per_node"], "GPU")
        lines += [f"  Size: {nodes} x {gpus}, {counted(asked['nodes'] * found.ranks_per_node, 'rank')}"]
    if status.elapsed:
        limit = f" of {asked['time']}" if asked.get("time") else ""
        lines += [f"  Time: {', '.join(filter(None, (f'{status.elapsed}{limit}', found.started_again)))}"]
    lines += [f"  Spare: {found.spares}"] if found.spares else []
    if trained := _trained(found):
        lines += [f"  Training: {', '.join(trained)}"]
    if found.printed:
        values = [f"{name} {one[0]:.6g} … {one[-1]:.6g} ({len(one)})" for name, one in found.printed.items()]
        lines += [f"  Printed, first … last (how many): {', '.join(values)}"]
    if found.training.step_s is not None:
        lines += [f"  Step: {_step(found.training)}"]
    if len(found.training.starts) > 1:
        lines += ["  Starts:", *(f"    {_start(one)}" for one in found.training.starts)]
    if found.failures:
        lost = f"{hours(progress.lost_s(found.failures))} of training lost"
        lines += [f"  Failures, {lost}:", *(f"    {one.when} {one.text}" for one in found.failures)]
    if status.failure:
        lines += [f"  Failed first: {status.failure}"]
    if status.end:
        lines += [f"  Ended: {status.end}"]
    lines += ["", *_use(found)]
    if said := notes(found):
        lines += ["", "Notes", *(f"  - {note}" for note in said)]
    return "\n".join(printable(line) for line in lines)


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
    if found.training.waiting_for_data is not None and not found.training.parts:
        parts.append(f"waited for data {100 * found.training.waiting_for_data:.0f} % of the time")
    return parts


def _step(found: Training) -> str:
    step_s = found.step_s or 1.0
    parts = [f"{name.removesuffix('_s')} {100 * value / step_s:.0f} %" for name, value in found.parts.items()]
    if found.lacks_communication:
        parts.append("communication not measured")
    return f"{1000 * step_s:.3g} ms: {', '.join(parts)}"


def _start(start: Start) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.time))
    words = [f"{when} from step {start.step}, {counted(start.ranks, 'rank')}."]
    words += [f"The start before: {start.cause}"] if start.cause else []
    if start.lost_s is not None:
        words.append(f"Done again: {hours(start.lost_s)}." if start.lost_s else "Nothing was lost.")
    return " ".join(words)


def _use(found: Report) -> list[str]:
    nodes = found.nodes
    if not nodes:
        return ["Use: nothing was recorded. A script with a cluster_ddp.Checkpointer or RunDir records it every 10 s."]
    lines = [f"Use, over {hours(found.sampled_s)}", *(_bar(bar.name, bar.part, bar.words) for bar in bars(found))]
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
