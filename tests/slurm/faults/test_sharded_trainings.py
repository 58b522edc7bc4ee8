"""A sharded model (FSDP2) on a stream under faults: the bits of one that met none, and all its checkpoints whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import Place
from paced_run import Run
from restarting import Job, launch

from cluster_ddp.run.names import Env, File
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.sharded import pieces_file
from cluster_ddp.sandbox import daemons, network

SHARDED = ("python", str(Path(__file__).with_name("sharded_training.py")))
FAULTS = [
    {"rank": 1, "writes": "step-00000010.pieces/.rank-1-"},
    {"rank": 0, "writes": "checkpoints/.step-00000015.pt", "start": 1},
    {"rank": 0, "step": 30, "start": 3},
]


@pytest.mark.fault(
    "a sharded training is warned (USR1), or a node's link is cut",
    "as for other trainings. The ranks on the spare read the parts that the lost node has saved, so the run directory "
    "must be on a file system that all nodes share",
)
@pytest.mark.fault(
    "a rank of a training on a stream is killed; with `--restarts`",
    "resumes with the next batch; each sample of the epoch is trained once",
    bound="seconds",
    also=("test_a_stream_that_was_ended_anywhere_ends_with_the_same_bits",),
)
@pytest.mark.full
@pytest.mark.every_slurm
def test_a_sharded_training_is_killed_in_its_saves_requeued_and_cut_off(place: Place) -> None:
    """Rank 1 is killed while it writes its shard, rank 0 while it writes the checkpoint; a warning; a node is cut off.

    That node's processes live on. The ranks on the spare read the shards that it has saved.
    """
    undisturbed, job = begin(place), begin(place, "--restarts", "9", "--spare-nodes", "1", FAULTS=FAULTS, PACE_S="0.3")
    job.ranks(2)
    job.wait_for_step(15)
    job.slurm("scancel", "--batch", "--signal=USR1", job.job)
    *_, cut = job.ranks(3)
    job.wait_for_step(30)
    layout = place.slurm.layout
    network.ip("link", "set", layout.link(cut.node), "down")
    try:
        said = job.completed(restarts=1)
    finally:
        network.ip("link", "set", layout.link(cut.node), "up")
        daemons.wait_until_usable(layout, [cut.node], [])
    lost = [(one.words, one.checkpoint) for one in job.failures()]
    assert lost[:2] == [("killed by SIGKILL", f"step-{step:08}.pt") for step in (5, 10)], said
    assert [words for words, _ in lost[2:]] == ["the node does not answer"], said
    assert re.search(r"Stopped after step \d+ \((after )?epoch \d\): rank 0: node1 got USR1. Saved", said), said
    assert len(re.findall("Resuming from", said)) == 4, said
    assert cut.node not in job.nodes()
    undisturbed.completed(restarts=0)
    assert job.metrics() == undisturbed.metrics(), said
    check_files(job)


def begin(place: Place, *options: str, **env: object) -> Job:
    spares = int(bool(options))
    return launch(
        place,
        *options,
        nodes=2 + spares,
        command=SHARDED,
        launcher="fork",
        name="sharded" if options else "undisturbed",
        env={Env.PRELOAD: "torch.distributed.fsdp", **env},
    )


def check_files(run: Run) -> None:
    """Nothing half-written is left, nothing was damaged, and each checkpoint has its pieces files."""
    found = sorted((run.path / File.CHECKPOINTS).iterdir())
    assert {one.suffix for one in found} == {".pt", pieces_file.SUFFIX}
    checkpoints = [one for one in found if one.suffix == ".pt"]
    assert [pieces_file.folder_of(one) for one in checkpoints] == [one for one in found if one.is_dir()]
    for one in checkpoints:
        checkpoint_file.digest(one)
        pieces_file.check_all(one)
