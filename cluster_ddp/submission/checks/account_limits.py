"""What the account of a job may have: which partitions, and how many jobs."""

from __future__ import annotations

import getpass
from collections.abc import Sequence

from cluster_ddp.errors import SlurmError, SpecError, counted
from cluster_ddp.slurm import commands
from cluster_ddp.slurm import partitions as slurm_partitions
from cluster_ddp.submission.spec import JobSpec


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


def check_chain(spec: JobSpec) -> None:
    """Refuse a chain with more jobs than the account may have in the queue at a time (MaxSubmitJobs).

    Slurm counts each task of an array, also those that wait. Limits of a QOS are not looked up: sbatch refuses those.

    Raises:
        SpecError: they are too many.
    """
    try:
        limits = slurm_partitions.most_jobs(getpass.getuser()) if spec.chain else {}
        most = limits.get(spec.account) if spec.account else next(iter(limits.values()), None)
        if most is None:
            return
        queued = len(commands.run(["squeue", "--me", "--noheader", "--array", "--format=%i"]).splitlines())
    except (SlurmError, KeyError, OSError):  # no answer, no accounting, or no name for this user
        return
    if (left := max(0, most - queued)) <= spec.max_requeues:
        found = f"your account may have {counted(most, 'job')} in the queue (MaxSubmitJobs), and {queued} are there."
        hint = f"--max-requeues {left - 1}" if left else "wait until one has ended"
        raise SpecError(f"A chain of up to {counted(spec.max_requeues + 1, 'job')}:", found, hint).about(
            "chain", "max_requeues"
        )
