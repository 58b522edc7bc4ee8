"""`cluster-ddp scaling` on a cluster that takes every job, with runs that are measured already."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.scaling import __main__ as verb

__all__ = ["fake_slurm"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> Path:
    """A working directory, on a cluster whose nodes have four GPUs."""
    path = tmp_path / "it's a folder"
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (path / "t.py").touch()
    fake_slurm.command("sinfo", "echo 'main*|up|idle|8|16|64000|infinite|gpu:4'")
    return path


def measured(folder: Path, *words: str, **figures: list[float | None]) -> list[str]:
    """Write what each number of GPUs is measured to have: first of the study, then the words of its command line."""
    (folder / "scaling").mkdir()
    runs = [{name: values[at] for name, values in figures.items()} for at in range(3)]
    known = {f"gpus{1 << at}-run1": {"samples_per_s": None, "seconds": None, **one} for at, one in enumerate(runs)}
    (folder / "scaling" / "measured.json").write_text(json.dumps(known))
    return ["--gpus", "1,2,4", *words, "--", "python", "t.py"]


def column(folder: Path, name: str) -> list[str]:
    return [row[name] for row in csv.DictReader((folder / "scaling" / "results.csv").read_text().splitlines())]


@pytest.mark.parametrize(
    ("words", "efficiencies"),
    [([], ["1.0", "1.0", "1.0"]), (["--weak"], ["1.0", "2.0", "4.0"])],
)
def test_times_alone_are_of_the_same_work_unless_the_study_is_weak(
    folder: Path, words: list[str], efficiencies: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb.main(measured(folder, *words, seconds=[96.0, 48.0, 24.0])) == 0
    assert column(folder, "efficiency") == efficiencies
    out = capsys.readouterr().out
    assert "samples/s" not in out


@pytest.mark.parametrize(
    ("rates", "speedups", "words"),
    [
        ([100.0, 190.0, None], ["1.0", "1.9", ""], "Recommendation: 2 GPUs"),
        ([None, 190.0, 380.0], ["", "2.0", "4.0"], "Recommendation: 4 GPUs"),
    ],
)
def test_a_missing_throughput_is_missing_although_the_times_are_known(
    folder: Path, rates: list[float | None], speedups: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb.main(measured(folder, samples_per_s=rates, seconds=[60.0, 60.0, 60.0])) == 0
    assert column(folder, "speedup") == speedups
    out = capsys.readouterr().out
    assert words in out


def test_numbers_of_gpus_that_no_node_has(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.main(["--gpus", "8,16", "--dry-run", "--", "python", "t.py"]) == 0
    assert capsys.readouterr().out.startswith("gpus8-run1: 2 x 4 GPUs\ngpus16-run1: 4 x 4 GPUs\n")


def test_its_jobs_have_no_spare_nodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cluster.toml").write_text("restarts = 2\nspare_nodes = 1\n")
    words = ["--gpus", "8", "--dry-run", "--", "python", "t.py"]
    assert verb.main(words) == 0
    out = capsys.readouterr().out
    assert "\n#SBATCH --nodes=2\n" in out and "--restarts=2" in out and "--spare-nodes=" not in out
    with pytest.raises(SystemExit):
        verb.main(["--spare-nodes", "1", *words])
    assert "A scaling study with --spare-nodes:\n  the study chooses it" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--show-config", "--show-template"])
def test_options_that_plan_no_job_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        verb.main(["--gpus", "1", option, "--", "python", "t.py"])
    assert f"A scaling study with {option}:" in capsys.readouterr().err
