"""Memory and the choice of a memory layout; the models are tested in test_model.py."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step

import cluster_ddp
from cluster_ddp.mnist.fast_cpu import fastest

JOB_ID = job_ids()


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


STEPS = """
import os, resource, sys, torch
from cluster_ddp.mnist.fast_cpu import tune_malloc
if sys.argv[1] == "keep": tune_malloc(os.environ)
def step():
    blocks = [torch.ones(12 << 20) for _ in range(2)]  # 48 MiB each: over what malloc keeps by itself
for _ in range(5): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str, **env: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, how],
        env=dict(os.environ) | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's malloc")
def test_what_a_step_frees_the_next_one_gets_without_the_system() -> None:
    plain = page_faults("plain")
    assert plain > 10 * 2 * 20  # 12,288 of 4 KiB for each block, or 24 large ones
    assert page_faults("keep") < plain / 2  # usually none; but a small block may lie in the way of a large one
    assert page_faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > plain / 3  # a setting of the user's own stays
