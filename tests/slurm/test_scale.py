"""Many ranks: 256 tasks on the 32 nodes of a real Slurm, and 200 that meet where the name servers are dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import ROOT, Cluster, sandbox_name
from slowness import LIMIT_S, scaled

from cluster_ddp.sandbox import cluster
from cluster_ddp.slurm.port import candidates

NODES, TASKS_PER_NODE = 32, 8


@pytest.fixture(scope="module")
def large(machine: None) -> Iterator[Cluster]:
    """A sandbox of its own."""
    name = sandbox_name("scale")
    layout = cluster.up(name, nodes=NODES, gpus_per_node=0)
    try:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield Cluster(layout, {**cluster.environment(name), "PATH": path})
    finally:
        cluster.down(name)


@pytest.mark.full
def test_every_one_of_256_tasks_knows_its_place(large: Cluster) -> None:
    task = "echo $(hostname) $(python -m cluster_ddp env --json)"
    sizes = (f"--nodes={NODES}", f"--ntasks-per-node={TASKS_PER_NODE}")
    done = large.run("srun", *sizes, "bash", "-c", task)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    by_rank = {topology["rank"]: (host, topology) for host, topology in ((h, json.loads(text)) for h, text in lines)}
    assert sorted(by_rank) == list(range(NODES * TASKS_PER_NODE)) and len(lines) == len(by_rank)
    nodes = large.layout.node_names
    for rank, (host, topology) in by_rank.items():
        node_rank, local_rank = divmod(rank, TASKS_PER_NODE)
        assert (topology["node_rank"], topology["local_rank"]) == (node_rank, local_rank)
        assert topology["nodes"] == nodes and nodes[node_rank] == host
        assert topology["world_size"] == NODES * TASKS_PER_NODE
        assert topology["tasks_per_node"] == [TASKS_PER_NODE] * NODES
        assert topology["master_addr"] == nodes[0]
        assert topology["port_candidates"] == list(candidates(topology["job_id"], topology["step_id"]))


@pytest.mark.full
def test_two_hundred_ranks_meet_with_dead_name_servers(machine: None) -> None:
    """How long they take is the benchmark's business."""
    script = ROOT / "benchmarks" / "rendezvous_scale.py"
    options = ("--ranks", "200", "--rounds", "1", "--name-servers", "dead", "--alone")
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=scaled(LIMIT_S))
    assert done.returncode == 0, done.stderr
    (figure,) = json.loads(done.stdout)["figures"]
    assert figure["what"] == "200 ranks meet, name servers dead"
