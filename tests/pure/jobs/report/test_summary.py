"""The report of a run: what its files say, and which option it advises to change."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from made_runs import write_lines

from cluster_ddp.cli import report as verb
from cluster_ddp.jobs.report import usage
from cluster_ddp.jobs.report.page import page
from cluster_ddp.jobs.report.report_text import as_text, notes
from cluster_ddp.jobs.report.summary import report
from cluster_ddp.jobs.status import RunStatus

GIB = 1 << 30
ASKED = {"nodes": 2, "gpus_per_node": 2, "gpus_per_task": 1, "cpus_per_task": 4, "mem": "64G", "time": "0-01:00:00"}


def sample(**changes: Any) -> dict[str, Any]:
    gpu = {"utilization": 0.9, "memory": 40.0 * GIB, "memory_total": 80.0 * GIB}
    good = {"seconds": 100.0, "cpus": 8, "cpu": 0.6, "memory": 40 * GIB, "gpus": [gpu, gpu], "restart": 0}
    return {**good, **changes}


def run(
    folder: Path, *nodes: dict[str, Any], waiting: float = 0.01, asked: dict[str, Any] | None = None, requeues: int = 0
) -> RunStatus:
    (folder / "spec.json").write_text(json.dumps({"spec": ASKED | (asked or {})}))
    lines = [{"kind": "train", "waiting_for_data": waiting}, {"kind": "train"}, {"kind": "test", "waiting_for_data": 1}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "tr')
    for number, one in enumerate(nodes):
        line = json.dumps({"node": f"node{number + 1}", **one})
        (folder / f"usage-{number}.jsonl").write_text(f"{line}\n{line}\n{line[:30]}")
    return RunStatus(
        job="12",
        name="fit",
        state="COMPLETED",
        elapsed="00:30:00",
        requeues=requeues,
        epoch=3,
        loss=0.5,
        run_dir=folder,
    )


def test_a_run_on_one_screen(tmp_path: Path) -> None:
    cool = GPU | {"utilization": 0.5, "power_w": 250.0, "temperature_c": 61.0}
    second = sample(cpu=0.2, memory=48 * GIB, received_per_s=3 << 20, sent_per_s=1 << 19, gpus=[cool, {}])
    status = run(tmp_path, sample(), second, requeues=1)
    assert as_text(report(status)) == (
        f"fit, job 12: COMPLETED\n  Run directory: {tmp_path}\n  Size: 2 nodes x 2 GPUs, 4 ranks\n"
        "  Time: 00:30:00 of 0-01:00:00, 1 requeue\n"
        "  Training: epoch 3, loss 0.5, waited for data 1 % of the time\n\n"
        "Use, over 0:03:20\n"
        "  CPUs        [########------------]  40 % of 16\n"
        "  Memory      [###############-----]  75 % at most: 48.0 of 64.0 GiB on a node\n"
        "  GPUs        [###############-----]  77 % of 4\n"
        "  GPU memory  [##########----------]  50 % at most, of the fullest GPU\n\n"
        "By node\n"
        "  node1       [############--------]  60 % of 8 CPUs, memory 40.0 GiB\n"
        "    GPU 0     [##################--]  90 %, 40.0 of 80.0 GiB\n"
        "    GPU 1     [##################--]  90 %, 40.0 of 80.0 GiB\n"
        "  node2       [####----------------]  20 % of 8 CPUs, memory 48.0 GiB, network 3.0 MiB/s in, 0.5 MiB/s out\n"
        "    GPU 0     [##########----------]  50 %, 40.0 of 80.0 GiB, 250 W, 61 °C at most\n"
        "    GPU 1     unknown"
    )
    (tmp_path / "usage-0.jsonl").unlink()
    for number in range(20):
        (tmp_path / f"usage-{number}.jsonl").write_text(json.dumps({"node": f"n{number}", **sample()}) + "\n")
    many = as_text(report(status)).partition("By node\n")[2].splitlines()
    assert (
        many[0] == "  n0          [############--------]  60 % of 8 CPUs over 0:01:40, memory 40.0 GiB, GPUs 90 % 90 %"
        and len(many) == 20
    )


def test_a_run_that_went_on_elsewhere_weighs_its_nodes_by_time(tmp_path: Path) -> None:
    """Ten hours on the first node, a minute on the next. It asked for four CPUs and two GPUs, and never had more."""
    gpu = {"memory": 40.0 * GIB, "memory_total": 80.0 * GIB}
    good, idle = ([gpu | {"utilization": part}] * 2 for part in (0.9, 0.0))
    long = sample(seconds=18000.0, cpus=4, cpu=0.9, gpus=good)  # each line is there twice
    short = sample(seconds=30.0, cpus=4, cpu=0.1, gpus=idle)
    status = run(tmp_path, long, short, asked={"nodes": 1, "time": "4-00:00:00", "mem": None}, requeues=1)
    text = as_text(report(status))
    assert "Use, over 10:01:00\n" in text
    assert re.findall(r"(C|G)PUs +\[.*\] +(\d+ % of \d)", text) == [("C", "90 % of 4"), ("G", "90 % of 2")]
    assert notes(report(status)) == []  # of the time limit nothing is known but the last start
    by_node = text.partition("By node\n")[2].splitlines()[::3]
    assert [line.partition("%")[2] for line in by_node] == [
        " of 4 CPUs over 10:00:00, memory 40.0 GiB",
        " of 4 CPUs over 0:01:00, memory 40.0 GiB",
    ]


def test_a_run_that_took_what_was_free_has_its_ranks_over_time(tmp_path: Path) -> None:
    """Two nodes, then three: the first one was there all the time."""
    sizes = [(0, 4), (9, 4), (12, 6)]
    starts = [{"kind": "start", "time": 1e9, "restart": at, "step": s, "ranks": n} for at, (s, n) in enumerate(sizes)]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in starts))
    text = as_text(report(run(tmp_path, sample(), sample(), sample(seconds=50.0), asked={"max_nodes": 8})))
    assert "\n  Size: 2-8 nodes x 2 GPUs, 4-16 ranks\n  Ranks: 4, from step 12: 6\n" in text
    assert "Use, over 0:03:20\n" in text and " % of 20\n" in text  # CPUs, on average


GPU = {"utilization": 0.9, "memory": 40.0 * GIB, "memory_total": 80.0 * GIB}


@pytest.mark.parametrize(
    ("node", "more", "note"),
    [
        (
            {},
            {"waiting": 0.71},
            "Ranks wait for data 71 % of the time. "
            "Give loader workers more CPUs: --cpus-per-task 8; or use fewer GPUs.",
        ),
        ({"memory": 2 * GIB}, {}, "Memory: 2.0 of 64.0 GiB used on a node: --mem 3G"),
        ({"memory": 60 * GIB}, {}, "Memory: 60.0 of 64.0 GiB used, so a little more ends the job: --mem 96G"),
        ({"cpu": 0.1}, {}, "CPUs: each rank used 0.4 of 4: --cpus-per-task 1"),
        (
            {},
            {"asked": {"time": "1-00:00:00"}},
            "Time: 0:30:00 of 24:00:00. A shorter limit may start sooner: --time 0:45:00",
        ),
        (
            {"gpus": [GPU | {"utilization": 0.1}] * 2},
            {},
            "The GPUs are busy 10 % of the time. To see how many are worth it: cluster-ddp scaling --gpus 1,2,4",
        ),
        (
            {"gpus": [GPU, GPU | {"utilization": 0.0}]},
            {},
            "Idle all the time: GPU 1 of node1. Ask for 1 GPU, or use a rank for each.",
        ),
        ({"gpus": [GPU | {"memory": 8.0 * GIB}] * 2}, {}, "GPU memory: 10 % used. A larger batch may be faster."),
        (
            {"gpus": [GPU | {"throttled": 0.5}] * 2},
            {},
            "Heat or power lowered the clocks of GPUs on node1: tell your support.",
        ),
    ],
)
def test_what_to_change(node: dict[str, Any], more: dict[str, Any], note: str, tmp_path: Path) -> None:
    found = report(run(tmp_path, sample(**node), **more))
    assert notes(found) == [note]
    assert as_text(found).endswith(f"\nNotes\n  - {note}")


def test_a_good_run_and_a_short_run_have_no_notes(tmp_path: Path) -> None:
    assert notes(report(run(tmp_path, sample()))) == []
    assert notes(report(run(tmp_path, sample(seconds=1.0, memory=GIB, cpu=0.0), waiting=0.9))) == []


def test_weights_that_became_nan_are_a_note_however_short_the_run_was(tmp_path: Path) -> None:
    status = dataclasses.replace(run(tmp_path, sample(seconds=1.0)), non_finite_step=40, saved_step=30)
    (note,) = notes(report(status))
    assert note.startswith("The weights are NaN or Inf since step 40: nothing was saved from there on. ")
    assert "The last good checkpoint is that of step 30." in note and 'on_nan="stop"' in note
    assert note in as_text(report(status))


def test_what_was_not_recorded_is_left_out(tmp_path: Path) -> None:
    status = run(tmp_path)
    (tmp_path / "spec.json").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    text = as_text(report(status))
    assert "Use: nothing was recorded." in text and "%" not in text and "Size" not in text
    assert usage.read(tmp_path) == []
    (tmp_path / "usage-0.jsonl").write_text(
        '{"node": "a", "seconds": 5, "cpus": 2, "cpu": 0.5, "gpus": [{}]}\nnull\n[]\n'
    )
    (node,) = usage.read(tmp_path)
    assert (node.memory, node.gpus[0].utilization) == (None, None)
    assert as_text(report(status)).endswith("a           [##########----------]  50 % of 2 CPUs\n    GPU 0     unknown")


def test_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(tmp_path, sample(memory=2 * GIB))
    monkeypatch.setattr(verb, "run_statuses", lambda runs_dir, jobs: [status, status])
    assert verb.main(["12", "13"]) == 0
    assert capsys.readouterr().out.count("fit, job 12: COMPLETED") == 2
    assert verb.main(["12", "--json"]) == 0
    first, _ = json.loads(capsys.readouterr().out)
    assert first["notes"] == ["Memory: 2.0 of 64.0 GiB used on a node: --mem 3G"]
    assert first["nodes"][0]["gpus"][0]["utilization"] == 0.9


FAILURES = (
    {"node": "node2", "rank": 1, "words": "killed by SIGKILL", "lost_s": 12.4, "then": "restart"},
    {"node": "node1", "rank": None, "words": "lost", "lost_s": 60, "then": "restart", "without": ["node1"]},
    {"node": "node3", "rank": 0, "words": "ValueError: x.", "then": "requeue", "without": ["node1", "node3"]},
    {"then": "end"},
)


def test_spare_nodes_and_what_a_run_has_cost(tmp_path: Path) -> None:
    status = run(tmp_path, sample(gpus=[GPU | {"energy_j": 1.8e6}]), asked={"spare_nodes": 1, "restarts": 1})
    had = {"time": 1000, "job": "12", "requeue": 0, "start": 0, "nodes": 2, "training": 1, "gpus": 2}
    write_lines(tmp_path / "job.jsonl", [{"event": "start", **had}, {"event": "over", "job": "12", "time": 4600}])
    found = report(status)
    text = as_text(found)
    assert "\n  Spare: 1 of 3 nodes\n" in text
    last = ["Cost", "  GPU hours   4", "  Energy      1 kWh of the GPUs alone"]
    assert text.splitlines()[-3:] == last
    assert "<em>4</em>" in page([found])


def test_what_failed_and_what_it_cost(tmp_path: Path) -> None:
    status = dataclasses.replace(run(tmp_path, requeues=1), restarts=2)
    end = {"event": "end", "job": "12", "state": "FAILED", "status": 1}
    ends = [
        {**end, "start": at, "time": 1000.0 * at, "then": one["then"], "failed": one} for at, one in enumerate(FAILURES)
    ]
    write_lines(tmp_path / "job.jsonl", ends)
    text = as_text(report(status))
    assert "\n  Time: 00:30:00 of 0-01:00:00, 2 restarts, 1 requeue\n" in text
    failures = text.partition("  Failures, 0:01:12 of training lost:\n")[2].splitlines()[:4]
    assert [re.sub(r"^    [\d-]{10} [\d:]{8} ", "", line) for line in failures] == [
        "Rank 1 on node2: killed by SIGKILL. Restarted in the allocation. Lost: 12 s.",
        "node1: lost. Restarted in the allocation, without node1. Lost: 60 s.",
        "Rank 0 on node3: ValueError: x. Requeued, without node1, node3.",
        "Unknown rank: no reason is known. The job ended.",
    ]


def test_a_job_without_a_run_directory_has_no_figures_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be the run directory of another one."""
    run(tmp_path, sample(time=1.0))
    monkeypatch.chdir(tmp_path)
    found = report(RunStatus(job="13", name="-", state="RUNNING"))
    assert (found.asked, found.nodes, found.size) == ({}, [], "")
    assert '"charts":[]' in page([found]) and "Run directory" not in page([found])
