"""What a verdict on a hang is made of: what ranks wrote, by files alone and by a watch without other ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import job_ids, slurm_step

from cluster_ddp.runtime.failure import hang_verdict, hang_watch, last_progress
from cluster_ddp.runtime.failure.hang_verdict import Answer
from cluster_ddp.runtime.failure.hang_watch import STORE_PATIENCE_S, HangWatch
from cluster_ddp.runtime.failure.stacks import StackFile
from cluster_ddp.slurm.topology import Topology

JOB_ID = job_ids()
HOST = os.uname().nodename
COLLECTIVE = '  File "/lib/site-packages/torch/distributed/distributed_c10d.py", line 5 in all_reduce\n'


@pytest.mark.parametrize(("error", "inner", "state"), [
    ("Aborted", COLLECTIVE, "aborted"),
    ("Aborted", "", "crashed (Aborted)"),
    ("Segmentation fault", COLLECTIVE, "crashed (Segmentation fault)"),
    ("Bus error", "", "crashed (Bus error)"),
])  # fmt: skip
def test_the_dump_of_a_rank_that_ended_is_newer_than_what_it_wrote(
    error: str, inner: str, state: str, tmp_path: Path
) -> None:
    wrote = Answer(rank=0, host="node1", where="a.py:1", operation="all_reduce", number=1, sizes="1")
    dump = (
        f'Fatal Python error: {error}\n\nThread 0x1 (most recent call first):\n{inner}  File "/x/b.py", line 7 in f\n'
    )
    (tmp_path / "stack-rank0.txt").write_text(f"{wrote.text()}\n{dump}")
    assert hang_verdict.read(tmp_path) == [
        Answer(rank=0, host="node1", where="b.py:7", doing="f", operation="all_reduce" if inner else "", state=state)
    ]


def test_a_rank_that_was_stuck_in_c_before_its_last_answer_is_not_stuck(tmp_path: Path) -> None:
    wrote = Answer(rank=0, host="node1", where="a.py:1", operation="all_reduce")
    stack = 'Stack (most recent call first):\n  File "/x/b.py", line 7 in f\n'
    file = StackFile(tmp_path / "stack-rank0.txt")
    file.write(wrote.text())
    with open(file.path, "a") as more:
        more.write(stack)
    assert [one.state for one in hang_verdict.read(tmp_path)] == ["locked"]
    file.dump()
    file.close()
    assert hang_verdict.read(tmp_path) == [wrote]


def test_ranks_at_different_places_are_asked_for_the_same_calls() -> None:
    """Whatever the backend does: NCCL waits until its time limit, gloo may abort a rank."""
    waits = Answer(rank=0, host="node1", where="a.py:4", operation="all_reduce")
    elsewhere = Answer(rank=1, host="node2", where="a.py:9", doing="main")
    asks = "is one of them inside `if world.is_main:`?"
    for other in (elsewhere, replace(elsewhere, operation="all_reduce"), replace(elsewhere, state="aborted")):
        assert asks in hang_verdict.hint([waits, other], None)
    for other in (
        replace(waits, rank=1),  # a slow network
        replace(elsewhere, state="gone"),
        replace(elsewhere, doing="DataLoader, in main"),  # slow storage
    ):
        assert hang_verdict.hint([waits, other], None) == ""
    crashed = replace(elsewhere, state="crashed (Segmentation fault)")
    assert hang_verdict.hint([waits, crashed], None) == "read the output of that rank"
    assert hang_verdict.hint([waits, crashed], Path()).endswith("stack-rank1.txt")


def test_a_file_that_moves_keeps_its_descriptors(tmp_path: Path) -> None:
    """faulthandler and the watching thread may write at any time."""
    old, new = tmp_path / "stack-rank0.txt", tmp_path / "run" / "stack-rank0.txt"
    new.parent.mkdir()
    new.write_text("of an earlier start")
    file = StackFile(old)
    file.write("here")
    file.move(new)
    file.write("there")
    file.dump()
    file.close()
    text = new.read_text()
    assert not old.exists() and text.startswith("there ") and "test_a_file_that_moves" in text and "earlier" not in text


def test_a_rank_may_be_stuck_in_c_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file then says so, else its node would be at fault."""
    armed: list[float] = []
    monkeypatch.setattr(StackFile, "arm", lambda file, timeout_s: armed.append(timeout_s))
    monkeypatch.setenv("CLUSTER_DDP_RUN_DIR", str(tmp_path))
    here = Topology.from_environ(slurm_step(1, 2, job_id=JOB_ID))
    watch = HangWatch(here, lambda *_: None, warning_s=60, timeout_s=60)
    watch._look(time.monotonic())
    assert armed == [60 + 4 * 1.5 + STORE_PATIENCE_S, 60 + 4 * 1.5]  # the latter once the store has answered
    assert not watch.words
    watch._file.close()  # type: ignore[union-attr]


def test_a_node_is_named_as_in_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host's own name may have a domain: --exclude would not know it."""
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    watch = HangWatch(
        Topology.from_environ(slurm_step(0, 2, job_id=JOB_ID)), lambda *_: None, warning_s=60, timeout_s=60
    )
    assert watch._here().host == "node7"


def test_a_rank_that_is_cut_off_keeps_to_the_verdict_of_those_that_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER_DDP_RUN_DIR", str(tmp_path))
    here, hang = Topology.from_environ(slurm_step(1, 2, job_id=JOB_ID)), tmp_path / "hang.txt"

    def verdict() -> str:
        watch = HangWatch(here, lambda question: None, warning_s=60, timeout_s=60)
        watch.start()
        try:
            return watch.verdict(RuntimeError("timed out"))
        finally:
            watch.stop()

    own = verdict()
    assert re.search(rf"rank 1 on {HOST} is in .*; rank 0 on .* does not answer", own), own
    assert hang.read_text() == f"{own}\n"
    hang.write_text("rank 1 does not answer\n")
    assert verdict() == "rank 1 does not answer" == hang.read_text().rstrip()
    long_ago = time.time() - 61
    os.utime(hang, (long_ago, long_ago))  # an earlier hang's
    assert verdict() == own
    hang.unlink()
    os.mkfifo(hang)  # others may write to a shared run directory: nobody waits for a pipe
    assert verdict() == own


@pytest.mark.fault(
    "only a rank that reaches too few others finds ranks silent; with `--hang-restart-s`",
    "no node is blamed; all ranks restart on the same nodes",
    bound="10 s more",
)
@pytest.mark.parametrize(
    ("silent", "then", "others_s", "accused"),
    [
        ({2}, None, 10, ["node3"]),
        ({2}, lambda watch: watch._answer(), 10, None),
        ({2}, lambda watch: last_progress.note_step(), 10, None),
        (set(), None, 0, None),  # the script's own deadlock
        ({1, 2}, None, 10, None),  # rank 0 may be cut off: for some time, it leaves the start to those that reach more
        ({1, 2}, None, 0, []),
    ],
    ids=["a silent rank", "it answers in time", "a step comes", "all answer", "cut off", "cut off for long"],
)
def test_who_ends_a_start_in_which_ranks_are_silent(
    silent: set[int],
    then: Callable[[HangWatch], object] | None,
    others_s: float,
    accused: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None accused: nobody ends it."""
    monkeypatch.setattr(hang_watch, "_ANSWER_S", 0.0)
    monkeypatch.setattr(hang_watch, "_OTHERS_S", others_s)
    monkeypatch.setenv("CLUSTER_DDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    store, ended = dist.HashStore(), list[str]()
    watches: dict[int, HangWatch] = {}

    def end(is_over: Callable[[], bool]) -> None:
        ended.append(watches[0].words)
        watches[0].accuse()

    def on_node_of(rank: int) -> HangWatch:
        monkeypatch.setenv("SLURMD_NODENAME", f"node{rank + 1}")
        here = Topology.from_environ(slurm_step(rank, 3, job_id=JOB_ID, nodelist="node[1-3]"))
        limits = {"warning_s": 0.5, "timeout_s": 60.0, "restart_s": 0.0}
        return watches.setdefault(rank, HangWatch(here, lambda ask: ask(store), **limits, end=end))

    for rank in range(3):
        on_node_of(rank)._look(time.monotonic())  # it notes where it is
    for rank in {1, 2} - silent:
        on_node_of(rank)._answer()
    monkeypatch.setattr(last_progress, "last_s", time.monotonic() - 9)
    on_node_of(0)._look(time.monotonic())
    if then is not None:
        then(on_node_of(2))
    on_node_of(0)._look(time.monotonic())
    for watch in watches.values():
        watch._file.close()  # type: ignore[union-attr]
    assert len(ended) == (accused is not None)
    assert all("does not answer" in words for words in ended), ended
    noted = [line.split()[0] for path in tmp_path.glob("sick-nodes.txt") for line in path.read_text().splitlines()]
    assert noted == (accused or [])


@pytest.mark.fault(
    "a node is cut off from the others (also the batch host, rank 0's)",
    "that node is marked as sick, not the others",
    bound="`--collective-timeout-s`",
    also=("test_the_node_that_is_cut_off_is_left_behind_and_not_the_others",),
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize("cut_off", [0, 1, 2])
def test_a_node_that_is_cut_off_accuses_nobody(
    cut_off: int, order: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network between the nodes ends, not the shared file system. Rank 0 serves the store, also if it is alone."""
    nodes, store = ("node1", "node2", "node3"), dist.HashStore()
    monkeypatch.setenv("CLUSTER_DDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    watches = []
    for rank, node in enumerate(nodes):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        here = Topology.from_environ(slurm_step(rank, 3, job_id=JOB_ID, nodelist="node[1-3]"))
        own = store if rank == 0 or cut_off not in (0, rank) else None
        watches.append(HangWatch(here, lambda ask, own=own: own and ask(own), warning_s=0.5, timeout_s=60))
        watches[rank]._answer()  # its thread does so when no step comes
    for rank in order:
        monkeypatch.setenv("SLURMD_NODENAME", nodes[rank])
        watches[rank].verdict(RuntimeError("timed out"))
    for watch in watches:
        watch._file.close()  # type: ignore[union-attr]
    noted = (tmp_path / "sick-nodes.txt").read_text().splitlines()
    assert {line.split()[0] for line in noted} == {nodes[cut_off]}, noted
    last = (tmp_path / "hang.txt").read_text()
    assert f"rank {cut_off} on {nodes[cut_off]} does not answer" in last, last
    assert last.count("does not answer") == 1, last


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (
            {"where": "loop.py:9", "doing": "train"},
            "is stopped (SIGSTOP, or a debugger); seen last: is in train (loop.py:9)",
        ),
        ({"operation": "all_reduce"}, "is stopped (SIGSTOP, or a debugger); seen last: waits in all_reduce"),
        ({}, "is stopped (SIGSTOP, or a debugger)"),
    ],
)
def test_what_was_seen_last_of_a_stopped_rank_is_said(seen: dict[str, str], words: str) -> None:
    assert (
        hang_verdict._words(hang_verdict.Answer(rank=1, host="node2", state="stopped", **seen), with_sizes=False)
        == words
    )  # type: ignore[arg-type]
