"""Which accounts may use a partition, and which hosts may submit to it, as the nodes of a chain do."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from typing import Any

from cluster_ddp.errors import HostlistError, SlurmError, SpecError
from cluster_ddp.slurm import hostlist
from cluster_ddp.slurm import partitions as slurm_partitions
from cluster_ddp.submission.spec import JobSpec

_ASKED = "A chain of jobs, each of which submits the next one:"
_HINT = "leave --chain out, and resume each job by hand: --resume"


def check_settings(spec: JobSpec, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Refuse a chain where the settings say nodes_submit = false."""
    if spec.chain and values.get("nodes_submit") is False:
        found = f"no node may submit a job here: nodes_submit = false in {origins['nodes_submit']}."
        raise SpecError(_ASKED, found, _HINT).about("chain")


def check_hosts(spec: JobSpec, partitions: Sequence[str], *, cluster: str | None) -> None:
    """Refuse a chain in a partition that takes no jobs from one of its nodes. A chain's jobs may begin on any."""
    for name in partitions if spec.chain else ():
        try:
            rule = slurm_partitions.access(name, cluster=cluster)
            hosts = {host.partition(".")[0] for host in hostlist.expand(rule.submit_hosts)} if rule.submit_hosts else ()
            others = [node for node in hostlist.expand(rule.nodes) if node not in hosts] if hosts else []
        except (SlurmError, HostlistError):
            continue
        if others:
            found = f"partition {name} takes jobs from {rule.submit_hosts} only (AllocNodes), not from {others[0]}."
            raise SpecError(_ASKED, found, f"{_HINT}; or choose another --partition").about("chain", "partition")


def check_accounts(spec: JobSpec, partitions: Sequence[str], *, cluster: str | None) -> list[str]:
    """Compare the account of a job, or the user's default account, with what each partition takes; one must take it.

    sbatch takes such a job, and it waits forever, unless the site has set EnforcePartLimits (slurm.conf(5)).

    Returns:
        A warning if none takes it. It is no error: newer releases of Slurm also take accounts below those named.
    """
    try:
        rules = [slurm_partitions.access(name, cluster=cluster) for name in partitions]
        if not rules or any(not (rule.allowed or rule.denied) for rule in rules):
            return []
        mine = slurm_partitions.accounts_of(getpass.getuser())
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
