"""Slurm's reasons in words."""

from __future__ import annotations

import pytest

from cluster_ddp.slurm.pending_reasons import in_words


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "it is next, and waits for nodes or GPUs that are in use"),
        ("ReqNodeNotAvail, UnavailableNodes:node[1-3]", "a node that it needs is down, drained or reserved"),
        ("(Nodes_required)", ""),
        ("AssocGrpGRES", "all jobs of your account together use as many GPUs as they may"),
        ("AssocGrpCPUMinutesLimit", "all jobs of your account together use as many CPUs x time as they may"),
        ("QOSMaxGRESPerUser", "the QOS allows no more GPUs for each user"),
        ("QOSMaxCpuPerUserLimit", "the QOS allows no more CPUs for each user"),
        ("AssocMaxJobsLimit", "your account allows no more running jobs"),
        ("QOSMaxWallDurationPerJobLimit", "the QOS allows no more run time for each job"),
        ("QOSMinGRES", "it asks for fewer GPUs than the QOS requires"),
        ("SomethingNew", ""),
        ("", ""),
    ],
)
def test_a_reason_keeps_its_code_and_gets_its_meaning(reason: str, words: str) -> None:
    assert in_words(reason) == (f"{reason}: {words}" if words else reason)


def test_a_sentence_of_slurms_gets_its_cure_before_its_details() -> None:
    reason = "Job's account not permitted to use this partition (main allows lab not guest)"
    cured = "Job's account not permitted to use this partition: it will not start. Resubmit with another --account"
    assert in_words(reason) == in_words(reason.replace(" ", "_")) == f"{cured} (main allows lab not guest)"
