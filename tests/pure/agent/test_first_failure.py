"""agent.first_failure: by what the tasks have told; of logs: srun's and Slurm's English, and Python's last error."""

from __future__ import annotations

import pytest

from cluster_ddp.agent import first_failure
from cluster_ddp.agent.rank_end import End
from cluster_ddp.run.outcome import Failure


@pytest.mark.parametrize(
    ("log", "nodes"),
    [
        ("epoch 1\n", ()),
        ("srun: error: Node failure on node3\n", ("node3",)),
        (
            "srun: error: Node failure on n3\nslurmstepd: error: *** STEP 1.0 ON n1 CANCELLED DUE TO NODE FAILURE",
            ("n3",),
        ),
        ("srun: Job step aborted: NODE FAILURE ON n4.\nsrun: error: node failure on n3, x", ("n4", "n3")),
        ("slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 1 DUE TO NODE FAILURE, SEE LOG ***", ("",)),
    ],
)
def test_which_nodes_slurm_has_lost(log: str, nodes: tuple[str, ...]) -> None:
    assert first_failure.lost_nodes(log) == nodes


@pytest.mark.parametrize(
    ("log", "first"),
    [
        ("epoch 1\n", None),
        ("srun: error: n2: task 3: Out Of Memory", Failure(None, "n2", 137, "task 3: killed by the kernel for memory")),
        (
            "srun: error: n1: tasks 0-1: Exited with exit code 3",
            Failure(None, "n1", 3, "task 0: Exited with exit code 3"),
        ),
        (
            "50%|██ srun: error: n1: task 0: Terminated\nsrun: error: n2: task 1: Segmentation fault (core dumped)\n",
            Failure(None, "n2", 139, "task 1: Segmentation fault (core dumped)"),
        ),
        ("srun: error: n1: task 0: Terminated\n", Failure(None, "n1", 143, "task 0: Terminated")),
        ("srun: error: n1: task 0: Killed\n", Failure(None, "n1", 137, "task 0: Killed")),
        ("srun: error: n1: task 0: \x1b[2Jx\n", Failure(None, "n1", 1, "task 0: ?[2Jx")),
    ],
)
def test_which_task_failed_first_as_srun_says(log: str, first: Failure | None) -> None:
    assert first_failure.by_srun(log, of_ranks=False) == first


@pytest.mark.parametrize(("heard", "is_named"), [((), True), ((0,), True), ((1,), False)])
def test_srun_counts_if_its_first_task_was_not_heard(heard: tuple[int, ...], is_named: bool) -> None:
    log = "srun: error: n1: task 0: Terminated\nsrun: error: n2: task 1: Exited with exit code 2\n"
    first = first_failure.by_srun(log, of_ranks=True, heard=heard)
    assert first == (Failure(1, "n2", 2, "Exited with exit code 2") if is_named else None)


def test_which_task_srun_could_not_start() -> None:
    log = "[task 0 launch failed: x]\nsrun: error: task 1 launch failed: Slurmd could not connect IO\n"
    assert first_failure.not_launched(log) == Failure(
        None, "srun", 1, "task 1 launch failed: Slurmd could not connect IO"
    )
    refused = "srun: error: Unable to create step for job 9: Invalid generic resource (gres) specification\n"
    found = first_failure.not_launched(refused)
    assert found is not None and found.words.startswith("Unable to create step for job 9: Invalid generic resource")
    assert first_failure.not_launched("[srun: error: task 1 launch failed]") is None


OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=71.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("words", "status", "log", "said"),
    [
        ("killed by SIGKILL", 137, "", "killed by SIGKILL"),
        ("killed by SIGKILL", 137, OOM, "killed by the kernel for memory"),
        ("its agent was killed", 137, OOM, "killed by the kernel for memory"),
        ("task 3: Killed", 137, OOM, "task 3: Killed (the kernel has killed a process for memory)"),
        ("killed by the kernel for memory", 137, OOM, "killed by the kernel for memory"),
    ],
)
def test_what_slurm_says_of_memory(words: str, status: int, log: str, said: str) -> None:
    assert first_failure.with_memory(Failure(0, "n1", status, words), log).words == said


ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["epoch 1", "loss 3"], ""),
        (["Traceback:", "ValueError: x", "done"], "ValueError: x"),
        (
            ["[rank3]: ValueError: boom", "[rank2]: RuntimeError: its peer", "SystemExit: 3", ELASTIC],
            "ValueError: boom",
        ),
        (["[rank2]: RuntimeError: its peer", "my.Exception: y", ELASTIC], "my.Exception: y"),
        (["[rank2]: RuntimeError: its peer"], ""),
        (["  ValueError: indented", "KeyboardInterrupt"], "KeyboardInterrupt"),
        (["ValueError: \x1b[1m" + "x" * 400], "ValueError: ?[1m" + "x" * 284),
    ],
)
def test_the_last_error_of_a_rank(lines: list[str], found: str) -> None:
    assert first_failure.last_error("\n".join(lines), 3) == found


def test_errors_are_compared_without_their_numbers() -> None:
    one, other = "CUDA out of memory: 1,024.5 MiB of 80 GiB at 0x7fAb", "CUDA out of memory: 8 MiB of 40.0 GiB at 0x1c"
    assert first_failure.without_numbers(one) == first_failure.without_numbers(other) != one


LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:33"


def ends(*statuses: int | tuple[int, str]) -> list[End]:
    """One end a rank, "!" before the words of one that lost another."""
    pairs = [one if isinstance(one, tuple) else (one, "") for one in statuses]
    return [
        End(i, f"n{i}", one, words.lstrip("!"), "peer" if words.startswith("!") else "")
        for i, (one, words) in enumerate(pairs)
    ]


EARLY = "ended with status 0 while other ranks still computed"


@pytest.mark.parametrize(
    ("told", "first"),
    [
        (ends(0, 0), None),
        (ends(75, 0, 75), None),
        (ends(75, 1), "rank 1 on n1 (1)"),
        ([End(0, "n0", 139, was_stopped=True), End(1, "n1", 1, "x", was_stopped=True)], None),
        # The first arrival wins, and causes beat consequences.
        (ends((1, "ValueError: x"), (1, "KeyError: y")), "rank 0 on n0: ValueError: x (1)"),
        (ends((1, f"!{LOST}"), (3, "ValueError: x")), "rank 1 on n1: ValueError: x (3)"),
        (ends(143, (1, "ValueError: x")), "rank 1 on n1: ValueError: x (1)"),
        (ends(143, 3), "rank 1 on n1 (3)"),
        (ends((1, f"!{LOST}"), 143), f"rank 0 on n0: {LOST} (1)"),
        # An exception counts, though TERM came before its rank had ended.
        (ends(143, (143, "ValueError: x")), "rank 1 on n1: ValueError: x (143)"),
        # Signals: who is killed first is the cause; after TERM, KILL is the end of a rank's time to save.
        (ends(137, 143), "rank 0 on n0: killed by SIGKILL (137)"),
        (ends(139, (1, f"!{LOST}")), "rank 0 on n0: killed by SIGSEGV (139)"),
        (ends(134), "rank 0 on n0 (134)"),
        (ends(143, 137, 143), "rank 0 on n0: killed by SIGTERM (143)"),
        (ends((1, f"!{LOST}"), 137), "rank 1 on n1: killed by SIGKILL (137)"),
        (ends((1, f"!{LOST}"), 143, 137), f"rank 0 on n0: {LOST} (1)"),
        (
            [*ends(143, (1, f"!{LOST}")), End(2, "n2", 137, is_oom=True)],
            "rank 2 on n2: killed by the kernel for memory (137)",
        ),
        # A rank that left the others is the cause, unless one is known.
        (ends(0, (1, f"!{LOST}"), 143), f"rank 0 on n0: {EARLY} (1)"),
        (ends(0, (1, f"!{LOST}"), (3, "ValueError: x")), "rank 2 on n2: ValueError: x (3)"),
        (ends((1, f"!{LOST}"), 0), f"rank 0 on n0: {LOST} (1)"),
        (ends(0, 143, 143), "rank 1 on n1: killed by SIGTERM (143)"),
        (ends(0, 3), "rank 1 on n1 (3)"),
        (ends(0, (1, f"!{LOST}"), 137), f"rank 0 on n0: {EARLY} (1)"),
    ],
)
def test_what_failed_first(told: list[End], first: str | None) -> None:
    found = first_failure.by_ends(told)
    assert (None if found is None else f"{found.text} ({found.status})") == first


@pytest.mark.parametrize(
    ("told", "first"),
    [
        ([], "rank 3 on n4: its agent was killed"),
        (ends(143, (1, f"!{LOST}"), 0), "rank 3 on n4: its agent was killed"),
        (ends(0, (1, f"!{LOST}")), "rank 3 on n4: its agent was killed"),
        (ends((1, "ValueError: x")), "rank 0 on n0: ValueError: x"),
    ],
)
def test_an_agent_that_vanished_is_a_cause(told: list[End], first: str) -> None:
    found = first_failure.by_ends(told, [End(3, "n4", 0)])
    assert found is not None
    assert found.text == first
    assert found.status in (137, 1)


SILENT = Failure(None, "n2", 2, "task 1: Exited with exit code 2")


@pytest.mark.parametrize(
    ("told", "silent", "text"),
    [
        (ends(143), SILENT, "n2: task 1: Exited with exit code 2"),
        (ends((1, f"!{LOST}")), SILENT, "n2: task 1: Exited with exit code 2"),
        (ends((3, "ValueError: x")), SILENT, "rank 0 on n0: ValueError: x"),
        (ends((1, f"!{LOST}")), SILENT._replace(status=143), f"rank 0 on n0: {LOST}"),
    ],
)
def test_a_task_that_never_began_counts_before_consequences(told: list[End], silent: Failure, text: str) -> None:
    for gone in ([], [End(0, "n0", 137)]) if silent is SILENT else ([],):
        found = first_failure.by_ends(told, gone, silent)
        assert found is not None and found.text == text


KERNEL = "(the kernel has killed a process for memory)"


@pytest.mark.parametrize(
    ("end", "words", "kind"),
    [
        (End(0, "n1", 137, is_oom=True), "killed by the kernel for memory", "host memory"),
        (End(0, "n1", 143, is_oom=True), "killed by SIGTERM", "killed"),
        (End(0, "n1", 1, "OSError: x", "system", True), f"OSError: x {KERNEL}", "host memory"),
        (End(0, "n1", 1, is_oom=True), KERNEL, "host memory"),
    ],
)
def test_out_of_memory_is_not_said_of_a_rank_that_term_ended(end: End, words: str, kind: str) -> None:
    assert first_failure.by_ends([end]) == Failure(0, "n1", end.status, words, kind)


def test_the_log_is_asked_of_ranks_that_have_not_said_why_until_a_cause_is_found() -> None:
    asked = []

    def words_of(end: End) -> str:
        asked.append(end.rank)
        return {1: LOST, 2: "ValueError:\n x"}.get(end.rank, "")

    told = ends(143, 1, 3, 1, (1, "KeyError: y"))
    told[0:0] = [End(9, "n9", 1, failure_kind="peer")]
    assert first_failure.by_ends(told, words_of=words_of) == Failure(2, "n2", 3, "ValueError: x", "program")
    assert asked == [9, 1, 2]


@pytest.mark.parametrize("status", [134, 139])
def test_what_a_crash_leaves_unsaid_another_rank_says(status: int) -> None:
    """It saw where all ranks were when the connection broke; in whatever order they ended."""
    crashed, saw = End(0, "n0", status), End(1, "n1", 1, "Waiting: rank 0 in a.py:3.", "saw peers")
    text = f"rank 0 on n0: it {crashed.how}. Rank 1: Waiting: rank 0 in a.py:3."
    for told in ([crashed, saw], [saw, crashed]):
        found = first_failure.by_ends(told)
        assert found == Failure(0, "n0", status, text.partition(": ")[2], "killed" if status == 139 else "")
    assert first_failure.by_ends([crashed, saw._replace(failure_kind="peer")]).words in ("", "killed by SIGSEGV")
    assert first_failure.by_ends([End(0, "n0", 137), saw]).words == "killed by SIGKILL"
