"""A run that is started three times, in each library's own files: one run, no step twice, no step missing."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from slowness import LIMIT_S, scaled, stays
from tracked import READERS, Values, truth

from cluster_ddp.run.names import GLOBAL_STEP
from cluster_ddp.runtime.run_dir import tracker_thread
from cluster_ddp.runtime.run_dir.metrics import MetricsFile
from cluster_ddp.runtime.run_dir.tracker_thread import Tracking
from cluster_ddp.runtime.run_dir.trackers import MetricPoint, Run, WandB, flat

log = logging.getLogger("cluster_ddp")
NAMES = tuple(READERS)
# As paths of people are.
FOLDER = 'a run\'s "folder" é-7'
# Killed, or failed, before the step that it is told: once trackers have the steps that will be lost.
TRAINING = """
import os, signal, sys, time, torch, cluster_ddp
from cluster_ddp.runtime import process_group
from cluster_ddp.runtime.run_dir import tracker_thread
tracker_thread.EVERY_S = 0.05
start, end, how = int(os.environ["SLURM_RESTART_COUNT"]), int(sys.argv[1]), sys.argv[2]
with cluster_ddp.distributed(cuda=False) as world:
    checkpoint = cluster_ddp.Checkpointer(world, model=torch.nn.Linear(2, 1), every="10steps", keep=10)
    (tracks,) = [one.__self__ for one in process_group.before_leaving if hasattr(one, "__self__")]
    for done in checkpoint.until(60):
        checkpoint._saver.wait()
        if done == end:
            while tracks._read < checkpoint.run_dir.metrics_bytes:
                time.sleep(0.01)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("out of luck")
        world.log("train", loss=1 / (done + 1) + start, epoch=done // 10, name="x", layers=[1, 2])
        if done % 20 == 19:
            world.log("test", accuracy=done / 60 if done < 50 else float("nan"))
        checkpoint.step()
"""


def train(folder: Path, start: int, end: int, how: str) -> subprocess.CompletedProcess[str]:
    (folder / "t.py").write_text(TRAINING)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    env |= {"CLUSTER_DDP_RUN_DIR": str(folder / FOLDER), "CLUSTER_DDP_TRACK": " ".join(NAMES)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NNODES": "1"}
    env |= {"SLURM_RESTART_COUNT": str(start), "SLURM_JOB_NODELIST": "localhost", "SLURM_NODEID": "0"}
    env |= {"SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "1"}
    env |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "x"}
    command = [sys.executable, "t.py", str(end), how]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))


def equal(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    for tag in wanted:
        assert [step for step, _ in found[tag]] == [step for step, _ in wanted[tag]], tag
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in wanted[tag]], nan_ok=True)


@pytest.mark.full
def test_a_run_that_was_killed_and_then_failed_is_one_run_without_double_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / FOLDER
    killed = train(tmp_path, 0, 25, "kill")
    assert killed.returncode == -9, killed.stderr
    assert "failed" not in killed.stderr, killed.stderr
    for name in ("tensorboard", "mlflow"):  # W&B's own process loses what it has not written, if rank 0 is killed
        lost = READERS[name](run_dir)[1]["train/loss"]
        assert lost == [(step, pytest.approx(1 / (step + 1))) for step in range(25)]
    failed = train(tmp_path, 1, 45, "fail")
    assert failed.returncode == 1 and "out of luck" in failed.stderr
    before = {name: read(run_dir) for name, read in READERS.items()}
    for _, values in before.values():  # the steps from 40 on will be lost
        equal(values, truth(run_dir))
        assert [step for step, _ in values["train/loss"]] == list(range(45))
    ended = train(tmp_path, 2, -1, "")
    assert ended.returncode == 0 and "failed" not in ended.stderr, ended.stderr

    wanted = truth(run_dir)
    starts = [0] * 20 + [1] * 20 + [2] * 20
    assert wanted["train/loss"] == [(step, 1 / (step + 1) + start) for step, start in enumerate(starts)]
    assert [step for step, _ in wanted["test/accuracy"]] == [19, 39]  # the third is null, since it is not finite
    for name, read in READERS.items():
        run_id, values = read(run_dir)
        equal(values, wanted)
        assert run_id == before[name][0]
    assert wanted.keys() >= {"train/loss", "train/epoch", "test/accuracy"}
    assert before["mlflow"][0]
    assert READERS["wandb"](run_dir)[0] == (run_dir / "trackers" / "id").read_text().strip()
    assert len(list((run_dir / "trackers" / "tensorboard").iterdir())) == 1
    (upload,) = re.findall(r"To upload to wandb, after the last start: (wandb sync .*)$", ended.stderr, re.MULTILINE)
    command = f"cd {shlex.quote(str(tmp_path))} && {shlex.quote(sys.executable)} -m {upload} --dry-run"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=scaled(LIMIT_S))
    assert done.returncode == 0 and "Would sync 1 run(s)" in done.stderr, done.stdout + done.stderr


@pytest.fixture
def records(tmp_path: Path) -> MetricsFile:
    made = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(3):
        made.append(
            b'{"kind": "train", "time": 1e9, "global_step": %d, "loss": 0.5, "text": "x", "is_it": true}\n' % step
        )
    made.finish(60)
    return made


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What our logger warns of; libraries have their own."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(log, "propagate", False)
    log.addHandler(handler)
    yield said
    log.removeHandler(handler)


def track(names: list[str], run_dir: Path, records: MetricsFile, *, is_restart: bool = False) -> None:
    Tracking(names, run_dir, records, is_restart=is_restart).stop()


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_cant_be_written_is_one_warning(
    name: str, tmp_path: Path, records: MetricsFile, said: list[str]
) -> None:
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / name).touch()  # a file where its folder should be
    others = [other for other in NAMES if other != name]
    track([name, *others], tmp_path, records, is_restart=True)
    (warning,) = said
    assert warning.startswith(f"Tracking with {name} failed: ") and "the training continues" in warning
    for other in others:
        assert READERS[other](tmp_path)[1] == {"train/loss": [(0, 0.5), (1, 0.5), (2, 0.5)]}


def test_where_nothing_can_be_written_there_is_one_warning_for_all(
    tmp_path: Path, records: MetricsFile, said: list[str]
) -> None:
    (tmp_path / "trackers").touch()
    track([*NAMES], tmp_path, records, is_restart=True)
    (warning,) = said
    assert "The training continues" in warning


def test_an_unknown_name_and_a_missing_library_are_one_warning_each(
    tmp_path: Path, records: MetricsFile, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    track(["tensorbord", "wandb"], tmp_path, records)
    unknown, missing = said
    assert "There are: tensorboard, wandb, mlflow. Did you mean tensorboard?" in unknown
    assert missing.startswith("Tracking with wandb failed: ModuleNotFoundError")


@pytest.mark.full
def test_names_that_a_library_refuses_are_changed_for_it(tmp_path: Path, said: list[str]) -> None:
    """MLflow takes no name with an @, and has a file for each: no folder may have its name, and none is too long."""
    changed = {"acc@1": "acc_1", "acc_1": "acc_1_", "loss/aux": "loss.aux", "../x": "...x", "..": "_", "a//b": "a..b"}
    changed |= {"": "__", "x" * 300: "x" * 120, "α%\t": "α__", "loss": "loss", "f1 (macro)": "f1 _macro_"}
    made = MetricsFile(tmp_path / "metrics.jsonl")
    made.append(json.dumps({"kind": "train", "global_step": 3, **dict.fromkeys(changed, 0.5)}).encode() + b"\n")
    made.finish(60)
    (tmp_path / "run.json").write_text(json.dumps({"config": {"lr@0": 1, "lr@": {"0": 2}}}))
    track([*NAMES], tmp_path, made)
    assert said == []
    for name, read in READERS.items():
        wanted = changed.values() if name == "mlflow" else changed.keys()
        assert read(tmp_path)[1] == {f"train/{one}": [(3, 0.5)] for one in wanted}, name


def test_a_new_training_in_the_same_folder_is_a_run_of_its_own(tmp_path: Path, records: MetricsFile) -> None:
    track(["tensorboard"], tmp_path, records)
    first = (tmp_path / "trackers" / "id").read_text()
    track(["tensorboard"], tmp_path, records, is_restart=True)
    assert (tmp_path / "trackers" / "id").read_text() == first
    track(["tensorboard"], tmp_path, records)
    assert (tmp_path / "trackers" / "id").read_text() != first
    assert (tmp_path / "trackers.1" / "id").read_text() == first


@pytest.mark.parametrize(
    ("folder", "project"),
    [
        ("fit-20261126-204432-7f3a9c", "fit"),
        ("fit-2-20261126-204432-123456/3", "fit-2"),
        ("fit-12_3", "fit"),
        ("training-20261126-204432", "training"),
    ],
)
def test_runs_of_one_name_are_in_one_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: MetricsFile, folder: str, project: str
) -> None:
    made = Mock()
    monkeypatch.setitem(tracker_thread.BACKENDS, "wandb", lambda: made)
    (tmp_path / folder).mkdir(parents=True)
    track(["wandb"], tmp_path / folder, records)
    begun = made.begin.call_args[0][0]
    assert (begun.project, begun.name) == (project, folder.replace("/", "_"))


def test_nothing_is_touched_before_it_is_known_which_records_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_thread, "EVERY_S", 0.01)
    (tmp_path / "trackers").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\n')
    waiting = Tracking(["tensorboard"], tmp_path, MetricsFile(tmp_path / "metrics.jsonl"), is_restart=False)
    stays(lambda: list((tmp_path / "trackers").iterdir()) == [], 0.1)
    waiting.stop()
    assert list((tmp_path / "trackers").iterdir()) == [] and not (tmp_path / "trackers.1").exists()


def test_a_tracker_that_hangs_holds_no_training(
    tmp_path: Path, records: MetricsFile, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_thread, "PATIENCE_S", 0.1)
    monkeypatch.setattr(tracker_thread.Tracking, "_feed", lambda self: time.sleep(1))
    track(["tensorboard"], tmp_path, records)
    (warning,) = said
    assert warning.startswith("Trackers did not end within")


@pytest.mark.quick
def test_a_point_has_the_numbers_of_a_record() -> None:
    record = {"kind": "test", "time": 1.5, "global_step": 9, "accuracy": 0.5, "epoch": 1, "ok": True, "at": "x"}
    assert MetricPoint.of(record, 3) == MetricPoint(
        step=9, time_s=1.5, values={"test/accuracy": 0.5, "test/epoch": 1.0}
    )
    assert MetricPoint.of({"kind": "mine", "n": 1}, 3) == MetricPoint(step=3, time_s=0.0, values={"mine/n": 1.0})
    assert dict(flat({"a": {"b": 1, "c": None}, "d": [1, 2]})) == {"a/b": 1, "d": "[1, 2]"}


def test_wandb_draws_over_the_step_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own step counts what is logged: a chart over it has other x-axes after a restart."""
    library = Mock()
    monkeypatch.setitem(sys.modules, "wandb", library)
    tracker = WandB()
    tracker.begin(Run(name="fit-12", project="fit", folder=tmp_path, id="a1", config={}))
    tracker.log([MetricPoint(values={"loss": 0.5}, step=7, time_s=3.0)])
    library.init.return_value.define_metric.assert_called_once_with("*", step_metric=GLOBAL_STEP)
    library.init.return_value.log.assert_called_once_with({"loss": 0.5, GLOBAL_STEP: 7, "_timestamp": 3.0})
