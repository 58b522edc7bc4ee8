"""agent.job.restart.recovery: what a job does after a failed start. Its commands stand in for Slurm's."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.agent.job.restart.failures import Decision, History
from cluster_ddp.agent.job.restart.job_nodes import LOST, Nodes, Reason
from cluster_ddp.agent.job.restart.recovery import Recovery
from cluster_ddp.agent.job.task_reports import TaskReports
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.agent.rank_end import End
from cluster_ddp.run import journal
from cluster_ddp.run.journal import Failed
from cluster_ddp.run.names import File, Kind
from cluster_ddp.run.outcome import FOR_MEMORY, Failure, Outcome

__all__ = ["fake_slurm"]

NODES = Nodes(("n1", "n2", "n3", "n4"), ("n1", "n2"))
FIRST = Failure(1, "n2", 137, "killed by SIGKILL")
SHOW = ["--oneliner", "show", "job", "71"]
SHRINK = ["update", "JobId=71", "NodeList=n1,n3,n4"]


class Job:
    """A job with two spares, in a run directory."""

    def __init__(self, slurm: FakeSlurm, run_dir: Path) -> None:
        self.slurm, self.run_dir = slurm, run_dir
        self.others = "seq -f n%g 9"
        slurm.command("scontrol", "echo JobState=RUNNING")
        self.asked: list[list[str]] = []
        self.faults: Mapping[str, str] = {}

    def recovery(
        self,
        *,
        restarts: int = 9,
        nodes: Nodes = NODES,
        requeues: int = 0,
        run_dir: bool = True,
        slurmd_port: int = 0,
        range_: str | None = None,
        max_mem: str = "0",
    ) -> Recovery:
        self.slurm.command("sinfo", self.others)
        history = History(self.run_dir if run_dir else None, "12", is_first=not requeues)
        job = {"SLURM_JOB_ID": "71", "SLURM_JOB_PARTITION": "gpu", "SLURM_RESTART_COUNT": str(requeues)}
        asked = AgentOptions(restarts=restarts, nodes=range_, max_mem=max_mem)
        return Recovery(asked, {**os.environ, **job}, history, nodes, slurmd_port, self._examine)

    def _examine(self, nodes: Sequence[str]) -> Mapping[str, str]:
        self.asked.append([*nodes])
        return {node: fault for node, fault in self.faults.items() if node in nodes}

    def noted(self) -> Failed:
        """The last failure, as the next start of the job finds it."""
        return History(self.run_dir, "12", is_first=False).failures[-1]


@pytest.fixture
def job(fake_slurm: FakeSlurm, tmp_path: Path) -> Job:
    (run_dir := tmp_path / "it's a run").mkdir()
    return Job(fake_slurm, run_dir)


def ended(first: Failure | None = FIRST, **more: Any) -> Outcome:
    return Outcome("12", 3, "FAILED", 137, first, **more)


SILENT = TaskReports("srun", 2, tasks=2)


def test_a_failed_rank_starts_again_where_it_was(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    (job.run_dir / File.PROGRESS).write_text("step-7.pt\n")
    recovery = job.recovery()
    found = recovery.decide(ended(), SILENT)
    assert (found.then, recovery.nodes, recovery.nodes_given_back) == ("restart", NODES, None)
    assert (job.asked, job.slurm.calls("scontrol")) == ([], [])
    noted = job.noted()
    assert noted[1:5] == (3, "n2", 1, "killed by SIGKILL") and noted.then == "restart"
    assert capfd.readouterr().err == (
        "Starting again in the allocation, from step-7.pt, after rank 1 on n2: killed by SIGKILL;"
        f" {noted.lost_s:.0f} s of the training are lost.\n"
    )


def test_a_srun_that_was_killed_is_a_cause(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    assert job.recovery().decide(ended(None), SILENT).then == "restart"
    assert " after the end of srun, which gave no reason" in capfd.readouterr().err


def test_a_rank_that_has_waited_for_others_is_not_where_it_failed(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    reports, words = TaskReports("srun", 2, tasks=2), "Waiting 9 s for rank 0 on n1 to answer: rank 0 does not answer."
    reports.hear({"kind": "ended", **End(1, "n2", 1, words, "hang")._asdict()})
    assert job.recovery().decide(ended(Failure(1, "n2", 1, words)), reports).then == "restart"
    assert job.noted()[2:5] == ("", 1, words)
    assert " after rank 1: Waiting 9 s for rank 0 on n1 to answer: rank 0 does not answer; " in capfd.readouterr().err


def test_without_restarts_nothing_is_said_or_noted(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    assert job.recovery(restarts=0).decide(ended(), SILENT).then == "end"
    assert capfd.readouterr().err == "" and journal.failures(job.run_dir) == []


def test_the_end_is_said(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    recovery = job.recovery(restarts=1)
    assert [recovery.decide(ended(), SILENT).then for _ in range(2)] == ["restart", "end"]
    assert capfd.readouterr().err.splitlines()[-1] == "error: failed twice (--restarts 1); not started again."


@pytest.mark.fault(
    "a GPU's memory or NVLink has an uncorrectable error, or the GPU is lost; with `--restarts`",
    "its node is left out at once, if there is another; the log has the line by which the support drains it",
)
def test_broken_hardware_is_left_out_at_once_with_a_line_for_the_support(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "RuntimeError: CUDA error: uncorrectable ECC error"
    found = job.recovery().decide(ended(FIRST._replace(words=words, kind=Kind.GPU_HARDWARE)), SILENT)
    assert (found.then, {*found.left_out}, job.noted().without) == ("restart", {"n2"}, ("n2",))
    line = f"For the support of your cluster: scontrol update NodeName=n2 State=DRAIN 'Reason={words}'\n"
    assert line in capfd.readouterr().err


@pytest.mark.parametrize(
    ("has", "then", "mem_mb"),
    [("16000", "requeue", 24000), ("32768", "end", None), ("", "end", None), ("0", "end", None)],
)
def test_a_process_killed_for_memory_has_more_in_the_next_requeue(
    job: Job,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has: str,
    then: str,
    mem_mb: int | None,
) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", has)
    recovery = job.recovery(max_mem="32G")
    found = recovery.decide(ended(FIRST._replace(words=FOR_MEMORY, kind=Kind.HOST_MEMORY)), SILENT)
    assert (found.then, recovery.memory(3), found.left_out) == (then, mem_mb, {})
    said = capfd.readouterr().err
    assert ("--max-mem has no effect" in said) == (has in ("", "0"))
    assert ("the job continues with 24000 MB" in said) == (then == "requeue")
    assert ("error: the memory of a node is too small" in said) == (then == "end")
    assert recovery.memory(4) is None  # of a later start that was stopped in time


def test_more_memory_is_said_only_if_a_requeue_follows(
    job: Job, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "16000")
    killed = ended(FIRST._replace(words=FOR_MEMORY, kind=Kind.HOST_MEMORY))
    assert job.recovery(run_dir=False, requeues=9, max_mem="32G").decide(killed, SILENT).then == "end"
    said = capfd.readouterr().err
    assert "error: requeued 9 times" in said and "continues with" not in said


def test_a_lost_node_is_given_back_at_once_and_a_spare_takes_over(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """Those that waited for it may have failed first. Slurm would end the job once it learns of the loss."""
    recovery = job.recovery()
    found = recovery.decide(ended(FIRST._replace(host="n1", rank=0), lost_nodes=("n2",)), SILENT)
    assert (found.then, found.left_out, job.asked) == ("restart", {"n2": LOST}, [["n3"]])
    assert job.slurm.calls("scontrol") == [SHOW, SHRINK]
    assert recovery.nodes == Nodes(("n1", "n3", "n4"), ("n1", "n3"), {"n2": LOST})
    assert (recovery.nodes_given_back, recovery.left_behind(Decision("end"))) == ("4", {})
    assert (job.noted().node, job.noted().rank, job.noted().without) == ("n2", None, ("n2",))
    assert f"Left out from now on: n2: {LOST.words}\n" in capfd.readouterr().err


@pytest.mark.fault(
    "a node is lost, and Slurm does not let jobs give nodes back (`disable_job_shrink`)",
    "the spare takes over; when Slurm ends the job, the ranks save and the job is requeued (Slurm's part was tested "
    "by hand)",
    bound="seconds; SlurmdTimeout",
)
def test_a_refusal_to_give_a_node_back_is_said(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """The ranks restart all the same, without the node."""
    job.slurm.command("scontrol", "[[ $1 != update ]] || { echo 'it is disabled' >&2; exit 1; }; echo JobState=RUNNING")
    recovery = job.recovery()
    assert recovery.decide(ended(lost_nodes=("n2",)), SILENT).then == "restart"
    assert recovery.nodes.training == ("n1", "n3")
    assert recovery.nodes_given_back is None
    said = "warning: Slurm did not let job 71 give n2 back: it is disabled\n  It ends the job once it finds"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_spare_whose_agent_is_gone_is_left_out_and_given_back_if_it_is_lost(job: Job, is_lost: bool) -> None:
    """Once, before it is needed."""
    here, spare = "127.0.0.1", "127.0.0.2" if is_lost else "127.0.0.1"
    with socket.create_server((here, 0)) as slurmd:
        slurmd_port = slurmd.getsockname()[1]
        recovery = job.recovery(nodes=Nodes(("n1", "n2", spare, "n4"), ("n1", "n2")), slurmd_port=slurmd_port)
        for _ in range(2):
            recovery.note_gone([spare, "n1", "another's"])
    shrink = [SHOW, ["update", "JobId=71", "NodeList=n1,n2,n4"]] if is_lost else []
    assert job.slurm.calls("scontrol") == shrink
    assert recovery.nodes.spares == ("n4",)
    assert [*recovery.left_behind(Decision("end"))] == ([] if is_lost else [spare])
    recovery.decide(ended(lost_nodes=("n2",)), SILENT)
    assert recovery.nodes.training == ("n1", "n4")


@pytest.mark.parametrize("others", [3, 2])
def test_a_requeue_is_told_which_nodes_to_exclude(job: Job, others: int) -> None:
    """It sees itself whether others are enough (test_requeue.py)."""
    job.others = f"seq -f n%g {others}"
    recovery = job.recovery(nodes=Nodes(("n1", "n2"), ("n1", "n2")))
    found = recovery.decide(ended(lost_nodes=("n2",)), SILENT)
    assert (found.then, recovery.left_behind(found)) == ("requeue", {"n2": LOST.words})


@pytest.mark.parametrize(
    ("faults", "then", "training"),
    [({"n3": "its GPU"}, "restart", ("n1", "n4")), ({"n3": "its GPU", "n4": "its disk"}, "requeue", None)],
)
def test_a_spare_that_is_found_sick_is_skipped(
    job: Job, faults: dict[str, str], then: str, training: tuple[str, ...] | None
) -> None:
    job.faults, recovery = faults, job.recovery()
    found = recovery.decide(ended(lost_nodes=("n2",)), SILENT)
    assert (found.then, found.nodes and found.nodes.training) == (then, training)
    assert found.left_out == {"n2": LOST, **{node: Reason(fault) for node, fault in faults.items()}}
    assert (job.asked, job.noted().without) == ([["n3"], ["n4"]], ("n2", *faults))


def test_a_node_that_ranks_find_at_fault_is_left_out(job: Job) -> None:
    """Not those of other jobs. Whoever waited for it fails in its place."""
    recovery = job.recovery()
    (job.run_dir / File.SICK_NODES).write_text("n9 not ours\nn1 its disk\n")
    found = recovery.decide(ended(), SILENT)
    assert (found.then, found.left_out) == ("restart", {"n1": Reason("its disk")})
    assert recovery.nodes == Nodes(NODES.allocated, ("n2", "n3"), {"n1": Reason("its disk")})
    assert (recovery.left_behind(Decision("end")), recovery.nodes_given_back) == ({"n1": "its disk"}, None)
    assert (job.noted().node, job.noted().words) == ("n1", "its disk")


def test_where_slurm_makes_no_step_the_job_is_requeued(job: Job) -> None:
    """22.05 forgets the GPUs of a job that was made smaller and requeued; once more, and it has them."""
    first = Failure(None, "srun", 1, "Unable to create step for job 9")
    assert job.recovery().decide(ended(first=first), SILENT).then == "requeue"


def test_what_was_left_out_stays_so_after_a_requeue(job: Job) -> None:
    """If the job has got the node once more, and has enough others."""
    failed = Failed(0.0, 0, "n1", 0, "x", then="requeue", without=("n1",))
    History(job.run_dir, "12", is_first=True).end(Outcome("12", 0, "FAILED", 1, then="requeue"), failed)
    again = job.recovery(requeues=1)
    assert again.nodes.training == ("n2", "n3")
    few = Nodes(("n1", "n2"), ("n1", "n2"))
    assert job.recovery(requeues=1, nodes=few).nodes == few


def test_of_a_range_the_nodes_that_are_left_train_and_a_requeue_asks_for_the_range(job: Job) -> None:
    """Down to MIN. Then it uses all that Slurm gives: a node that was lost may be back."""
    job.others, three = "seq -f n%g 2", ("n1", "n2", "n3")
    recovery = job.recovery(nodes=Nodes(three, three, least=2), range_="2-8")
    assert recovery.decide(ended(lost_nodes=("n2",)), SILENT).then == "restart"
    assert (recovery.nodes.training, recovery.nodes_given_back, recovery.needed) == (("n1", "n3"), "2-8", 2)
    found = recovery.decide(ended(FIRST._replace(host="n3"), lost_nodes=("n3",)), SILENT)
    assert (found.then, recovery.nodes.allocated, recovery.nodes_given_back) == ("requeue", ("n1",), "2-8")
    assert job.recovery(nodes=Nodes(three, three, least=2), range_="2-8", requeues=1).nodes.training == three


@pytest.mark.parametrize(("requeues", "then"), [(0, "requeue"), (1, "requeue"), (2, "end")])
@pytest.mark.parametrize("run_dir", [True, False])
def test_failures_that_cannot_be_counted_are_at_most_the_restarts(
    job: Job, requeues: int, then: str, run_dir: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else a job that fails each time would be requeued for ever."""
    (job.run_dir / File.JOURNAL).mkdir()
    recovery = job.recovery(restarts=2, nodes=Nodes(("n1", "n2"), ("n1", "n2")), requeues=requeues, run_dir=run_dir)
    assert recovery.decide(ended(lost_nodes=("n2",)), SILENT).then == then
    assert ("error: " in capfd.readouterr().err) is (then == "end")


@pytest.mark.parametrize(
    ("others", "then"),
    [("seq -f n%g 3", "requeue"), ("seq -f n%g 2", "restart"), ("exit 1", "requeue"), ("", "restart")],
)
def test_a_node_that_failed_twice_stays_if_the_cluster_has_no_other(job: Job, others: str, then: str) -> None:
    """Slurm would never start the job. If it does not answer, it may have others."""
    job.others = others
    recovery = job.recovery(nodes=Nodes(("n1", "n2"), ("n1", "n2")))
    assert [recovery.decide(ended(), SILENT).then for _ in range(2)] == ["restart", then]
    assert "--partition=gpu" in job.slurm.calls("sinfo")[0]


def test_a_node_is_lost_if_its_agent_is_gone_and_slurms_daemon_too(job: Job) -> None:
    """An agent that was killed is no lost node; nor is a host that the job does not train on."""
    here, there = "127.0.0.1", "127.0.0.2"
    with socket.create_server((here, 0)) as slurmd:
        nodes, slurmd_port = Nodes((here, there, "127.0.0.3"), (here, there)), slurmd.getsockname()[1]
        recovery = job.recovery(nodes=nodes, slurmd_port=slurmd_port)
        reports = TaskReports("srun", 2, tasks=2)
        for task, host in enumerate((here, there, "127.0.0.3")):
            reports.gone({"kind": "hello", "ranks": [task], "host": host, "task": str(task), "stays": True})
        assert recovery.lost(reports) == (there,)
