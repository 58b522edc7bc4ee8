"""agent.job.restart.job_nodes: which of the nodes train; and Slurm's part, with a scontrol that stands in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.agent.job.restart import job_nodes
from cluster_ddp.agent.job.restart.job_nodes import LOST, Nodes, Reason

__all__ = ["fake_slurm"]

SHOW = ["--oneliner", "show", "job", "71"]
ENV = {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "node[1-3]"}


@pytest.mark.parametrize(
    ("says", "spares", "found"),
    [
        ("printf 'node1\\nnode2\\nnode3\\n'", 1, Nodes(("node1", "node2", "node3"), ("node1", "node2"))),
        ("printf 'node1\\nnode2\\n'", 0, Nodes(("node1", "node2"), ("node1", "node2"))),
        ("printf 'node1\\n'", 1, Nodes()),
        ("echo node1; exit 1", 0, Nodes()),
        ("", 0, Nodes()),
    ],
)
def test_the_last_nodes_are_the_spares(fake_slurm: FakeSlurm, says: str, spares: int, found: Nodes) -> None:
    fake_slurm.command("scontrol", says)
    assert job_nodes.of_job({**os.environ, **ENV}, spares) == found
    assert fake_slurm.calls("scontrol") == [["show", "hostnames", "node[1-3]"]]


def test_a_lost_node_is_no_spare_and_replaces_none() -> None:
    found = Nodes(("a", "b", "c", "d"), ("a", "b")).losing(["b", "c"])
    assert (found.allocated, found.training, found.spares) == (("a", "d"), ("a", "b"), ("d",))
    left = found.without({"b": LOST, "c": LOST})
    assert left == Nodes(("a", "d"), ("a", "d"), {"b": LOST, "c": LOST}) and left.spares == ()
    assert left.without({"a": Reason("sick")}) is None


@pytest.mark.parametrize(("does", "refusal"), [("", ""), ("echo 'may not shrink' >&2; exit 1", "may not shrink")])
def test_a_node_is_given_back_and_nothing_is_left_in_the_folder(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, refusal: str
) -> None:
    """scontrol writes a script for the new size where it runs."""
    (here := tmp_path / "it's here").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    running = "if [[ $2 == show ]]; then echo ' JobState=RUNNING Reason=None'; exit; fi"
    fake_slurm.command("scontrol", f"{running}\ntouch slurm_job_71_resize.sh\n{does}")
    assert job_nodes.resize(Nodes(("node1", "node3"), ("node1", "node2")), {**os.environ, **ENV}) == refusal
    assert fake_slurm.calls("scontrol") == [SHOW, ["update", "JobId=71", "NodeList=node1,node3"]]
    assert not [*here.iterdir()]


@pytest.mark.parametrize(
    ("says", "refusal"),
    [
        ("echo ' JobState=PENDING Reason=BeginTime'", "this start of the job is over (JobState=PENDING)"),
        ("echo ' JobState=COMPLETING'", "this start of the job is over (JobState=COMPLETING)"),
        ("echo ' JobState=RUNNING Restarts=1'", "this start of the job is over (Restarts=1)"),
        ("echo away; exit 1", "away"),
    ],
)
def test_of_a_job_that_slurm_has_queued_again_no_node_is_given_back(
    fake_slurm: FakeSlurm, says: str, refusal: str
) -> None:
    """The same request would let it require the others for ever."""
    fake_slurm.command("scontrol", says)
    assert job_nodes.resize(Nodes(("node1",), ("node1", "node2")), {**os.environ, **ENV}) == refusal
    assert fake_slurm.calls("scontrol") == [SHOW]
