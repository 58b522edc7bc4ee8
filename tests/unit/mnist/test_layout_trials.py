from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from ranks import run_ranks, slurm_step

import cluster_ddp
from cluster_ddp.mnist.layout_trials import fastest

JOB_ID = 42_000 + os.getpid() % 2000


def tune_on_two_ranks() -> None:
    """Rank 0 finds one way faster, rank 1, much slower at that, the other."""
    with cluster_ddp.distributed(cuda=False) as world:
        before = torch.get_rng_state()
        pauses = {"a": (0.01, 0.2), "b": (0.03, 0.02)}

        def way(name: str) -> None:
            torch.rand(5)
            time.sleep(pauses[name][world.rank])

        name, seconds = fastest(world, {"a": lambda: way("a"), "b": lambda: way("b")})
        assert torch.equal(torch.get_rng_state(), before)
        assert seconds["a"] >= 0.2 and seconds["b"] >= 0.03
        assert world.gather((name, seconds)) == [(name, seconds)] * 2
        print("chosen:", name)


def test_all_ranks_go_by_the_slowest(tmp_path: Path) -> None:
    ends = run_ranks(tune_on_two_ranks, [slurm_step(rank, 2, job_id=JOB_ID) for rank in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert all("chosen: b" in end.output for end in ends)
