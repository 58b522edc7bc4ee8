"""Slurm's reasons in words."""

from __future__ import annotations

import pytest

from cluster_ddp.slurm.reasons import of_end, of_waiting


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
    assert of_waiting(reason) == (f"{reason}: {words}" if words else reason)


def test_a_sentence_of_slurms_gets_its_cure_before_its_details() -> None:
    reason = "Job's account not permitted to use this partition (main allows lab not guest)"
    cured = "Job's account not permitted to use this partition: it will not start. Resubmit with another --account"
    assert of_waiting(reason) == of_waiting(reason.replace(" ", "_")) == f"{cured} (main allows lab not guest)"


@pytest.mark.parametrize(
    ("state", "reason", "signal", "words"),
    [
        ("FAILED", "NonZeroExitCode", 0, ""),
        ("CANCELLED", "None", 15, ""),
        ("CANCELLED", "BeginTime", 0, ""),
        ("CANCELLED", "DependencyNeverSatisfied", 0, "the job that it waits for has failed"),
        ("TIMEOUT", "TimeLimit", 0, ""),
        ("NODE_FAIL", "NodeDown", 0, "a node of the job is lost"),
        ("OUT_OF_MEMORY", "OutOfMemory", 9, "the kernel has killed"),
        ("FAILED", "None", 53, "its node could not open its output file"),  # sacct has no reason
    ],
)
def test_an_end_gets_words_unless_it_speaks_for_itself(state: str, reason: str, signal: int, words: str) -> None:
    said = of_end(state, reason, signal)
    assert said.startswith(words) and bool(said) == bool(words)
