"""The reference workload, on the embedded digits."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import Outcome, job_ids, run_ranks, slurm_step
from slowness import LIMIT_S, scaled

from cluster_ddp.errors import SpecError
from cluster_ddp.mnist import training
from cluster_ddp.mnist.model import Net
from cluster_ddp.mnist.train_config import TrainConfig
from cluster_ddp.train import main

JOB_ID = job_ids()


def train(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        [sys.executable, "-m", "cluster_ddp.train", *arguments],
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=scaled(LIMIT_S),
    )


def forked(*arguments: str, folder: Path) -> Outcome:
    """The same in a process that has torch already, which takes a third of the time."""
    (folder / "logs").mkdir(exist_ok=True)
    (end,) = run_ranks(functools.partial(_main_in, folder, arguments), [{}], folder / "logs")
    return end


def _main_in(folder: Path, arguments: tuple[str, ...]) -> None:
    os.chdir(folder)
    sys.exit(main(arguments))


def records(run_dir: Path) -> list[dict]:
    """Without those of the steps' times: a slow run has more of them."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] != "steps"]


@pytest.mark.full
def test_one_process_learns_and_leaves_its_record(tmp_path: Path) -> None:
    done = train(*["--dataset", "digits", "--epochs", "3", "--run-dir", "out/here", "--save-model"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "out" / "here"
    tests = [record for record in records(run_dir) if record["kind"] == "test"]
    assert [record["epoch"] for record in tests] == [1, 2, 3]
    assert tests[-1]["accuracy"] > 0.9
    assert all(record["samples"] == 360 for record in tests)
    trains = [record for record in records(run_dir) if record["kind"] == "train"]
    assert trains[-1]["samples"] == 1437
    assert trains[0]["loss"] == pytest.approx(2.3, abs=0.4)  # -ln(1/10)
    assert [r["lr"] for r in trains if r["step"] == 0] == pytest.approx([1.0, 0.7, 0.49])
    assert "Train Epoch: 1 [64/1437 (4%)]" in done.stdout
    assert f"({100 * tests[-1]['accuracy']:.2f}%)" in done.stdout
    description = json.loads((run_dir / "run.json").read_text())
    assert description["config"]["epochs"] == 3
    assert description["topology"]["launcher"] == "single"
    assert description["versions"]["torch"] == torch.__version__
    Net().load_state_dict(torch.load(run_dir / "mnist_cnn.pt", weights_only=True))
    names = [".lock", "checkpoints", "metrics.jsonl", "mnist_cnn.pt", "run.json", "starts.jsonl", "usage-0.jsonl"]
    assert sorted(path.name for path in run_dir.iterdir()) == names


@pytest.mark.full
def test_the_fast_recipe_learns(tmp_path: Path) -> None:
    options = ["--dataset", "digits", "--recipe", "fast", "--batch-size", "32", "--epochs", "5", "--run-dir", "x"]
    done = forked(*options, folder=tmp_path)
    assert done.exit_code == 0, done.output
    assert [record for record in records(tmp_path / "x") if record["kind"] == "test"][-1]["accuracy"] > 0.9
    config = json.loads((tmp_path / "x" / "run.json").read_text())["config"]
    assert (config["epochs"], config["batch_size"], config["lr"], config["amp"]) == (5, 32, 0.006, "bf16")


@pytest.mark.full
@pytest.mark.parametrize("options", [["--recipe", "fast"], ["--amp", "bf16"]])
def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path, options: list[str]) -> None:
    common = ["--dataset", "digits", "--run-dir", "x", "--batch-size", "300", "--epochs", "1"]
    assert forked(*common, folder=tmp_path).exit_code == 0
    done = forked(*common, *options, folder=tmp_path)
    assert done.exit_code == 2
    assert f"its {options[0].removeprefix('--')} is" in done.output


def train_digits() -> None:
    training.run(
        TrainConfig(
            dataset="digits",
            epochs=2,
            batch_size=int(os.environ["BATCH"]),
            run_dir=Path(os.environ["RUN_DIR"]),
            test_batch_size=50,
        )
    )


def run_with(world_size: int, folder: Path, name: str) -> list[dict]:
    env = {"BATCH": str(60 // world_size), "RUN_DIR": str(folder / name)}
    environments = [slurm_step(rank, world_size, job_id=JOB_ID + world_size, **env) for rank in range(world_size)]
    (folder / "logs").mkdir(exist_ok=True)
    for end in run_ranks(train_digits, environments, folder / "logs"):
        assert end.exit_code == 0, end.output
    return records(folder / name)


@pytest.mark.full
def test_three_ranks_do_what_one_does(tmp_path: Path) -> None:
    """Same global batch: every test sample counted once, same number of steps, and much the same losses."""
    alone, shared = run_with(1, tmp_path, "one"), run_with(3, tmp_path, "three")
    for one, three in zip(alone, shared):
        assert one["kind"] == three["kind"]
        if one["kind"] == "test":
            assert (one["samples"], three["samples"]) == (360, 360)
            assert three["accuracy"] == pytest.approx(one["accuracy"], abs=0.15)
        elif one["kind"] == "train":
            assert (one["step"], one["samples"]) == (three["step"], three["samples"])
    # The first batch is the same samples through the same weights; only the dropout differs.
    assert shared[0]["loss"] == pytest.approx(alone[0]["loss"], abs=0.2)


@pytest.mark.full
def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        options = f"--dataset digits --dry-run --seed {seed} --run-dir {name}"
        assert forked(*options.split(), folder=tmp_path).exit_code == 0
    digests = {name: records(tmp_path / name)[-1]["weights_sha256"] for name in "abc"}
    assert digests["a"] == digests["b"] != digests["c"]


READS = """
from pathlib import Path
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from cluster_ddp.mnist.train_config import TrainConfig
from cluster_ddp.mnist.training import Training
from cluster_ddp.runtime.distributed import distributed

class Reads(TorchDispatchMode):
    count = 0
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(options or {}))

with distributed(cuda=False) as world:
    for folder in ("cpu", "gpu"):
        config = TrainConfig(dataset="digits", run_dir=Path(folder), log_interval=1000)
        training = Training(config, world)
        training.finite._at_once = folder == "cpu"
        for epoch in training.checkpoint.epochs(1):
            with Reads() as reads:
                training.train(1)
        print("counted", len(training.train_shard), reads.count)
"""


@pytest.mark.full
def test_a_gpu_is_not_waited_for_between_two_lines_of_the_log(tmp_path: Path) -> None:
    """Reading a number of a tensor is what waits for a GPU; here it is counted on the CPU, as if it were one."""
    env, words = dict(os.environ) | {"OMP_NUM_THREADS": "1"}, [sys.executable, "-c", READS]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    (steps, cpu), (_, gpu) = (map(int, line.split()[1:]) for line in done.stdout.splitlines() if "counted" in line)
    assert cpu >= steps == 23
    assert gpu < 10  # for two lines of the log


@pytest.mark.quick
def test_dry_run_takes_one_step(tmp_path: Path) -> None:
    assert forked(*["--dataset", "digits", "--dry-run", "--run-dir", "x"], folder=tmp_path).exit_code == 0
    assert [record["kind"] for record in records(tmp_path / "x")] == ["train", "test", "done"]


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        ("--epochs 0", "epochs must be a whole number of 1 or more"),
        ("--batch-size -1", "batch_size must be"),
        ("--lr 0", "lr must be"),
        ("--gamma 2", "gamma must be"),
        ("--seed -1", "seed must be"),
        ("--dry-run --checkpoint-every 3h", "a whole number of epochs, steps or minutes"),
        ("--dry-run --stop-signals USR3", "no such signal"),
        ("--sync-batchnorm", "the recipe's CNN has no batch normalisation"),
    ],
)
def test_bad_options_are_refused_at_once(tmp_path: Path, arguments: str, mentioned: str) -> None:
    done = train(*arguments.split(), folder=tmp_path)
    assert done.returncode == 2
    assert mentioned in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_option_gets_the_nearest(tmp_path: Path) -> None:
    done = train("--batchsize", "3", folder=tmp_path)
    assert done.returncode == 2
    assert "--batch-size" in done.stderr


def test_missing_data_is_a_short_block(tmp_path: Path) -> None:
    done = train("--data-dir", "no data here", folder=tmp_path)
    assert done.returncode == 2
    assert 'torchvision.datasets.MNIST("no data here", download=True)' in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_dir_that_cannot_be_written_is_a_short_block(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = train("--dataset", "digits", "--run-dir", "taken/x", folder=tmp_path)
    assert done.returncode == 2
    assert "Writing to the run directory taken/x" in done.stderr
    assert "Traceback" not in done.stderr


def test_config_is_checked_in_python_too() -> None:
    with pytest.raises(SpecError, match="rendezvous_timeout_s must be"):
        TrainConfig(rendezvous_timeout_s=0)
