"""The lessons: MNIST on one device, under DDP in plain PyTorch, and with cluster_ddp. One training, one result."""

from __future__ import annotations

import functools
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from idx_writer import idx
from ranks import job_ids, run_ranks, slurm_step

from cluster_ddp.mnist import data

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH_SIZE, TRAINING_IMAGES = 64, 22 * 64
JOB_ID = job_ids()
HANGS_S = 3000.0  # all tests share the cores: ten times what an epoch of MNIST takes alone


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged digits, as many as fill their batches, in MNIST's files."""
    data_dir = tmp_path_factory.mktemp("digits")
    data.raw_folder(data_dir).mkdir(parents=True)
    tensors = [tensor for part in data.load("digits", data_dir) for tensor in part.tensors]
    for idx_file, tensor in zip(data.IDX_FILES, tensors):
        sizes = [min(len(tensor), TRAINING_IMAGES), *tensor.shape[1:]]
        (data.raw_folder(data_dir) / idx_file.name).write_bytes(
            idx(sizes, tensor[: sizes[0]].to(torch.uint8).numpy().tobytes())
        )
    return data_dir


def train(folder: Path, name: str, ranks: int, *arguments: str) -> tuple[float, float]:
    """Run a lesson with one global batch; the loss and the accuracy of the last test."""
    folder.mkdir(exist_ok=True)
    env = {"CLUSTER_DDP_RUN_DIR": str(folder / "run")}
    if name == "mnist_ddp.py":
        environments = [slurm_step(rank, ranks, job_id=JOB_ID + ranks, **env) for rank in range(ranks)]
    elif ranks == 1:
        environments = [env]
    else:
        by_hand = {**env, "WORLD_SIZE": str(ranks), "MASTER_PORT": str(30_000 + JOB_ID % 2000 + ranks)}
        environments = [{**by_hand, "RANK": str(rank)} for rank in range(ranks)]
    words = ("--batch-size", str(BATCH_SIZE // ranks), *arguments)
    ends = run_ranks(functools.partial(run, EXAMPLES / name, words, folder), environments, folder, timeout_s=HANGS_S)
    assert [end.exit_code for end in ends] == [0] * ranks, ends
    assert ["Test set" in end.output for end in ends] == [True] + [False] * (ranks - 1), ends
    said = r"^Test set: Average loss: (.*), Accuracy: .*\((.*)%\)$"
    loss, accuracy = re.findall(said, ends[0].output, re.MULTILINE)[-1]
    return float(loss), float(accuracy)


def run(script: Path, arguments: tuple[str, ...], folder: Path) -> None:
    """In a rank."""
    os.chdir(folder)
    sys.argv = [script.name, *arguments]
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("name", ["mnist_ddp_plain.py", "mnist_ddp.py"])
def test_without_dropout_one_global_batch_is_one_training(name: str, digits: Path, tmp_path: Path) -> None:
    """With a learning rate of 1, Adadelta's first steps make a gradient's last bit the loss's third digit."""
    options = ("--dropout", "0", "--lr", "0.01", "--epochs", "1", "--data-dir", str(digits))
    (loss, accuracy), *others = [train(tmp_path / f"{ranks}", name, ranks, *options) for ranks in (1, 2, 4)]
    assert others == [(pytest.approx(loss, abs=1e-3), pytest.approx(accuracy, abs=0.3))] * 2
    assert accuracy > 40


@pytest.mark.parametrize("name", ["mnist_single.py", "mnist_ddp.py"])
def test_without_mnist_it_is_trained_on_the_packaged_digits(name: str, tmp_path: Path) -> None:
    assert train(tmp_path, name, 1, "--epochs", "2", "--log-interval", "1000")[1] > 80


def test_all_reach_98_percent_of_mnist_after_one_epoch(mnist: Path, tmp_path: Path) -> None:
    sizes = {"mnist_single.py": 1, "mnist_ddp_plain.py": 2, "mnist_ddp.py": 4}
    options = ("--epochs", "1", "--log-interval", "500", "--data-dir", str(mnist))
    reached = [train(tmp_path / name, name, ranks, *options)[1] for name, ranks in sizes.items()]
    assert min(reached) >= 98
    assert max(reached) - min(reached) <= 0.5


def test_the_convnet_learns(mnist: Path, tmp_path: Path) -> None:
    words = ("--epochs", "2", "--data-dir", str(mnist))
    (end,) = run_ranks(
        functools.partial(run, EXAMPLES / "convnet.py", words, tmp_path), [{}], tmp_path, timeout_s=HANGS_S
    )
    assert end.exit_code == 0, end
    assert float(re.findall(r"epoch 2, step 600/600: .* accuracy (\S+)", end.output)[0]) >= 0.95


def test_the_plain_one_imports_nothing_of_ours() -> None:
    assert "cluster_ddp" not in (EXAMPLES / "mnist_ddp_plain.py").read_text()
