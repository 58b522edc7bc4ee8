"""Whether a job's account may use its partition, by what scontrol and sacctmgr of a stand-in say."""

from __future__ import annotations

import re

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.errors import SpecError
from cluster_ddp.submission.checks.account_limits import check_accounts, check_chain
from cluster_ddp.submission.spec import JobSpec

__all__ = ["fake_slurm"]

MINE = "printf 'physics|physics\\nphysics|ml\\n'"


def answer(fake_slurm: FakeSlurm, rule: str, *, mine: str = MINE) -> None:
    fake_slurm.command("scontrol", f"echo 'PartitionName=gpu AllowGroups=ALL {rule} AllowQos=ALL'")
    fake_slurm.command("sacctmgr", mine)


@pytest.mark.parametrize(
    ("rule", "account", "warned"),
    [
        ("AllowAccounts=ALL", None, None),
        ("AllowAccounts=ml,bio", None, "the account physics, your default one, among .* Use --account ml."),
        ("AllowAccounts=ml,bio", "physics", "the account physics among those .* wait forever. Use --account ml."),
        ("AllowAccounts=ML", "ml", None),
        ("AllowAccounts=bio", "ml", "Ask the support which account may use it."),
        ("AllowAccounts=ALL DenyAccounts=physics", None, "the account physics, .* Use --account ml."),
        ("AllowAccounts=ALL DenyAccounts=bio", None, None),
        ("AllowAccounts=physics DenyAccounts=physics", None, None),
    ],
)
def test_the_account_and_the_partitions_rule(
    fake_slurm: FakeSlurm, rule: str, account: str | None, warned: str | None
) -> None:
    answer(fake_slurm, rule)
    found = check_accounts(JobSpec(name="x", partition="gpu", account=account), ["gpu"], cluster=None)
    assert len(found) == (warned is not None)
    if warned is not None:
        assert found[0].startswith("The partition gpu does not name the account")
        assert re.search(warned, found[0])
    assert bool(fake_slurm.calls("sacctmgr")) is (rule != "AllowAccounts=ALL")  # it may be slow


@pytest.mark.parametrize("mine", ["exit 1", "true"])
def test_without_accounting_nothing_is_said(fake_slurm: FakeSlurm, mine: str) -> None:
    answer(fake_slurm, "AllowAccounts=bio", mine=mine)
    assert check_accounts(JobSpec(name="x", partition="gpu"), ["gpu"], cluster=None) == []
    assert check_accounts(JobSpec(name="x"), [], cluster=None) == []


def test_one_of_several_partitions_is_enough(fake_slurm: FakeSlurm) -> None:
    answer(fake_slurm, "")
    fake_slurm.command("scontrol", '[[ $* == *one ]] && echo "AllowAccounts=bio" || echo "AllowAccounts=physics"')
    assert check_accounts(JobSpec(name="x", partition="one,two"), ["one", "two"], cluster=None) == []
    assert (
        "The partitions one,one do not"
        in check_accounts(JobSpec(name="x", partition="one,one"), ["one", "one"], cluster=None)[0]
    )


LIMITS = """[[ $* == *assoc* ]] && printf 'physics|10\\nml|\\n' || printf 'physics|physics\\nphysics|ml\\n'"""


@pytest.mark.parametrize(
    ("account", "queued", "most", "hint"),
    [
        (None, 3, 6, None),
        (None, 3, 7, "--max-requeues 6"),
        ("physics", 0, 10, "--max-requeues 9"),
        (None, 12, 1, "wait until one has ended"),
        ("ml", 12, 20, None),
        ("bio", 12, 20, None),
    ],
)
def test_a_chain_has_no_more_jobs_than_the_account_may_have(
    fake_slurm: FakeSlurm, account: str | None, queued: int, most: int, hint: str | None
) -> None:
    fake_slurm.command("sacctmgr", LIMITS)
    fake_slurm.command("squeue", f"seq {queued}")
    spec = JobSpec(name="x", chain=True, max_requeues=most, account=account)
    if hint is None:
        check_chain(spec)
        return
    with pytest.raises(SpecError, match=f"A chain of up to {most + 1} jobs:") as caught:
        check_chain(spec)
    assert f"may have 10 jobs in the queue (MaxSubmitJobs), and {queued} are there." in str(caught.value)
    assert caught.value.hint == hint
    check_chain(JobSpec(name="x", max_requeues=most, account=account))
    fake_slurm.command("sacctmgr", "exit 1")
    check_chain(spec)
