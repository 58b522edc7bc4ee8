"""What sinfo says about the partitions: which nodes they have, what is in those, and for how long one may ask.

read() == [NodeGroup(partition="main", default=True, nodes=4, cpus=8, gpus={"a100": 2}, …), …]
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cluster_ddp.slurm import commands

# sinfo(1), --format: partition, its availability, the nodes' state, how many, CPUs, memory, time limit, gres.
_FORMAT = "%P|%a|%T|%D|%c|%m|%l|%G"

# How they begin (sinfo(1), NODE STATE CODES); flags such as "*" or "~" may follow. In all other states a node takes new
# jobs, now or once it is free or awake.
_UNUSABLE = re.compile(r"down|drain|drng|error|fail|futu?r|inval|maint|unk|n/a", re.IGNORECASE)
_COUNT = re.compile(r"(\d+)([KMGT]?)", re.IGNORECASE)
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Nodes of one partition that are alike. A node is in a group of each of its partitions."""

    partition: str
    """Name of the partition."""
    default: bool
    """Whether jobs that name no partition go there."""
    up: bool
    """Whether the partition takes and starts jobs."""
    usable: bool
    """Whether the nodes take jobs: they are not down, drained, failed or in maintenance. Busy or asleep is usable."""
    nodes: int
    """How many; 0 in a partition without nodes."""
    cpus: int
    """Of each node."""
    mem_mb: int
    """Memory of each node in MiB; 1 where the site has not configured any (slurm.conf(5), RealMemory)."""
    time_limit_s: int | None
    """Of the partition; None for no limit."""
    gpus: Mapping[str, int]
    """Type of GPU, as the cluster's gres names it ("" for none) -> how many each node has."""

    def gpus_of(self, gpu_type: str | None) -> int:
        """How many GPUs each node has: of one type, or of all where it is None."""
        return sum(self.gpus.values()) if gpu_type is None else self.gpus.get(gpu_type, 0)


def read(*, cluster: str | None = None, env: Mapping[str, str] | None = None) -> list[NodeGroup]:
    """Ask sinfo once.

    Args:
        cluster: which one, if not the default.
        env: the environment of sinfo; ours by default.

    Returns:
        The groups in sinfo's order, of all partitions: also hidden ones may be asked for. Lines that can't be read are
        left out, because versions of sinfo differ.

    Raises:
        SlurmError: sinfo is not there, failed, or did not answer.
    """
    # SINFO_PARTITION and its like would be taken for options that we did not give.
    clean = {key: value for key, value in (os.environ if env is None else env).items() if not key.startswith("SINFO_")}
    options = ["--all", "--noheader", "--exact", "--noconvert", f"--format={_FORMAT}"]
    lines = commands.run(["sinfo", *options, *commands.on(cluster)], env=clean).splitlines()
    return [group for group in map(_group, lines) if group is not None]


def _group(line: str) -> NodeGroup | None:
    """One line of sinfo; None where it isn't one, such as the heading "CLUSTER: x"."""
    try:
        partition, availability, state, nodes, cpus, mem_mb, time_limit, gres = line.strip().split("|")
        return NodeGroup(
            partition=partition.removesuffix("*"),
            default=partition.endswith("*"),
            up=availability == "up",
            usable=_UNUSABLE.match(state) is None,
            nodes=int(nodes),
            cpus=int(cpus),
            mem_mb=int(mem_mb),
            time_limit_s=_seconds(time_limit),
            gpus=_gpus(gres),
        )
    except ValueError:
        return None


def _seconds(text: str) -> int | None:
    """A time limit as sinfo prints it: "30:00" (minutes and seconds), "1-00:00:00", "infinite"."""
    if text.lower() in ("infinite", "unlimited", "n/a"):
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _gpus(gres: str) -> dict[str, int]:
    """The GPUs of a gres list: "gpu:a100:4(S:0,2-3),shard:16" -> {"a100": 4}.

    An item is name[:type][:no_consume][:count], and where it sits in parentheses (slurm.conf(5), Gres).
    """
    counts: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = item.strip().split(":")
        if name != "gpu":
            continue
        count = _COUNT.fullmatch(rest[-1]) if rest else None
        number = int(count[1]) * 1024 ** " KMGT".index(count[2].upper() or " ") if count else 1
        words = [word for word in (rest[:-1] if count else rest) if word != "no_consume"]
        gpu_type = words[0] if words else ""
        counts[gpu_type] = counts.get(gpu_type, 0) + number
    return {gpu_type: number for gpu_type, number in counts.items() if number}
