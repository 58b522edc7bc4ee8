"""The partitions as sinfo shows them: nodes, CPUs, memory, GPUs and time limit; the accounts and hosts that they take.

read() == [NodeGroup(partition="main", default=True, nodes=4, cpus=8, gpus={"a100": 2}, …), …]
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cluster_ddp.slurm import commands
from cluster_ddp.slurm.job_status import elapsed_s

# sinfo(1), --format: partition, its availability, the nodes' state, how many, CPUs, memory, time limit, gres.
_FORMAT = "%P|%a|%T|%D|%c|%m|%l|%G"

# Beginnings of the names of states (sinfo(1), NODE STATE CODES); flags such as "*" or "~" may follow. In all other
# states a node takes new jobs, now or once it is free or awake.
_UNUSABLE = re.compile(r"down|drain|drng|error|fail|futu?r|inval|maint|unk|n/a", re.IGNORECASE)
_NO_LIMIT = ("infinite", "unlimited", "n/a")
_COUNT = re.compile(r"(\d+)([KMGT]?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Equal nodes of one partition. A node is in one group of each of its partitions."""

    partition: str
    """Name of the partition."""
    default: bool
    """Whether it is the default partition."""
    up: bool
    """Whether the partition takes and starts jobs."""
    usable: bool
    """Whether the nodes take jobs: not down, drained, failed or in maintenance. Busy and sleeping nodes are usable."""
    nodes: int
    """Number of nodes; 0 in a partition without nodes."""
    cpus: int
    """CPUs of each node."""
    mem_mb: int
    """Memory of each node in MiB; 1 if the site has not configured it (slurm.conf(5), RealMemory)."""
    time_limit_s: int | None
    """Time limit of the partition in seconds; None for no limit."""
    gpus: Mapping[str, int]
    """Type of GPU, as the cluster's gres names it ("" if untyped) -> number in each node."""

    def gpus_of(self, gpu_type: str | None) -> int:
        """Return the number of GPUs in each node: of one type, or of all types for None."""
        return sum(self.gpus.values()) if gpu_type is None else self.gpus.get(gpu_type, 0)


def read(*, cluster: str | None = None, env: Mapping[str, str] | None = None) -> list[NodeGroup]:
    """Read all partitions with one call of sinfo; of the default cluster, if none is named.

    Hidden partitions are included, since jobs may use them. Lines that can't be read are left out, because versions of
    sinfo differ.

    Raises:
        SlurmError: sinfo is not installed, failed, or did not answer.
    """
    # sinfo would take SINFO_PARTITION and the like as options.
    clean = {key: value for key, value in (os.environ if env is None else env).items() if not key.startswith("SINFO_")}
    options = ["--all", "--noheader", "--exact", "--noconvert", f"--format={_FORMAT}"]
    lines = commands.run(["sinfo", *options, *commands.on(cluster)], env=clean).splitlines()
    return [group for group in map(_group, lines) if group is not None]


def _group(line: str) -> NodeGroup | None:
    """Read one line of sinfo; None for other lines, such as the heading "CLUSTER: x"."""
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
            time_limit_s=None if time_limit.lower() in _NO_LIMIT else int(elapsed_s(time_limit)),
            gpus=_gpus(gres),
        )
    except ValueError:
        return None


def _gpus(gres: str) -> dict[str, int]:
    """The GPUs of a gres list: "gpu:a100:4(S:0,2-3),shard:16" -> {"a100": 4}.

    An item is name[:type][:no_consume][:count], followed by its sockets in parentheses (slurm.conf(5), Gres).
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


def accounts_of(user: str, *, env: Mapping[str, str] | None = None) -> list[str]:
    """Return the accounts of a user, the default one first; empty if the accounting does not know the user.

    Raises:
        SlurmError: the cluster has no accounting, or sacctmgr failed.
    """
    query = ["show", "user", f"name={user}", "withassoc", "format=DefaultAccount,Account"]
    lines = commands.run(["sacctmgr", "--noheader", "--parsable2", "--readonly", *query], env=env).splitlines()
    rows = [line.split("|") for line in lines if line.count("|") == 1]
    names = [name for row in rows for name in row if name]  # the default account, then that of the association
    return list(dict.fromkeys(names))


def most_jobs(user: str, *, env: Mapping[str, str] | None = None) -> dict[str, int | None]:
    """Return how many jobs a user may have in the queue with each account, the default account first; None: no limit.

    Raises:
        SlurmError: the cluster has no accounting, or sacctmgr failed.
    """
    query = ["show", "assoc", f"user={user}", "format=Account,MaxSubmitJobs"]
    lines = commands.run(["sacctmgr", "--noheader", "--parsable2", "--readonly", *query], env=env).splitlines()
    limits = {account: int(most) if most.isdigit() else None for account, _, most in (x.partition("|") for x in lines)}
    return {account: limits[account] for account in accounts_of(user, env=env) if account in limits}


class Access(NamedTuple):
    """Which accounts may use a partition: AllowAccounts and DenyAccounts of slurm.conf(5), in small letters."""

    allowed: frozenset[str]
    """Empty if there is no such rule. Newer releases of Slurm also take accounts below those."""
    denied: frozenset[str]
    """Empty if there is no such rule, or if the other one holds."""

    def names(self, account: str) -> bool:
        """Return whether an account is named as allowed, or at least not as denied."""
        return account.lower() in self.allowed if self.allowed else account.lower() not in self.denied


def access(partition: str, *, cluster: str | None = None, env: Mapping[str, str] | None = None) -> Access:
    """Read which accounts may use a partition; of the default cluster, if none is named.

    Raises:
        SlurmError: there is no such partition, or the controller does not answer.
    """
    query = ["scontrol", *commands.on(cluster), "--oneliner", "show", "partition", partition]
    described = commands.run(query, env=env)
    return Access(_listed(described, "AllowAccounts"), _listed(described, "DenyAccounts"))


def _value(described: str, key: str) -> str:
    match = re.search(rf"(?<!\S){key}=(\S+)", described)
    return match[1] if match and match[1] not in ("ALL", "NONE", "(null)") else ""


def _listed(described: str, key: str) -> frozenset[str]:
    return frozenset(filter(None, _value(described, key).lower().split(",")))
