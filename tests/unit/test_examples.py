"""The examples that no Slurm test runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.mnist.files import IDX_FILES, raw_folder

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[2] / "examples"


def write_small_mnist(data_dir: Path) -> None:
    """96 images to train on and 32 to test, a stripe for each label."""
    raw = raw_folder(data_dir)
    raw.mkdir(parents=True)
    for idx_file, count in zip(IDX_FILES, (96, 96, 32, 32)):
        if "images" in idx_file.name:
            header = (2051, count, 28, 28)
            content = bytes(
                255 * (row // 2 == image % 10) for image in range(count) for row in range(28) for _ in range(28)
            )
        else:
            header, content = (2049, count), bytes(image % 10 for image in range(count))
        (raw / idx_file.name).write_bytes(b"".join(number.to_bytes(4, "big") for number in header) + content)


def test_torchvisions_resnet_is_trained_and_resumed(tmp_path: Path) -> None:
    write_small_mnist(tmp_path / "data")
    command = [sys.executable, str(EXAMPLES / "resnet_mnist.py"), str(tmp_path / "data")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CLUSTER_DDP_RUN_DIR": str(tmp_path / "run")}
    accuracies = []
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        accuracies += re.findall(r"accuracy (\S+)", done.stdout)
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1]
    assert "All 2 epochs are already done" in done.stdout
