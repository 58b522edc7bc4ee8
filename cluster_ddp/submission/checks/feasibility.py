"""Check before the submission whether the cluster has what a job asks for.

sbatch only says that the "requested node configuration is not available", or queues a job that never starts.
For each partition, `_lack` finds the first thing that it lacks. If all lack something, the job is refused, since the
cluster surely can't run it. The hint is the job with each lack mended, one after the other, until it fits.
What depends on things that sinfo doesn't tell, or on nodes that are down now, is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cluster_ddp.agent.launch_options import mebibytes
from cluster_ddp.errors import SpecError, counted, nearest, nearest_name
from cluster_ddp.slurm.partitions import NodeGroup
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.submission.validation import seconds, slurms_time

Partitions = Mapping[str, Sequence[NodeGroup]]

_MAX_HINTS = 3


class _Lack(NamedTuple):
    """Why a partition can't hold a job, and the changed JobSpec fields that mend it."""

    found: str
    change: Mapping[str, Any]


def check(spec: JobSpec, groups: Sequence[NodeGroup]) -> list[str]:
    """Compare a job with the nodes of its partitions. One of several partitions must be able to hold it.

    Args:
        spec: the job.
        groups: the cluster's nodes, from `cluster_ddp.slurm.partitions.read`.

    Returns:
        Warnings, as whole sentences: what is uncertain, or not usable now.

    Raises:
        SpecError: the job can't run there even if all nodes are free. The error says what the nodes have, and names
            options that fit, if there are any.
    """
    if not groups:
        return [
            "sinfo shows no partition, so it was not checked whether the cluster can run the job; sinfo may say why."
        ]
    everywhere = by_partition(groups)
    _check_names(spec, everywhere)
    asked = asked_partitions(spec, groups)
    if not asked:
        return [f"This cluster has no default partition. Name one with --partition: {', '.join(everywhere)}."]
    lacks = {name: _lack(spec, name, nodes) for name, nodes in asked.items()}
    if all(lacks.values()):
        raise _error(spec, everywhere, {name: lack for name, lack in lacks.items() if lack})
    return _warnings(spec, {name: asked[name] for name, lack in lacks.items() if lack is None})


def asked_partitions(spec: JobSpec, groups: Sequence[NodeGroup]) -> Partitions:
    """Return the node groups of the partitions that a job asks for, or of the default one. Skips unknown names."""
    if spec.partition is None:
        return by_partition([group for group in groups if group.default])
    names = spec.partition.split(",")
    return by_partition([group for group in groups if group.partition in names])


def holding(spec: JobSpec, groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """Return the groups whose nodes have the GPUs, CPUs and memory that a job needs on each node."""
    return [
        group
        for group in groups
        if group.gpus_of(spec.gpu_type) >= spec.gpus_per_node
        and group.cpus >= _cpus(spec)
        and (_mem_mb(spec) <= group.mem_mb or group.mem_mb <= 1)
    ]


def by_partition(groups: Sequence[NodeGroup]) -> dict[str, list[NodeGroup]]:
    """Return the groups of each partition, in the cluster's order."""
    names = dict.fromkeys(group.partition for group in groups)
    return {name: [group for group in groups if group.partition == name] for name in names}


def _check_names(spec: JobSpec, everywhere: Partitions) -> None:
    for name in spec.partition.split(",") if spec.partition else []:
        if name not in everywhere:
            found = f"there is no such partition; there are {', '.join(everywhere)}.{nearest(name, everywhere)}"
            hint = f"--partition {nearest_name(name, everywhere) or 'with one of these names'}"
            raise SpecError(f"A job in the partition {name}:", found, hint).about("partition")
    types = sorted({gpu_type for groups in everywhere.values() for group in groups for gpu_type in group.gpus} - {""})
    if spec.gpu_type is not None and spec.gpu_type not in types:
        found = f"the cluster has {', '.join(types)}."
        same = [one for one in types if one.lower() == spec.gpu_type.lower()]
        hint = f"--gpu-type {' or '.join(same or types)}" if types else "leave out --gpu-type"
        asked = f"A job with GPUs of type {spec.gpu_type}:"
        raise SpecError(asked, found if types else "GPUs have no types here.", hint).about("gpu_type")


def _cpus(spec: JobSpec) -> int:
    return (spec.cpus_per_task or 0) * spec.ranks_per_node


def _mem_mb(spec: JobSpec) -> int:
    """Memory per node in MiB; 0 means all that the node has, as for sbatch."""
    return mebibytes(spec.mem or "0")


def _is_over_time(spec: JobSpec, groups: Sequence[NodeGroup]) -> bool:
    asked_s = None if spec.time is None else seconds(spec.time)
    limits = [group.time_limit_s for group in groups]
    return spec.time is not None and all(limit is not None and (asked_s is None or asked_s > limit) for limit in limits)


def _limit(groups: Sequence[NodeGroup]) -> str:
    return slurms_time(max(group.time_limit_s or 0 for group in groups))


def _lack(spec: JobSpec, name: str, groups: Sequence[NodeGroup]) -> _Lack | None:
    """The first thing that a partition lacks: GPUs, CPUs or memory in one node, enough such nodes, time."""
    with_gpus = holding(replace(spec, cpus_per_task=None, mem=None), groups)
    if not with_gpus:
        most = max((group.gpus_of(spec.gpu_type) for group in groups), default=0)
        found = f"the nodes of partition {name} have {f'at most {most}' if most else 'no'} {_gpus(spec, most)}"
        total, most = spec.nodes * spec.gpus_per_node, most // spec.gpus_per_task * spec.gpus_per_task
        same_ranks = {"nodes": total // most} if most and total % most == 0 and spec.max_nodes is None else {}
        return _Lack(found, {**same_ranks, "gpus_per_node": most})
    such = f"the nodes of partition {name} with {spec.gpus_per_node} {_gpus(spec, spec.gpus_per_node)}"
    with_cpus = holding(replace(spec, mem=None), groups)
    if not with_cpus:
        most = max(group.cpus for group in with_gpus)
        found = f"{such} have {most} CPUs, not {_cpus(spec)} ({spec.cpus_per_task} for each rank)"
        return _Lack(found, {"cpus_per_task": most // spec.ranks_per_node})
    fitting = holding(spec, groups)
    if not fitting:
        most = max(group.mem_mb for group in with_cpus)
        mem = f"{most // 1024}G" if most >= 1024 else f"{most}M"
        return _Lack(f"{such} have {most}M of memory, not {spec.mem}", {"mem": mem})
    count = sum(group.nodes for group in fitting)
    if count < spec.all_nodes:
        found = f"partition {name} has {counted(count, 'node')} with these GPUs, CPUs and memory, not {spec.all_nodes}"
        return _Lack(found, {"nodes": min(count, spec.nodes), "spare_nodes": max(0, count - spec.nodes)})
    if spec.qos is None and _is_over_time(spec, groups):  # a QOS may exceed it (sacctmgr(1), PartitionTimeLimit)
        limit = _limit(groups)
        return _Lack(f"the time limit of partition {name} is {limit}; the job asks for {spec.time}", {"time": limit})
    return None


def _error(spec: JobSpec, everywhere: Partitions, lacks: Mapping[str, _Lack]) -> SpecError:
    where = f"the partition {', '.join(lacks)}" if spec.partition else f"the default partition, {', '.join(lacks)}"
    spare = f" and {counted(spec.spare_nodes, 'spare node')}" if spec.spare_nodes else ""
    size = f"{counted(spec.nodes, 'node')}{spare} with {spec.gpus_per_node} {_gpus(spec, spec.gpus_per_node)}"
    asked = f"A job of {size} in {where}:"
    found = "; ".join(lack.found for lack in lacks.values()) + "."
    if any("gpus_per_node" in lack.change for lack in lacks.values()):
        found += f" GPUs per node: {'; '.join(f'{name}: {_kinds(groups)}' for name, groups in everywhere.items())}."
    mended = [_mended(spec, name, everywhere[name]) for name in lacks]
    others = [name for name, groups in everywhere.items() if any(group.up for group in groups) and name not in lacks]
    hints = [_difference(spec, other) for other in mended if other]
    hints += [f"--partition {name}" for name in others if _lack(spec, name, everywhere[name]) is None]
    hint = ", or ".join(list(dict.fromkeys(hints))[:_MAX_HINTS])
    error = SpecError(asked, found, hint or "see what there is: sinfo -o '%P %D %c %m %G %l'")
    return error.about("partition", "gpu_type")


def _mended(spec: JobSpec, name: str, groups: Sequence[NodeGroup]) -> JobSpec | None:
    """The job, changed so that the partition can hold it; None if no change helps."""
    while (lack := _lack(spec, name, groups)) is not None:  # each lack is mended at most once, in the order of _lack
        if not all(value for name, value in lack.change.items() if name != "spare_nodes"):
            return None
        spec = replace(spec, **lack.change)
    return spec


def _difference(spec: JobSpec, other: JobSpec) -> str:
    names = ("node_range", "spare_nodes", "gpus_per_node", "cpus_per_task", "mem", "time")
    values = {name: getattr(other, name) for name in names if getattr(other, name) != getattr(spec, name)}
    options = {name: name.replace("node_range", "nodes").replace("_", "-") for name in values}
    return " ".join(f"--{options[name]} {value}" for name, value in values.items())


def _warnings(spec: JobSpec, asked: Partitions) -> list[str]:
    """Warnings about partitions that could hold the job if all their nodes were up."""
    names = ", ".join(asked)
    up = {name: groups for name, groups in asked.items() if any(group.up for group in groups)}
    down = f"Partition {names} is not up: sbatch will refuse the job, or it will wait. For others, see sinfo."
    warnings = [] if up else [down]
    if spec.qos is not None and all(_is_over_time(spec, groups) for groups in asked.values()):
        limits = ", ".join(map(_limit, asked.values()))
        warnings.append(f"The time limit of partition {names} is {limits}, unless the QOS {spec.qos} may exceed it.")
    for found in (_below_max, _short_now):
        texts = [found(spec, name, groups) for name, groups in up.items()]
        warnings += texts if all(texts) else []
    return warnings


def _below_max(spec: JobSpec, name: str, groups: Sequence[NodeGroup]) -> str:
    """Of a range of nodes: its upper end never comes."""
    count = sum(group.nodes for group in holding(spec, groups))
    if count >= (most := spec.max_nodes or 0):
        return ""
    has, same = f"Partition {name} has {counted(count, 'such node')}", replace(spec, max_nodes=count).node_range
    return f"{has}: the job never gets {most}. The same: --nodes {same}."


def _short_now(spec: JobSpec, name: str, groups: Sequence[NodeGroup]) -> str:
    fitting = holding(spec, groups)
    count, usable = sum(group.nodes for group in fitting), sum(group.nodes for group in fitting if group.usable)
    if usable >= spec.all_nodes:
        return ""
    gone = f"{count - usable} of {count} such nodes of partition {name} are down, drained, failed or in maintenance"
    return f"{gone}. The job waits until {spec.all_nodes} are usable."


def _gpus(spec: JobSpec, count: int) -> str:
    return f"GPU{'s' if count != 1 else ''}" + (f" of type {spec.gpu_type}" if spec.gpu_type else "")


def _kinds(groups: Sequence[NodeGroup]) -> str:
    """The most GPUs of each type in one node, such as "4 a100, 8 h100"."""
    types = sorted({gpu_type for group in groups for gpu_type in group.gpus})
    return ", ".join(f"{max(group.gpus_of(t) for group in groups)} {t}".strip() for t in types) or "no GPUs"
