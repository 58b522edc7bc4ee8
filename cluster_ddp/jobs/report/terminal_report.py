"""A run's report on one screen of a terminal."""

from __future__ import annotations

import time

from cluster_ddp.errors import counted, printable
from cluster_ddp.jobs.report.notes import notes
from cluster_ddp.jobs.report.step_breakdown import Start, Training
from cluster_ddp.jobs.report.summary import Bar, Report, bars
from cluster_ddp.jobs.report.usage import NodeUse
from cluster_ddp.launch.notation import hours

_GIB = 1 << 30
_BAR = 20


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
    if found.printed:
        values = [f"{name} {one[0]:.6g} … {one[-1]:.6g} ({len(one)})" for name, one in found.printed.items()]
        lines += [f"  Printed, first … last (how many): {', '.join(values)}"]
    if found.training.step_s is not None:
        lines += [f"  Step: {_step(found.training)}"]
    if len(found.training.starts) > 1:
        lines += ["  Starts:", *(f"    {_start(one)}" for one in found.training.starts)]
    if status.failure:
        lines += [f"  Failed first: {status.failure}"]
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
    return f"{1000 * step_s:.3g} ms: {', '.join(parts)}"


def _start(start: Start) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.time))
    words = [f"{when} from step {start.step}, {counted(start.ranks, 'rank')}.", start.cause or ""]
    if start.lost_s is not None:
        words.append(f"Done again: {hours(start.lost_s)}." if start.lost_s else "Nothing was lost.")
    return " ".join(filter(None, words))


def _use(found: Report) -> list[str]:
    nodes = found.nodes
    if not nodes:
        return ["Use: nothing was recorded. A script records it with a cluster_ddp.Checkpointer or RunDir."]
    lines = [f"Use, over {hours(found.sampled_s)}", *map(_bar, bars(found))]
    has_gpus = any(node.gpus for node in nodes)
    return lines + (["", "By node", *(_node_line(node) for node in nodes)] if len(nodes) > 1 or has_gpus else [])


def _node_line(node: NodeUse) -> str:
    memory = "" if node.memory is None else f", memory {node.memory / _GIB:.1f} GiB"
    gpus = " ".join("-" if gpu.utilization is None else f"{100 * gpu.utilization:.0f} %" for gpu in node.gpus)
    return f"  {node.node}: CPUs {100 * node.cpu:.0f} % of {node.cpus}{memory}{f', GPUs {gpus}' if gpus else ''}"


def _bar(bar: Bar) -> str:
    if bar.part is None:
        return f"  {bar.name:11} {bar.words}"
    full = round(_BAR * bar.part)
    return f"  {bar.name:11} [{'#' * full}{'-' * (_BAR - full)}] {100 * bar.part:3.0f} % {bar.words}"
