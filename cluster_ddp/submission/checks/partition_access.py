"""Check before the submission whether a job's account may use its partition.

sbatch takes such a job, and it waits forever, unless the site has set EnforcePartLimits (slurm.conf(5)).
"""

from __future__ import annotations

import getpass
from collections.abc import Sequence

from cluster_ddp.errors import SlurmError
from cluster_ddp.slurm import accounts
from cluster_ddp.submission.spec import JobSpec


def check(spec: JobSpec, partitions: Sequence[str], *, cluster: str | None) -> list[str]:
    """Compare the account of a job, or the user's default account, with what each partition takes.

    Args:
        spec: the job.
        partitions: names of the partitions that it may use; one must take its account.
        cluster: name of the cluster; None for the default one.

    Returns:
        A warning if none takes it. It is no error: newer releases of Slurm also take accounts below those named.
    """
    try:
        rules = [accounts.access(name, cluster=cluster) for name in partitions]
        if not rules or any(not (rule.allowed or rule.denied) for rule in rules):
            return []
        mine = accounts.read(getpass.getuser())
    except (SlurmError, KeyError, OSError):  # no answer, no accounting, or no name for this user
        return []
    account = spec.account or next(iter(mine), None)
    if account is None or any(rule.names(account) for rule in rules):
        return []
    whose = account if spec.account else f"{account}, your default one,"
    where = f"The partition {partitions[0]} does" if len(partitions) == 1 else f"The partitions {spec.partition} do"
    fit = [name for name in mine if any(rule.names(name) for rule in rules)]
    hint = f"Use --account {' or '.join(fit)}." if fit else "Ask the support which account may use it."
    return [f"{where} not name the account {whose} among those that may use it: the job may wait forever. {hint}"]
