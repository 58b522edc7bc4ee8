"""Nodes that are at fault are left behind."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster import Place
from paced_run import PACED, TRAINING, Run, held, start
from slowness import scaled

from cluster_ddp.run.names import File
from cluster_ddp.sandbox import network

# The second start has the run directory read-only on its second node, as where a file system has gone bad.
LINES = """if [[ ${SLURM_RESTART_COUNT:-0}.$SLURM_NODEID == 1.1 ]]; then
  mount --bind "$CLUSTER_DDP_RUN_DIR" "$CLUSTER_DDP_RUN_DIR"
  mount -o remount,bind,ro "$CLUSTER_DDP_RUN_DIR"
fi
python -m cluster_ddp.doctor --quick || exit"""


@pytest.mark.fault(
    "the doctor finds a bad node",
    "with `--restarts N`, a spare takes its place. Without a spare, the job is requeued without the node if the "
    "cluster has enough others; it resumes or starts there",
    bound="seconds, + KillWait at most",
)
def test_a_bad_node_is_left_behind(place: Place, uninterrupted: list[dict]) -> None:
    """The doctor finds it after a requeue; the job resumes without it and --exclude's, and loses nothing."""
    run = start(
        place, "--restarts", "1", "--exclude", "node4", command=place.slurm.wrapped(LINES, *PACED), FAULTS=[held(12)]
    )
    run.wait_for_step(6)
    run.slurm("scancel", "--signal=USR1", run.job)
    said = run.completed(restarts=2)
    (without,) = re.findall(rf"Requeueing job {run.job} without (node\d): The run directory can't be written: .*", said)
    assert f"Failed with status 2: requeueing job {run.job} (restart 2)." in said  # it has no spare
    assert not {without, "node4"} & {*run.nodes()}
    assert "Resuming from" in said
    assert run.metrics() == uninterrupted


@contextmanager
def cut_off(run: Run, node: str) -> Iterator[None]:
    """A node that reaches no other of the job, while all see the run directory."""
    layout = run.place.slurm.layout
    addresses = {name: address for address, name in layout.hosts_by_address.items()}
    others = [addresses[name] for name in run.nodes() if name != node]
    inside = ["nsenter", f"--net={network.NAMESPACE_ROOT / layout.namespace(node)}", "ip", "route"]
    for address in others:
        subprocess.run([*inside, "add", "blackhole", f"{address}/32"], check=True)
    try:
        yield
    finally:
        for address in others:
            subprocess.run([*inside, "del", "blackhole", f"{address}/32"], check=True)


@pytest.mark.full
def test_the_node_that_is_cut_off_is_left_behind_and_not_the_others(place: Place, uninterrupted: list[dict]) -> None:
    """It is the batch host, and its rank serves the store: the other two ranks read each other's files."""
    limits = ("--collective-timeout-s", f"{scaled(10):g}", "--hang-warning-s", f"{scaled(3):g}")
    run = start(place, nodes=("--nodes", "3", "--gpus-per-node", "1"), training=(*TRAINING, *limits), pace_s=0.5)
    run.wait_for_step(6)
    lost, *others = run.nodes()
    sick, hang = run.path / File.SICK_NODES, run.path / File.HANG
    with cut_off(run, lost):
        run.wait_for(sick.exists)
        verdict = hang.read_text()
    run.end()
    assert {line.split()[0] for line in sick.read_text().splitlines()} == {lost}, sick.read_text()
    in_one = r"in \w+( #\d+)? \(.*\)"
    each = rf"rank 1 on \S+ waits {in_one}; rank 2 on \S+ waits {in_one}"  # cut in the midst of a collective
    assert re.search(rf"(ranks 1-2 wait {in_one}|{each}); rank 0 on {lost} does not answer", verdict), verdict
    assert not any(f"{node} does not answer" in hang.read_text() for node in others), hang.read_text()
