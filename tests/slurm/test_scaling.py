"""`cluster-ddp scaling`: killed in the middle and continued; of a script that knows nothing of cluster_ddp."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from slowness import wait_until

pytestmark = pytest.mark.full

SCALING = (sys.executable, "-m", "cluster_ddp.scaling")
KINDS = ("csv", "json", "png", "svg")
FOREIGN = "import os\nfor _ in range(3):\n    print('images/s:', 100 * int(os.environ['WORLD_SIZE']))\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "it's scaling"
    folder.mkdir()
    return folder


def made(folder: Path, pattern: str) -> list[Path]:
    """The run directories, without the links to them."""
    return sorted(path for path in (folder / "scaling" / "runs").glob(pattern) if not path.is_symlink())


def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "scaling" / "results.csv").read_text().splitlines()))


def test_a_study_that_was_killed_measures_what_is_missing(slurm: Cluster, folder: Path) -> None:
    training = ("--dataset", "digits", "--model", "convnet", "--epochs", "2")
    words = ("--gpus", "1,2,4", "--one-at-a-time", *training, "--accept", "node-local-path")
    first = subprocess.Popen([*SCALING, *words], cwd=folder, env=dict(slurm.env), stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    while "gpus1-run1" not in (line := first.stdout.readline()) or "COMPLETED" not in line:
        assert line
    wait_until(lambda: list((folder / "scaling" / "runs").glob("gpus2-run1-*/job.json")))
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    runs = made(folder, "gpus[12]-*")

    done = slurm.run(*SCALING, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "gpus1-run1" not in done.stdout, "it is measured already"
    assert "COMPLETED" in done.stdout
    of_four = made(folder, "gpus4-*")
    assert len(of_four) == 1 and made(folder, "gpus*") == runs + of_four
    one, two, four = rows(folder)
    for row, run in zip((one, two, four), runs + of_four):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        train = [record for record in records if record["kind"] == "train"]
        speeds = [record["samples_per_s"] for record in train]
        assert min(speeds[1:]) <= float(row["samples_per_s"]) <= max(speeds[1:])
        samples = max(record["samples"] for record in train if record["epoch"] == 1)
        gpu_hours = int(row["gpus"]) * samples / float(row["samples_per_s"]) / 3600
        assert float(row["gpu_hours_per_epoch"]) == pytest.approx(gpu_hours)
    assert (one["speedup"], one["efficiency"], two["nodes"], four["nodes"]) == ("1.0", "1.0", "1", "2")
    assert "Recommendation: " in done.stdout
    results = folder / "scaling" / "results"
    assert {path.name for path in results.parent.glob("results.*")} == {f"results.{kind}" for kind in KINDS}
    assert results.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert results.with_suffix(".svg").read_text().count("<path") > 10

    done = slurm.run(*SCALING, "--json", *words, cwd=folder)
    assert (done.returncode, len(json.loads(done.stdout)["rows"])) == (0, 3), done.stderr

    done = slurm.run(*SCALING, *words[:-2], "--epochs", "3", cwd=folder)
    assert done.returncode == 2
    assert (
        "it is the study of another job: --dataset digits --model convnet --epochs 2 --accept node-local-path."
        in done.stderr
    )


def test_a_script_that_knows_nothing_of_us(slurm: Cluster, folder: Path) -> None:
    """Its throughput is what rank 0 prints. One number of GPUs fails, and is missing in the results."""
    script = "import sys\nsys.exit(int(sys.argv[1]) == 32)\n"
    (folder / "foreign.py").write_text(FOREIGN + script)
    words = ("--gpus", "1,2,4", "--global-batch", "128", "--metric", r"images/s: (\d+)", "--repeats", "2")
    done = slurm.run(*SCALING, *words, "--", "python", "foreign.py", "{batch}", cwd=folder)
    assert done.returncode == 1, done.stderr
    assert [row["speedup"] for row in rows(folder)] == ["1.0", "2.0", ""]
    assert [row["runs"] for row in rows(folder)] == ["2", "2", "0"]
    assert done.stdout.count("Not measured: 4 GPUs, run ") == 2
    assert "Recommendation: 2 GPUs (--nodes 1 --gpus-per-node 2): " in done.stdout
    record = json.loads((folder / "scaling" / "results.json").read_text())
    assert len(record["failures"]) == 2


def test_nothing_is_submitted_if_one_number_can_not_run(slurm: Cluster, folder: Path) -> None:
    (folder / "foreign.py").write_text(FOREIGN)
    done = slurm.run(*SCALING, "--gpus", "1,64", "--", "python", "foreign.py", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "A job of 32 nodes with 2 GPUs in the default partition, main:" in done.stderr
    assert not (folder / "scaling").exists()
