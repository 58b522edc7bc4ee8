"""The accounts that a user may charge, as the accounting (sacctmgr) knows them."""

from __future__ import annotations

from collections.abc import Mapping

from cluster_ddp.slurm import commands


def read(user: str, *, env: Mapping[str, str] | None = None) -> list[str]:
    """Return the accounts of a user, the default one first; empty if the accounting does not know the user.

    Args:
        user: login name.
        env: the environment of sacctmgr; default: this process's.

    Raises:
        SlurmError: the cluster has no accounting, or sacctmgr failed.
    """
    query = ["show", "user", f"name={user}", "withassoc", "format=DefaultAccount,Account"]
    lines = commands.run(["sacctmgr", "--noheader", "--parsable2", "--readonly", *query], env=env).splitlines()
    rows = [line.split("|") for line in lines if line.count("|") == 1]
    names = [name for row in rows for name in row if name]  # the default account, then that of the association
    return list(dict.fromkeys(names))
