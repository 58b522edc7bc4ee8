"""The page of a report: its numbers are those of the records, it needs no network, and nobody's text is run."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_runs import BEGAN_S, make_run, write_lines
from slowness import LIMIT_S, scaled

from cluster_ddp.cli import report as verb
from cluster_ddp.jobs.report import page, time_series
from cluster_ddp.jobs.report.summary import report
from cluster_ddp.jobs.status import run_statuses
from cluster_ddp.run.files import json_lines

SCREENSHOT = Path(__file__).parents[4] / "scripts" / "screenshot_report.py"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def made(*run_dirs: Path) -> str:
    return page.page([report(status) for status in run_statuses(run_dirs[0].parent, list(map(str, run_dirs)))])


def data(text: str) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def charts(text: str) -> dict[str, dict[str, list[Any]]]:
    """Title of each chart -> label of each curve -> points."""
    return {one["title"]: {curve["label"]: curve["points"] for curve in one["curves"]} for one in data(text)["charts"]}


def test_each_number_is_that_of_the_records(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "resnet-12", epochs=2)
    text, records = made(run_dir), json_lines(run_dir / "metrics.jsonl")
    found = charts(text)
    train = [one for one in records if one["kind"] == "train"]
    epochs = [one["epoch"] - 1 + one["samples"] / 30000 for one in train]
    assert [y for _, y in found["Loss"]["train"]] == pytest.approx([one["loss"] for one in train], rel=1e-5)
    assert [x for x, _ in found["Loss"]["train"]] == pytest.approx(epochs, abs=1e-4)
    tests = [one for one in records if one["kind"] == "test"]
    assert found["Accuracy"]["Accuracy"] == [[one["epoch"], pytest.approx(100 * one["accuracy"])] for one in tests]
    steps = [one for one in records if one["kind"] == "steps"]
    assert [y for _, y in found["Step"]["Step"]] == pytest.approx([1000 * one["step_s"] for one in steps], rel=1e-5)
    assert found["Step"]["Step"][0][0] == 0 and found["Step"]["Step"][-1][0] == steps[-1]["time"] - steps[0]["time"]
    assert set(found["GPUs busy"]) == set(found["CPUs busy"]) == {"gpu-1", "gpu-2"}
    use = json_lines(run_dir / "usage-1.jsonl")
    assert [y for _, y in found["CPUs busy"]["gpu-2"]] == pytest.approx([100 * one["cpu"] for one in use], rel=1e-5)
    (gpus,) = (one for one in data(text)["charts"] if one["title"] == "GPUs busy")
    most = [100 * max(gpu["utilization"] for gpu in one["gpus"]) for one in use]
    assert [y for _, y in gpus["curves"][1]["most"]] == pytest.approx(most, rel=1e-5)
    received = [one["received_per_s"] / (1 << 20) for one in use]
    assert [y for _, y in found["Network, received"]["gpu-2"]] == pytest.approx(received, rel=1e-5)
    assert "57.2 MiB/s in, 19.1 MiB/s out" in text and " °C at most" in text
    assert f"{100 * tests[-1]['accuracy']:.2f} %" in text and f"{steps[-1]['samples_per_s']:,.0f}" in text


def test_two_restarts_are_shown_with_cause_and_what_is_done_again(tmp_path: Path) -> None:
    text = made(make_run(tmp_path / "resnet-12", epochs=3, restarts=True))
    assert "From step 3000 on 4 ranks. The start before: Stopped in time: gpu-1 got USR1. Nothing was lost." in text
    assert "it was killed, or its node was lost. <b>130 s done again.</b>" in text
    assert "Starts: 0:02:10 of training done again" in text
    assert re.findall(r'<rect class="([\w-]+)"', text) == [
        *("training", "waiting", "training", "done-again", "waiting", "training")
    ]
    assert data(text)["starts"] == [990.0, 1990.0]  # after the first record
    assert [x for x, y in charts(text)["Step"]["Step"] if y is None] == [989.999, 1989.999]  # gaps


def test_failures_are_drawn_with_what_they_cost(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "resnet-12", epochs=3, restarts=True)
    spec = json.loads((run_dir / "spec.json").read_text())
    spec["spec"] |= {"spare_nodes": 1, "restarts": 3}
    (run_dir / "spec.json").write_text(json.dumps(spec))
    failed = {"node": "gpu-1", "rank": 0, "words": "killed by SIGKILL", "lost_s": 70}
    end = {"event": "end", "job": "12", "state": "FAILED", "status": 137, "then": "restart", "failed": failed}
    ends = [{**end, "start": start, "time": BEGAN_S + at} for start, at in enumerate((600, 99_999))]
    write_lines(run_dir / "job.jsonl", ends)
    text = made(run_dir)
    words = "Rank 0 on gpu-1: killed by SIGKILL. Restarted in the allocation. Lost: 70 s."
    assert "<h3>Failures: 0:02:20 of training lost</h3>" in text and text.count(f"{words}</li>") == 2
    marks = re.findall(rf'<rect class="failed" x="([\d.]+)" width="0.4" y="0" height="6"><title>{words}</title>', text)
    assert list(map(float, marks)) == [pytest.approx(100 * 600 / 2600 - 0.2), pytest.approx(99.8)]
    assert "<dt>Started again</dt><dd>2 restarts</dd>" in text and "<dt>Spare</dt><dd>1 of 3 nodes</dd>" in text


def test_a_run_that_notes_no_starts_has_a_line_where_it_was_restarted(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "resnet-12", epochs=1)
    (run_dir / "starts.jsonl").unlink()
    end = {"event": "end", "time": BEGAN_S + 100, "job": "12", "state": "FAILED", "status": 1, "failed": {}}
    ends = [{**end, "start": start, "then": then} for start, then in enumerate(("restart", "end"))]
    write_lines(run_dir / "job.jsonl", ends)
    assert data(made(run_dir))["starts"] == [90.0]  # after the first record


@pytest.mark.parametrize("runs", [1, 2])
def test_no_line_crosses_a_pause(tmp_path: Path, runs: int) -> None:
    """A node is sampled from the job's start on, a minute before its training starts: once it has imported, say."""
    folders = [
        make_run(tmp_path / f"r-{at}", job=f"{at}", epochs=3, restarts=True, seed=at) for at in range(1, 1 + runs)
    ]
    for folder in folders:
        starts = json_lines(folder / "starts.jsonl")
        later = [{**one, "time": one["time"] + 60} if one.get("restart") else one for one in starts]
        write_lines(folder / "starts.jsonl", later)
    text = made(*folders)
    for title in ("CPUs busy", "Memory", "GPUs busy", "GPU memory", "Network, received", "Network, sent"):
        for points in charts(text)[title].values():
            apart = [
                after[0] - before[0]
                for before, after in itertools.pairwise(points)
                if None not in (before[1], after[1])
            ]
            assert max(apart) <= 20, title
    if runs == 1:
        assert re.findall(r"<title>(waiting: .*?)</title>", text) == ["waiting: 0:07:40"] * 2


def test_a_chart_without_a_value_is_left_out(tmp_path: Path) -> None:
    """Such as of a loss that never was finite, or of a network that one node does not use."""
    run_dir = make_run(tmp_path / "x-12", epochs=1)
    records = [{**one, "loss": None, "step_s": math.nan} for one in json_lines(run_dir / "metrics.jsonl")]
    write_lines(run_dir / "metrics.jsonl", [{"kind": "train", "time": BEGAN_S, "loss": math.nan}, *records])
    for path in run_dir.glob("usage-*"):
        write_lines(path, [{**one, "sent_per_s": 0, "cpu": 0.0} for one in json_lines(path)])
    found = charts(made(run_dir))
    assert not {"Loss", "Step", "Network, sent"} & found.keys()
    assert found.keys() >= {"Accuracy", "Throughput", "CPUs busy", "Network, received"}  # idle CPUs are a finding


def test_an_arrays_tasks_are_sorted_by_their_result(tmp_path: Path) -> None:
    rates = {"0.01": 0.1, "0.1": 1.0, "0.03": 0.3}
    runs = [
        make_run(tmp_path / f"s-20_{at}", job=f"20_{at}", name="s", values={"lr": lr}, rate=rate, epochs=2, seed=at)
        for at, (lr, rate) in enumerate(rates.items())
    ]
    (runs[2] / "metrics.jsonl").write_text('{"kind": "train", "time": 1, "epoch": 1, "samples": 5, "loss": NaN}\n')
    text = made(*runs)
    table = text.partition("<tbody>")[2].partition("</tbody>")[0]
    assert re.findall(r"<td>(20_\d)</td><td>([\d.]+)</td>", table) == [
        ("20_1", "0.1"),
        ("20_0", "0.01"),
        ("20_2", "0.03"),
    ]
    assert table.count("%</td>") == 2  # what is missing is missing
    lines = re.findall(r"<title>(lr=.*?)</title></polyline>", text)
    assert [line.partition(":")[0] for line in lines] == ["lr=0.01", "lr=0.1"]  # the best on top
    assert set(charts(text)["Accuracy"]) == {"lr=0.01", "lr=0.1"}


def test_tasks_are_ranked_by_one_kind_of_loss(tmp_path: Path) -> None:
    """The first has been tested since; of the second, the newest loss is a better one, but of training."""
    runs = []
    for at, losses in enumerate(([("test", 0.5)], [("test", 0.7), ("train", 0.1)], [("train", 0.01)])):
        runs.append(make_run(tmp_path / f"s-20_{at}", job=f"20_{at}", values={"lr": f"0.{at}"}, epochs=1))
        write_lines(runs[-1] / "metrics.jsonl", [{"kind": kind, "time": 1.0, "loss": loss} for kind, loss in losses])
    table = made(*runs).partition("<thead>")[2].partition("</tbody>")[0]
    assert ">Test loss</th>" in table
    assert re.findall(r"<td>(20_\d)</td>", table) == ["20_0", "20_1", "20_2"]
    assert re.findall(r'<td class="number">(0\.\d*|)</td>', table) == ["0.5", "0.7", ""]


@pytest.mark.parametrize("kind", ["test", "val", "valid", "validation", "eval"])
def test_each_kind_of_evaluation_has_a_colour_in_the_charts_of_the_training(kind: str, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "x-12", epochs=1)
    lines = [{"kind": one, "time": BEGAN_S, "loss": 0.5, "accuracy": 0.25, "top5": 1.0} for one in ("train", kind)]
    write_lines(run_dir / "metrics.jsonl", lines)
    found = {one["title"]: one["curves"] for one in data(made(run_dir))["charts"]}
    assert list(found)[:2] == ["Loss", "Accuracy"] and f"{kind} top5" in found
    for title in ("Loss", "Accuracy"):
        assert {one["label"]: one["colour"] for one in found[title]} == {"train": 0, kind: 1}


def test_a_loss_that_is_null_is_a_gap(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "x-12", epochs=1)
    lines = [
        {"kind": "train", "time": BEGAN_S + at, "loss": loss, "of": None} for at, loss in enumerate((0.5, None, 2))
    ]
    write_lines(run_dir / "metrics.jsonl", lines)
    found = charts(made(run_dir))
    assert found["Loss"]["train"] == [[0, 0.5], [1, None], [2, 2]] and "train of" not in found


def test_what_was_printed_is_a_curve(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "x-12", epochs=1)
    (run_dir / "task-0.log").write_text("bleu 1.5\nbleu nan\nbleu 3\n")
    (status,) = run_statuses(tmp_path, [str(run_dir)])
    text = page.page([report(status, metric=re.compile(r"bleu (?P<bleu>\S+)"))])
    assert charts(text)["bleu, printed"] == {"bleu, printed": [[1, 1.5], [2, None], [3, 3]]}


def test_two_runs_in_the_same_charts(tmp_path: Path) -> None:
    text = made(
        make_run(tmp_path / "a-12", epochs=2), make_run(tmp_path / "b-13", job="13", name="vit", epochs=2, rate=2)
    )
    found = charts(text)
    assert set(found["Loss"]) == {"resnet train", "resnet test", "vit train", "vit test"}
    assert set(found["GPUs busy"]) == {"resnet", "vit"} and data(text)["starts"] == []


HOSTILE = "</script><script>alert(1)</script><b>&'\""


def test_nobodys_text_is_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "x-12", name=HOSTILE, epochs=1)
    write_lines(run_dir / "metrics.jsonl", [{"kind": HOSTILE, "time": BEGAN_S, HOSTILE: 1.5, "text": HOSTILE}] * 2)
    (run_dir / "run.json").write_text(json.dumps({"config": {HOSTILE: HOSTILE}, "command": [HOSTILE]}))
    write_lines(
        run_dir / "starts.jsonl",
        [{"kind": "start", "time": 1, "restart": 0, "step": 0, "ranks": 1, "cause": HOSTILE}] * 2,
    )
    text = made(run_dir)
    assert HOSTILE not in text and "<script>alert" not in text and "<b>&" not in text
    assert set(charts(text)) >= {f"{HOSTILE} {HOSTILE}"}


def test_it_needs_no_network(tmp_path: Path) -> None:
    text = made(make_run(tmp_path / "x-12", epochs=1))
    assert not re.search(r"""(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|import\(""", text)


@pytest.mark.parametrize("kept", [["spec.json", "job.sbatch"], ["run.json", "metrics.jsonl"]])
def test_what_is_missing_is_missing(tmp_path: Path, kept: list[str]) -> None:
    run_dir = make_run(tmp_path / "x-12", epochs=1)
    for path in run_dir.iterdir():
        if path.name not in kept:
            path.unlink()
    (run_dir / "usage-0.jsonl").write_text('{"node": "n"}\n{"time": 5, "node": "n", "cpu": "x", "gpus": [1]}\n[]\n')
    text = made(run_dir)
    assert "None" not in re.sub(r"<script>.*?</script>|<style>.*?</style>", "", text, flags=re.DOTALL)


def test_many_records_make_a_small_page(tmp_path: Path) -> None:
    curve = time_series.Curve()
    for number in range(100_000):
        curve.add(number, 5.0 if number == 77_777 else float("nan") if number == 50 else number % 2)
    points = curve.points(begin=10)
    assert len(points) <= time_series.POINTS and points[0][0] == -10 and points[-1][0] == 99_989
    assert (77_767, 5.0) in points  # an outlier stays
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_the_command_writes_it_and_says_where_it_can_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "it's a run-12", epochs=1)
    assert verb.main([str(run_dir), "--html", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    with pytest.raises(SystemExit) as exit_:
        verb.main([str(run_dir), "--html", str(tmp_path / "missing" / "r.html")])
    assert exit_.value.code == 2
    assert "r.html:\n  No such file or directory.\n  Hint: choose a file" in capsys.readouterr().err


def test_the_page_of_runs_elsewhere_is_made_here_after_they_are_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        verb.main(["12", "--html", "r.html", "--on", "cluster"])
    assert "Hint: fetch the runs, then report them here: cluster-ddp fetch --on HOST" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_draws_every_chart(tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text(made(make_run(tmp_path / "x-12", epochs=2, restarts=True)))
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    words = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", profile, "--virtual-time-budget=3000"]
    shown = subprocess.run(
        [*words, "--dump-dom", (tmp_path / "r.html").as_uri()], capture_output=True, text=True, timeout=scaled(LIMIT_S)
    )
    count = len(data((tmp_path / "r.html").read_text())["charts"])
    assert f'data-charts="{count}"' in shown.stdout[:2000], shown.stderr[-2000:]
    assert shown.stdout.count("<canvas") == count == 12


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_pictures_are_light_and_dark_and_fit_a_phone(tmp_path: Path) -> None:
    from matplotlib.image import imread

    run_dir, brightness = make_run(tmp_path / "x-12", epochs=1), {}
    for name, options in (("light", []), ("dark", ["--dark"])):
        command = [sys.executable, str(SCREENSHOT), str(run_dir), "--image", str(tmp_path / f"{name}.png"), *options]
        subprocess.run(command, check=True, capture_output=True, timeout=scaled(LIMIT_S))
        picture = imread(tmp_path / f"{name}.png")
        assert picture.shape[:2] == (1500, 1200)
        brightness[name] = picture[..., :3].mean()
    assert brightness["dark"] < 0.3 < 0.8 < brightness["light"]

    (tmp_path / "r.html").write_text(made(run_dir))
    (tmp_path / "phone.html").write_text(  # a window is 500 pixels wide at least
        '<iframe src="r.html" style="width: 390px; height: 2000px" onload="setTimeout(() => {'
        "const page = this.contentDocument.documentElement;"
        'document.body.dataset.hidden = page.scrollWidth - page.clientWidth}, 1000)"></iframe>'
    )
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    words = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", profile, "--virtual-time-budget=3000"]
    words += ["--allow-file-access-from-files", "--dump-dom", (tmp_path / "phone.html").as_uri()]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=scaled(LIMIT_S))
    assert 'data-hidden="0"' in shown.stdout, shown.stdout[-500:] + shown.stderr[-2000:]
