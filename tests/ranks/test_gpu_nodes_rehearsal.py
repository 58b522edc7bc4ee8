"""As `test_gpu_rehearsal.py`, the tests of several nodes: a file of its own, so that both run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_rehearsal import each_test_can_run


@pytest.mark.full
def test_each_test_of_several_nodes_can_run(tmp_path: Path) -> None:
    each_test_can_run("gpu_nodes", tmp_path)
