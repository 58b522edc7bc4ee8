"""Nodes that are at fault are left behind."""

from __future__ import annotations

import re

from cluster import Place
from paced_run import PACED, start

# The second start has the run directory read-only on its second node, as where a file system has gone bad.
LINES = """if [[ ${SLURM_RESTART_COUNT:-0}.$SLURM_NODEID == 1.1 ]]; then
  mount --bind "$CLUSTER_DDP_RUN_DIR" "$CLUSTER_DDP_RUN_DIR"
  mount -o remount,bind,ro "$CLUSTER_DDP_RUN_DIR"
fi
python -m cluster_ddp.doctor --quick || exit"""


def test_a_bad_node_is_left_behind(place: Place, uninterrupted: list[dict]) -> None:
    """41. The doctor finds it after a requeue; the job resumes without it and --exclude's, and loses nothing."""
    run = start(place, "--requeue-elsewhere", "1", "--exclude", "node4", command=place.slurm.wrapped(LINES, *PACED))
    run.wait_for_step(6)
    run.slurm("scancel", "--signal=USR1", run.job)
    said = run.completed(restarts=2)
    (without,) = re.findall(rf"Requeueing job {run.job} without (node\d): The run directory can't be written: .*", said)
    assert f"Failed with status 2 on a node at fault: requeueing job {run.job} (restart 2)." in said
    assert not {without, "node4"} & {*run.nodes()}
    assert "Resuming from" in said
    assert run.metrics() == uninterrupted
