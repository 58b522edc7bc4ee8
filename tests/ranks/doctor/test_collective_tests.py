"""The doctor's collectives wait for no import: each rank imports by itself, and some take longer."""

import os
import subprocess
import sys

from slowness import LIMIT_S, scaled

STEP = """
import sys
import types

from cluster_ddp.doctor.step import collective_tests

assert collective_tests.import_torch()[1] is None
import torch
import torch.distributed

torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
before = set(sys.modules)
collective_tests._gradient(torch.device("cpu"), types.SimpleNamespace(world_size=2, rank=0))
print(len(set(sys.modules) - before))
"""


def test_a_step_of_ddp_imports_next_to_nothing() -> None:
    """It took 886 modules, 2 s of a core, while the other ranks waited."""
    env = {**os.environ, "PYTHONPATH": ""}  # without `every_python`, which leaves the tracer out
    done = subprocess.run(
        [sys.executable, "-c", STEP], env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S)
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20, done.stdout
