"""`--launcher fork`: ranks that are forked have what srun gives its tasks, and train the same."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from cluster import ROOT, Cluster, Place, differing, output, records
from slowness import wait_until

from cluster_ddp.runtime.profiling.node_usage import SAMPLE_S
from cluster_ddp.slurm import commands

pytestmark = pytest.mark.full

TWO_BY_TWO = ("--nodes", "2", "--gpus-per-node", "2", "--name", "same", "--sbatch-options=--nodelist=node1,node2")
SHOW = """import json, os, sys
with open(f"{os.environ['CLUSTER_DDP_RUN_DIR']}/rank-{os.environ['RANK']}.json", "w") as file:
    json.dump([dict(os.environ), sys.argv, sys.path], file)
"""
PACED = str(ROOT / "tests" / "slurm" / "faults" / "paced_training.py")
# Of the job, the step or the process itself; and what bash and the two sruns leave.
VOLATILE = re.compile(
    r"SLURM_JOB_(ID|SLUID)|SLURM_JOBID|\w*_PORT|SLURM_TASK_PID|\w*_TIME|CLUSTER_DDP_(START_ID|RUN_DIR|RESUME|NOTES|AGENT|CHANNEL|SECRET|JOB_TIMES)|_|SHLVL"
)


@pytest.fixture
def place(slurm: Cluster, tmp_path: Path) -> Place:
    folder = tmp_path / "it's a fork"
    folder.mkdir()
    return Place(slurm, folder)


@pytest.mark.every_slurm
@pytest.mark.parametrize("options", [("--cpus-per-task", "2"), ()])
def test_ranks_have_sruns_environment_line_for_line(place: Place, options: tuple[str, ...]) -> None:
    (place.folder / "show.py").write_text(SHOW)
    command = (*options, "--", "env", "A=it's", "python", "-u", "show.py", "a", "b c")
    runs = {name: place.start(*TWO_BY_TWO, "--launcher", name, *command) for name in ("srun", "fork")}
    for run_dir in runs.values():
        place.completed(run_dir)
    for rank in range(4):
        srun, fork = (json.loads((run_dir / f"rank-{rank}.json").read_text()) for run_dir in runs.values())
        assert fork[1:] == srun[1:]
        differences = differing(fork[0], srun[0])
        assert {name: two for name, two in differences.items() if not VOLATILE.fullmatch(name) or None in two} == {}
        assert [fork[0][name] for name in ("SLURM_PROCID", "RANK")] == [str(rank)] * 2


def test_the_same_training_stopped_and_queued_again(place: Place) -> None:
    """USR1 reaches all ranks, all is saved, status 75 queues the job again; the weights are srun's, bit for bit."""
    training = (
        "--dataset",
        "digits",
        "--epochs",
        "2",
        "--batch-size",
        "6",
        "--checkpoint-every",
        "4steps",
        "--model",
        "convnet",
    )
    elsewhere = (*TWO_BY_TWO[:-1], "--sbatch-options=--nodelist=node3,node4")
    alone = place.start(*elsewhere, "--launcher", "srun", "--", "python", PACED, *training)
    forked = (*TWO_BY_TWO, "--launcher", "fork", "--", "env", "PACE_S=0.15", "python", PACED, *training)
    run_dir = place.start(*forked)
    wait_until(lambda: list(run_dir.glob("checkpoints/step-*.pt")), said=lambda: output(run_dir))
    job = run_dir.name.rpartition("-")[2]
    commands.run(["scancel", "--signal=USR1", job], env=place.slurm.env)
    said = place.completed(run_dir)
    assert "got USR1" in said
    assert "Resuming from" in said
    place.completed(alone)
    assert records(run_dir)[-1]["weights_sha256"] == records(alone)[-1]["weights_sha256"]
    used = [json.loads(line) for path in run_dir.glob("usage-*.jsonl") for line in path.read_text().splitlines()]
    assert {(one["node"], one["restart"]) for one in used} == {("node1", 0), ("node2", 0), ("node1", 1), ("node2", 1)}
    assert all(0 <= one["cpu"] <= 1 for one in used)
    assert all(one["memory"] > 1 << 20 for one in used if one["seconds"] >= SAMPLE_S)
    reported = place.slurm.run(sys.executable, "-m", "cluster_ddp", "report", str(run_dir), cwd=place.folder).stdout
    shown = r"COMPLETED\n.*1 requeue\n.*By node\n  node1 .* of 2 CPUs.*\n  node2 .* of 2 CPUs"
    assert re.search(shown, reported, re.DOTALL), reported
