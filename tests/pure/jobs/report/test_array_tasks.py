"""The tasks of an array: one table, the best first; and the best one in a line, at the end of `submit --watch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from made_runs import make_run, write_lines

from cluster_ddp.cli import report as verb
from cluster_ddp.jobs.report import array_tasks, page
from cluster_ddp.jobs.report.summary import Report, report
from cluster_ddp.jobs.report.training_stats import compiled
from cluster_ddp.jobs.status import RunStatus

SIZE = "  Size: each 2 nodes x 2 GPUs, 4 ranks"


def task(
    folder: Path,
    number: int,
    values: Mapping[str, str],
    *records: Mapping[str, object],
    printed: str = "",
    **more: object,
) -> Report:
    run_dir = make_run(folder / f"fit-20/{number}", job=f"20_{number}", name="fit", values=values, epochs=1)
    write_lines(run_dir / "metrics.jsonl", list(records))
    (run_dir / "task-0.log").write_text(printed)
    fields = {"state": "COMPLETED", "elapsed": f"00:0{number}:00", **more}
    status = RunStatus(job=f"20_{number}", name="fit", run_dir=run_dir, values=values, **fields)  # type: ignore[arg-type]
    return report(status, metric=compiled(r"bleu (?P<bleu>\S+)"))


def of_test(accuracy: float | None, **more: object) -> dict[str, object]:
    return {"kind": "test", "time": 1.0, "accuracy": accuracy, **more}


def lines(*runs: Report) -> list[str]:
    return array_tasks.as_text(runs).splitlines()


def told(runs: Sequence[Report]) -> str:
    return array_tasks.best_line([one.status.run_dir or Path() for one in runs])


def test_the_best_task_comes_first_with_the_options_that_differ(tmp_path: Path) -> None:
    grid = [{"seed": "1", "lr": lr, "model": "vit"} for lr in ("0.01", "0.1", "1.0")]
    assert lines(
        task(tmp_path, 0, grid[0], of_test(0.9, loss=0.25), epoch=3, samples_per_s=1234.4),
        task(tmp_path, 1, grid[1], of_test(0.982, loss=0.5), epoch=3, samples_per_s=99.0),
        task(tmp_path, 2, grid[2], of_test(None), state="FAILED", failure="rank 1 on node2: NaN", elapsed=None),
    ) == [
        "fit, array 20: 2 COMPLETED, 1 FAILED",
        f"  Run directories: {tmp_path}/fit-20/0 … 2",
        SIZE,
        "",
        "TASK  lr    STATE      EPOCH  TEST ACCURACY  TEST LOSS  SAMPLES/S  ELAPSED",
        "20_1  0.1   COMPLETED  3      98.20 %        0.5        99         00:01:00  best",
        "20_0  0.01  COMPLETED  3      90.00 %        0.25       1,234      00:00:00",
        "20_2  1.0   FAILED     -      -              -          -          -",
        "",
        "Task 20_2 failed first: rank 1 on node2: NaN",
        f"More of one task: cluster-ddp report {tmp_path}/fit-20/1",
    ]


def test_a_smaller_loss_is_better_where_no_task_has_an_accuracy(tmp_path: Path) -> None:
    losses = [[{"kind": "train", "loss": loss}] for loss in (0.5, 0.25, 0.75)]
    runs = [task(tmp_path, at, {"lr": f"0.{at}"}, *records) for at, records in enumerate(losses)]
    table = lines(*runs)[4:8]
    assert table[0] == "TASK  lr   STATE      TRAIN LOSS  ELAPSED"
    assert [row.split()[0] for row in table[1:]] == ["20_1", "20_0", "20_2"]
    assert [row.endswith("best") for row in table[1:]] == [True, False, False]


def test_tasks_that_log_nothing_stay_in_their_order_and_none_is_best(tmp_path: Path) -> None:
    table = lines(*(task(tmp_path, at, {}, printed=f"bleu 1\nbleu {9 - at}\n") for at in range(2)))
    assert table[4:] == [
        "TASK  STATE      bleu  ELAPSED",
        "20_0  COMPLETED  9     00:00:00",
        "20_1  COMPLETED  8     00:01:00",
        "",
        'Not ranked: no task has logged an accuracy or a loss: world.log("test", accuracy=…)',
        f"More of one task: cluster-ddp report {tmp_path}/fit-20/0",
    ]


def test_one_result_is_not_the_best_of_several(tmp_path: Path) -> None:
    runs = [task(tmp_path, 0, {"lr": "1"}), task(tmp_path, 1, {"lr": "2"}, of_test(0.5))]
    assert [row.split()[0] for row in lines(*runs)[5:7]] == ["20_1", "20_0"]
    assert "best" not in array_tasks.as_text(runs) and "Not ranked" not in array_tasks.as_text(runs)
    assert told(runs) == ""


def test_tasks_without_a_run_directory_are_a_table_of_their_states() -> None:
    runs = [report(RunStatus(job=f"20_{at}", name="-", state="PENDING")) for at in range(2)]
    assert lines(*runs)[:5] == ["-, array 20: 2 PENDING", "", "TASK  STATE", "20_0  PENDING", "20_1  PENDING"]


def test_nobodys_text_moves_the_cursor(tmp_path: Path) -> None:
    runs = [task(tmp_path, at, {"lr": f"\x1b[2J{at}"}, of_test(0.5), failure="\x1b[A") for at in range(2)]
    assert "\x1b" not in array_tasks.as_text(runs) + told(runs)


def test_the_best_task_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's mine"
    runs = [
        task(folder, at, {"lr": f"0.{at}", "model": "vit"}, of_test(accuracy))
        for at, accuracy in enumerate((0.5, 0.75))
    ]
    monkeypatch.chdir(tmp_path)
    whole = "'it'\"'\"'s mine/fit-20'"
    assert told(runs) == f"Best: task 20_1 (lr=0.1): test accuracy 75.00 %. All tasks: cluster-ddp report {whole}"


def test_the_page_has_the_same_table(tmp_path: Path) -> None:
    runs = [task(tmp_path, at, {}, of_test(0.5 + at / 10), epoch=7) for at in range(2)]
    table = page.page(runs).partition("<thead>")[2].partition("</tbody>")[0]
    assert "Test accuracy</th>" in table and table.count(">7</td>") == 2
    assert table.index("20_1") < table.index(">best</td>") < table.index("20_0")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("20", ["array 20"]),
        ("20_1", ["job 20_1"]),
        ("20_0 20_1", ["job 20_0", "job 20_1"]),
        ("20 20_1", ["array 20", "job 20_1"]),
        ("fit-20/1", ["job 20_1"]),
        ("12 20", ["job 12", "array 20"]),
    ],
)
def test_an_array_is_a_table_and_a_task_is_a_report(
    words: str, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for at in range(2):
        task(tmp_path, at, {"lr": f"0.{at}"}, of_test(0.5))
    make_run(tmp_path / "resnet-12", epochs=1)
    assert verb.main(["--runs-dir", ".", *words.split()]) == 0
    heads = [line.partition(", ")[2].partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert [head for head in heads if head.startswith(("job ", "array "))] == shown
