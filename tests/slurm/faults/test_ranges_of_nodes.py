"""A job that takes what is free (--nodes MIN-MAX): it shrinks with its allocation, and grows by a requeue."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from chaos import faults
from cluster import Place, output
from restarting import Job
from slowness import wait_until

from cluster_ddp.cli import report, status
from cluster_ddp.jobs import run_state
from cluster_ddp.run.names import File
from cluster_ddp.slurm import job_status

TRAINING = ("python", str(Path(__file__).with_name("ranged_training.py")))


@pytest.mark.fault(
    "a node is lost in a job of [`--nodes MIN-MAX`](how-to/changing-nodes.md) with `--restarts`",
    "the job gives it back to Slurm; all ranks start again on the nodes that are left, if there are at least MIN; "
    "else the job is requeued",
    bound="seconds",
    also=("test_of_a_range_the_nodes_that_are_left_train_and_a_requeue_asks_for_the_range",),
)
@pytest.mark.fault(
    "a job of a range of nodes is requeued when more nodes are free",
    "it starts on all of them, up to MAX; the losses are those of one node, but for rounding, if the script keeps the "
    "global batch",
    bound="the requeue",
)
@pytest.mark.full
@pytest.mark.every_slurm
def test_a_range_of_nodes_shrinks_when_one_is_lost_and_grows_by_a_requeue(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are three. One is lost: two train on. After a warning, three do again. One alone learns the same."""
    env, layout = place.slurm.env, place.slurm.layout
    wait_until(lambda: all(one.ended for jobs in job_status.all_jobs(env=env).values() for one in jobs))
    job = begin(place, "--nodes", "2-9", "--exclude", "node4", "--restarts", "9", pace_s=0.2, requeues=1)
    *_, lost = job.ranks(0, count=3)
    undisturbed = begin(place, "--nodes", "1", pace_s=0, requeues=0)
    job.wait_for_step(6)
    faults.lose_node(layout, lost.node)
    assert job.wait_for_failures(1).then == "restart", output(job.path)
    job.ranks(1, count=2)
    faults.bring_back_node(layout, lost.node)
    job.wait_for_step(4 + (run_state.saved_step(job.path) or 0))
    job.slurm("scancel", "--batch", "--signal=USR1", job.job)
    said = job.completed(restarts=1)
    starts = [json.loads(line) for line in (job.path / File.STARTS).read_text().splitlines()]
    sizes = [(one["nodes"], one["ranks"], one["step"]) for one in starts if one["kind"] == "start"]
    # slurmctld repeats its order to kill step 0 once the node is back. If the job was requeued by then, it is the new
    # start's step that is killed, and starts again.
    sizes = [next(equal) for _, equal in itertools.groupby(sizes, lambda size: size[:2])]
    assert [size[:2] for size in sizes] == [(3, 3), (2, 2), (3, 3)], said
    assert "Starting again in the allocation, on 2 nodes, from step-" in said
    undisturbed.completed(restarts=0)
    expected = losses(undisturbed)
    learned = {step: loss for step, loss in losses(job).items() if step in expected}
    assert learned == pytest.approx(expected, rel=1e-4), said
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert status.main([str(job.path)]) == report.main([str(job.path)]) == 0
    shown = capsys.readouterr().out
    assert "3 nodes (2-9)" in shown
    assert f"Ranks: 3, from step {sizes[1][2]}: 2, from step {sizes[2][2]}: 3\n" in shown


def begin(place: Place, *options: str, pace_s: float, requeues: int) -> Job:
    command = ("env", f"PACE_S={pace_s}", f"REQUEUES={requeues}", *TRAINING)
    return Job(place, place.start("--gpus-per-node", "1", *options, "--name", "range", "--", *command))


def losses(job: Job) -> dict[int, float]:
    """The loss of each update."""
    return {one["step"]: one["loss"] for one in job.metrics() if one["kind"] == "train"}
