"""The first cluster.toml of a project, from what the cluster has."""

from __future__ import annotations

import json
from collections.abc import Sequence

from cluster_ddp.errors import counted
from cluster_ddp.slurm.partitions import NodeGroup
from cluster_ddp.submission.checks.feasibility import by_partition
from cluster_ddp.submission.validation import normalized_time

_HEAD = """\
# Settings of the jobs that are submitted from this folder. Written by `cluster-ddp init`; change them as you like.
# Each key is an option of `cluster-ddp submit`, which overrides it. `cluster-ddp submit --show-config` shows them all.
"""
_LONGEST_S = 3600


def text(
    groups: Sequence[NodeGroup],
    *,
    partition: str | None,
    account: str | None,
    accounts: Sequence[str],
    modules: Sequence[str],
) -> str:
    """Return the content of a commented cluster.toml.

    Args:
        groups: the cluster's nodes; empty without Slurm.
        partition: the chosen partition; None to leave it to the cluster.
        account: the chosen account; None to leave it to the cluster.
        accounts: all accounts of the user, the default one first.
        modules: environment modules that a training may need.
    """
    chosen = [group for group in groups if group.partition == partition]
    parts = [_HEAD, _partitions(groups, partition), _account(accounts, account), _size(chosen), _time(chosen)]
    return "\n".join([*parts, _modules(modules)])


def _partitions(groups: Sequence[NodeGroup], partition: str | None) -> str:
    lines = ["# The partitions of this cluster (sinfo):"] if groups else ["# sinfo shows the partitions of a cluster."]
    for name, nodes in by_partition(groups).items():
        default = " (default)" if nodes[0].default else ""
        kinds: dict[str, int] = {}
        for group in nodes:  # equal nodes in different states are groups of their own
            kinds[_kind(group)] = kinds.get(_kind(group), 0) + group.nodes
        described = "; ".join(f"{counted(count, 'node')} with {kind}" for kind, count in kinds.items())
        lines.append(f"#   {name}{default}: {described}; {_limit(nodes[0])}")
    return "\n".join([*lines, _key("partition", partition, "gpu"), ""])


def _kind(group: NodeGroup) -> str:
    gpus = " and ".join(f"{count} {kind}" if kind else counted(count, "GPU") for kind, count in group.gpus.items())
    return f"{gpus or 'no GPUs'}, {counted(group.cpus, 'CPU')}, {_mem(group.mem_mb)}"


def _mem(mem_mb: int) -> str:
    return f"{mem_mb // 1024}G of memory" if mem_mb >= 1024 else f"{mem_mb}M of memory"


def _limit(group: NodeGroup) -> str:
    return "no time limit" if group.time_limit_s is None else f"at most {normalized_time(f'0:0:{group.time_limit_s}')}"


def _account(accounts: Sequence[str], account: str | None) -> str:
    known = (
        f"# Your accounts: {', '.join(accounts)}."
        if accounts
        else "# The account to charge, if your cluster asks for one."
    )
    return "\n".join([known, _key("account", account, "my_project"), ""])


def _size(groups: Sequence[NodeGroup]) -> str:
    """GPUs and CPUs. One GPU is the default of `submit`."""
    best = max(groups, key=lambda group: group.gpus_of(None), default=None)
    most = best.gpus_of(None) if best is not None else 0
    lines = [f"# Ranks: one for each GPU. A node here has {most}." if most else "# Ranks: one for each GPU."]
    lines.append(f"# gpus_per_node = {most or 4}")
    if best is not None and len(best.gpus) > 1:
        lines.append(f"# gpu_type = {json.dumps(next(iter(best.gpus)))}  # or {', '.join(list(best.gpus)[1:])}")
    each = max(1, best.cpus // most) if best is not None and most else 4
    lines.append(f"# cpus_per_task = {each}  # for each rank: threads, and processes that load data")
    return "\n".join([*lines, ""])


def _time(groups: Sequence[NodeGroup]) -> str:
    limits = [group.time_limit_s for group in groups if group.time_limit_s is not None]
    limit = f" The partition allows {normalized_time(f'0:0:{max(limits)}')}." if limits else ""
    shortest_s = min([_LONGEST_S, *limits])
    shortest = json.dumps(normalized_time(f"0:0:{shortest_s}"))
    return f"# Time limit of a job. Shorter jobs start sooner.{limit}\ntime = {shortest}\n"


def _modules(modules: Sequence[str]) -> str:
    said = "# Environment modules that each job loads; `module avail` shows them."
    return f"{said}\n# modules = [{', '.join(map(json.dumps, modules or ['cuda/12.8']))}]\n"


def _key(name: str, value: str | None, example: str) -> str:
    return f"# {name} = {json.dumps(example)}" if value is None else f"{name} = {json.dumps(value)}"
