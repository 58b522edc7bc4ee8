"""The accounts that a user may charge, by the accounting (sacctmgr); the accounts and hosts that a partition takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from cluster_ddp.slurm import commands


def read(user: str, *, env: Mapping[str, str] | None = None) -> list[str]:
    """Return the accounts of a user, the default one first; empty if the accounting does not know the user.

    Raises:
        SlurmError: the cluster has no accounting, or sacctmgr failed.
    """
    query = ["show", "user", f"name={user}", "withassoc", "format=DefaultAccount,Account"]
    lines = commands.run(["sacctmgr", "--noheader", "--parsable2", "--readonly", *query], env=env).splitlines()
    rows = [line.split("|") for line in lines if line.count("|") == 1]
    names = [name for row in rows for name in row if name]  # the default account, then that of the association
    return list(dict.fromkeys(names))


class Access(NamedTuple):
    """Which accounts may use a partition: AllowAccounts and DenyAccounts of slurm.conf(5), in small letters."""

    allowed: frozenset[str]
    """Empty if there is no such rule. Newer releases of Slurm also take accounts below those."""
    denied: frozenset[str]
    """Empty if there is no such rule, or if the other one holds."""
    nodes: str = ""
    """The partition's nodes, as a list."""
    submit_hosts: str = ""
    """The hosts from which its jobs may be submitted (AllocNodes), as a list; empty for all."""

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
    nodes, hosts = (_value(described, key) for key in (r"(?<!Alloc)Nodes", "AllocNodes"))
    return Access(_listed(described, "AllowAccounts"), _listed(described, "DenyAccounts"), nodes, hosts)


def _value(described: str, key: str) -> str:
    match = re.search(rf"(?<!\S){key}=(\S+)", described)
    return match[1] if match and match[1] not in ("ALL", "NONE", "(null)") else ""


def _listed(described: str, key: str) -> frozenset[str]:
    return frozenset(filter(None, _value(described, key).lower().split(",")))
