"""What a job that was requeued, and restarted after a failure, leaves behind: report, records and log agree."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

import pytest
from cluster import Cluster, Place, records
from tracked import READERS, truth

from cluster_ddp.run import journal

# Stopped in time in its first start, failed in its second, which starts again in its allocation. The ranks agree on a
# stop in two exchanges, each at most as many steps after the one before as were made by then: told at step 10, at 40.
TRAINING = """
import os, signal, time, torch, cluster_ddp
restart = int(os.environ["CLUSTER_DDP_START"])
with cluster_ddp.distributed(cuda=False) as world:
    model = world.wrap(torch.nn.Linear(2, 1))
    data = torch.utils.data.TensorDataset(torch.arange(240.0).reshape(120, 2))
    shard = world.shard(data, batch_size=2)
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, every="10steps")
    for epoch in checkpoint.epochs(2):
        for (x,) in shard:
            time.sleep(0.03)
            loss = model(x).square().mean()
            loss.backward()
            world.log("train", step=checkpoint.steps + 1, loss=loss)
            world.print(f"step {checkpoint.steps + 1} loss {loss.item()}")
            checkpoint.step()
            if restart == 0 and checkpoint.steps == 10 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if restart == 1 and checkpoint.steps == 45 and world.rank == 0:
                raise ValueError("out of luck")
"""


@pytest.mark.full
def test_a_requeue_and_a_restart_are_told_with_their_cause_and_every_number_agrees(
    slurm: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text(TRAINING)
    place = Place(slurm, tmp_path)
    run_dir = place.start("--nodes", "2", "--restarts", "1", "--track", *READERS, "--", "python", "t.py")
    place.completed(run_dir)

    starts = [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]
    first, second, third = (one for one in starts if one["kind"] == "start")
    assert (first["step"], first["ranks"], first["nodes"], first.get("cause")) == (0, 2, 2, None)
    assert re.fullmatch(r"Stopped in time: node\d got USR1\.", second["cause"]) and second["lost_s"] == 0.0
    assert re.fullmatch(r"Failed first: rank 0 on node\d: ValueError: out of luck", third["cause"])
    assert 10 <= second["step"] <= 40 and third["step"] in (second["step"], 20, 30, 40) and third["lost_s"] > 0
    assert [one["restart"] for one in (first, second, third)] == [0, 1, 2]

    found = records(run_dir)
    train = [one for one in found if one["kind"] == "train"]
    assert [one["step"] for one in train] == list(range(1, 61))
    printed = dict(re.findall(r"^step (\d+) loss (\S+)$", (run_dir / "task-0.log").read_text(), re.MULTILINE))
    assert {str(one["step"]): str(one["loss"]) for one in train} == printed
    of_steps = [one for one in found if one["kind"] == "steps"]
    assert sum(one["steps"] for one in of_steps) <= 60

    assert [one["global_step"] for one in train] == list(range(60))
    for read in READERS.values():  # one run in each tracker, with each step once
        values, wanted = read(run_dir)[1], truth(run_dir)
        assert values.keys() == wanted.keys()
        for tag in values:
            assert values[tag] == [(step, pytest.approx(value)) for step, value in wanted[tag]], tag

    report = slurm.run(sys.executable, "-m", "cluster_ddp", "report", "--json", str(run_dir), cwd=tmp_path)
    (told,) = json.loads(report.stdout)
    assert (told["status"]["restarts"], told["status"]["requeues"]) == (1, 1) and told["status"]["loss"] == train[-1][
        "loss"
    ]
    assert [one["cause"] for one in told["training"]["starts"]] == [None, second["cause"], third["cause"]]
    mean_s = sum(one["steps"] * one["step_s"] for one in of_steps) / sum(one["steps"] for one in of_steps)
    assert abs(told["training"]["step_s"] - mean_s) < 1e-9
    assert told["training"]["slowest_rank"] == statistics.mode(one["slowest_rank"] for one in of_steps)
    costs_what_the_clock_says(told["cost"], run_dir)
    text = slurm.run(sys.executable, "-m", "cluster_ddp", "report", str(run_dir), cwd=tmp_path).stdout
    assert second["cause"] in text and third["cause"] in text and "1 restart, 1 requeue" in text


def costs_what_the_clock_says(cost: dict, run_dir: Path) -> None:
    """Two GPUs in two allocations: no longer than from the first to the last, and not all of it trained."""
    noted = [*journal.events(run_dir)]
    had_s, lost_s = 1800 * cost["gpu_hours"], 1800 * cost["lost_gpu_hours"]
    (failed,) = journal.failures(run_dir)
    assert [one["requeue"] for one in noted if one["event"] == "start"] == [0, 1, 1]
    assert had_s < noted[-1]["time"] - noted[0]["time"]
    assert failed.lost_s - 0.5 < lost_s
    assert abs(lost_s + 1800 * cost["kept_gpu_hours"] - had_s) < 0.1 and cost["energy_kwh"] is None


# Without torch, whose import is what would take the time of the eight tasks.
TASK = """
import json, os, pathlib, sys, time
lr, momentum = float(sys.argv[1]), float(sys.argv[2])
test = {"kind": "test", "epoch": 1, "accuracy": 0.9 - abs(lr - 0.3) - momentum / 10}
with open(pathlib.Path(os.environ["CLUSTER_DDP_RUN_DIR"]) / "metrics.jsonl", "w") as file:
    for record in (test, {"kind": "done"}):
        file.write(json.dumps({"time": time.time(), **record}) + chr(10))
"""


@pytest.mark.full
def test_an_arrays_tasks_are_ranked_at_the_end_of_watch_in_the_report_and_on_the_page(
    slurm: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text(TASK)
    place = Place(slurm, tmp_path)
    grid = ("--array", "lr=0.1,0.2,0.3,0.5", "momentum=0,0.9")
    watched = place.submit("--no-check", *grid, "--watch", "--", "python", "t.py", "{lr}", "{momentum}")
    array, folder = re.search(r"^Submitted array (\d+) .* directories: (\S+)/0 ", watched.stdout, re.MULTILINE).groups()
    result = "(lr=0.3, momentum=0): test accuracy 90.00 %"
    last = f"Best: task {array}_4 {result}. All tasks: cluster-ddp report {folder}\n"
    assert re.search(rf"{re.escape(last)}Cost: [\d.e-]+ GPU hours\n$", watched.stdout), watched.stdout
    table = slurm.run(sys.executable, "-m", "cluster_ddp", "report", array, cwd=tmp_path).stdout
    assert re.search(rf"\nTASK .*\n{array}_4 +0\.3 +0 .* 90\.00 % .* best\n{array}_5 ", table), table
    done = slurm.run(sys.executable, "-m", "cluster_ddp", "report", array, "--html", "it's a page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "it's a page.html").read_text()
    rows = re.findall(r"<td>\d+_\d</td><td>([\d.]+)</td><td>([\d.]+)</td>", page)
    ranked = [("0.3", "0"), ("0.3", "0.9"), ("0.2", "0"), ("0.1", "0"), ("0.5", "0"), ("0.2", "0.9")]
    assert [rows[0], rows[1], rows[2]] == ranked[:3] and len(rows) == 8 and set(rows) > set(ranked)
    assert "90.00 %" in page and page.count("</polyline>") == 8
