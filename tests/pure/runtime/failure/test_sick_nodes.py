"""sick-nodes.txt, and which nodes of a verdict belong there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_ddp.doctor.findings import Finding, Verdict
from cluster_ddp.run.names import Env, File
from cluster_ddp.runtime.failure import sick_nodes


def test_one_line_a_node(tmp_path: Path) -> None:
    env = {Env.RUN_DIR: str(tmp_path)}
    sick_nodes.note(env, "node3", "its disk\nis\x1b full")
    sick_nodes.note(env, "node4", "x" * 999)
    first, second = (tmp_path / File.SICK_NODES).read_text().splitlines()
    assert first.startswith("node3 its disk is") and "\x1b" not in first
    assert len(second) < 400


@pytest.mark.parametrize("node", ["", "a b", "a\nb"])
def test_what_is_no_node_is_not_noted(tmp_path: Path, node: str) -> None:
    sick_nodes.note({Env.RUN_DIR: str(tmp_path)}, node, "x")
    assert not list(tmp_path.iterdir())


def test_it_never_raises(tmp_path: Path) -> None:
    sick_nodes.note({}, "node3", "x")
    sick_nodes.note({Env.RUN_DIR: str(tmp_path / "missing")}, "node3", "x")


JOB = {"SLURM_JOB_NODELIST": "node[1-4]", "SLURM_STEP_NODELIST": "node[2,1]"}


@pytest.mark.parametrize(
    ("reached", "world_size", "env", "may"),
    [
        ("node1 node2", 3, JOB, True),
        ("node1", 3, JOB, False),  # the batch host itself, cut off
        ("node1", 2, JOB, True),
        ("node2", 2, JOB, False),
        ("node2", 2, {"SLURM_STEP_NODELIST": "node[2,1]"}, True),
        ("node1 node1", 4, JOB, True),
        ("node2 node2", 4, JOB, False),
        ("node1 node1 node1", 8, JOB, False),
        ("node1", 2, {}, False),  # nobody knows the batch host
        ("node1", 2, {"SLURM_JOB_NODELIST": "node["}, False),
        ("node2 node2", 3, {}, True),
    ],
)
def test_who_may_accuse_others(reached: str, world_size: int, env: dict[str, str], may: bool) -> None:
    """More than half of the ranks; of two halves, the one with the batch host."""
    assert sick_nodes.may_accuse(dict(enumerate(reached.split())), world_size, env) == may


@pytest.mark.parametrize(
    ("nodes", "num_nodes", "is_warning", "found"),
    [
        (("n1",), 2, False, {"n1": "Bad."}),
        (("n1",), 2, True, {}),
        (("n1", "n2"), 2, False, {}),
        (("n1",), 1, False, {"n1": "Bad."}),
        (("n1",), 0, False, {}),  # a login node
        ((), 2, False, {}),
    ],
)
def test_whose_fault_it_is(nodes: tuple[str, ...], num_nodes: int, is_warning: bool, found: dict[str, str]) -> None:
    """A warning is none; what all of several nodes have is not that of a node."""
    finding = Finding(check="x", what="Bad.", evidence="", hint="", sick_nodes=nodes, is_warning=is_warning)
    assert Verdict(subject="x", num_nodes=num_nodes, raw=[finding]).nodes_at_fault() == found
