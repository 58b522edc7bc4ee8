from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import os, resource, sys, torch
from cluster_ddp.runtime.device.malloc import tune_malloc
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's malloc")
def test_what_a_step_frees_the_next_one_gets_without_the_system() -> None:
    plain = page_faults("plain")
    assert plain > 10 * 2 * 20  # 12,288 of 4 KiB for each block, or 24 large ones
    assert page_faults("keep") < plain / 2  # usually none; but a small block may lie in the way of a large one
    assert page_faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > plain / 3  # a setting of the user's own stays
