"""`submit --resume`: a job that has failed, and what resumes it, on a real Slurm and on this machine."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, Place, label_of

from cluster_ddp.slurm import commands, job_status

# Three epochs of two steps; fails after the first, once. Prints in which steps the weights had which value.
TRAINING = """
import os, sys, time, torch, cluster_ddp
with cluster_ddp.distributed(cuda=False) as world:
    torch.manual_seed(0)
    model = world.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(4, 2))
    shard = world.shard(data, batch_size=2, shuffle_seed=1)
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer, every="1steps")
    for epoch in checkpoint.epochs(3):
        for (x,) in shard:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            world.log("train", epoch=epoch + 1, loss=0.5)
            checkpoint.step()
            world.print(f"step {checkpoint.steps}")
        if sys.argv[1] == "fails" and not os.path.exists("mended"):
            raise SystemExit(3)
        if sys.argv[1] == "is killed" and not os.path.exists("mended"):
            while checkpoint.last_good is None:
                time.sleep(0.1)  # it is saved in the background
            os.kill(os.getpid(), 9)
"""

ALL_AFTER_A_CHECKPOINT = ([3, 4, 5, 6], [2, 3, 4, 5, 6])  # the second save is skipped if the first takes long


@pytest.fixture
def place(slurm: Cluster, tmp_path: Path) -> Place:
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    (folder / "t.py").write_text(TRAINING)
    return Place(slurm, folder)


def resume(place: Place, words: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    """Run the command that a failure has printed, from another folder, with more options."""
    assert words[:2] == ["cluster-ddp", "submit"]
    elsewhere = place.folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    return Place(place.slurm, elsewhere).submit(*words[2:], "--no-check", *more)


def printed(text: str) -> list[str]:
    """The words of the command that a failure has printed."""
    lines = re.findall(r"To resume(?: job \S+)?: (.*)", text)
    assert lines, text
    return shlex.split(lines[-1])


def steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)$", text, re.MULTILINE)]


RUN_DIR = ("--run-dir", "out/my run")


@pytest.mark.fault(
    "a job fails",
    "its log ends with the command that resumes it; a new job in the same run directory continues from the last "
    "checkpoint",
)
@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        pytest.param((), RUN_DIR, id="slurm in a directory"),
        pytest.param(("--local", "--launcher", "srun"), (), id="local", marks=pytest.mark.full),
    ],
)
def test_the_printed_command_continues_a_failed_training(
    place: Place, options: tuple[str, ...], chosen: tuple[str, ...]
) -> None:
    begun = place.submit("--no-check", *options, *chosen, "--watch", "--", "python", "t.py", "fails")
    assert begun.returncode == 3, begun.stdout + begun.stderr
    run_dir = place.folder / re.search(r"Run directory: (.*)", begun.stdout)[1]
    assert steps(begun.stdout) == [1, 2]
    command = printed(begun.stdout)
    status = place.slurm.run(sys.executable, "-m", "cluster_ddp", "status", str(run_dir), cwd=place.folder)
    assert command == printed((run_dir / "job.log").read_text()) == printed(status.stdout)
    (place.folder / "mended").touch()
    again = resume(place, command, "--watch")
    assert again.returncode == 0, again.stdout + again.stderr
    assert steps(again.stdout) in ALL_AFTER_A_CHECKPOINT
    assert re.search(r"^epoch \d, .*loss 0\.5", again.stdout, re.MULTILINE), "key figures, while it runs"
    record = json.loads((run_dir / "job.json").read_text())
    first = re.search(r"Submitted job (\d+)", begun.stdout)[1]
    assert record["job"] == re.search(r"Submitted job (\d+)", again.stdout)[1] != first
    assert {"spec.json", "job.log", "task-0.log"} <= {path.name for path in (run_dir / f"job-{first}").iterdir()}


@pytest.mark.fault(
    "a rank is killed, and `submit --resume` resumes the job",
    "the report names that rank; the old id finds the new job",
)
def test_a_killed_job_that_was_resumed_is_known_by_its_old_id(place: Place) -> None:
    """What ended it stands in its own log, which is the new job's no more."""
    begun = place.submit("--no-check", "--watch", "--", "python", "t.py", "is killed")
    first = re.search(r"Submitted job (\d+)", begun.stdout)[1]
    run_dir = place.folder / re.search(r"Run directory: (.*)", begun.stdout)[1]
    (place.folder / "mended").touch()
    again = resume(place, printed(begun.stdout), "--watch")
    assert again.returncode == 0, again.stdout + again.stderr
    second = re.search(r"Submitted job (\d+)", again.stdout)[1]
    starts = [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]
    cause = next(one["cause"] for one in starts if one.get("job") == second)
    assert re.fullmatch(r"Failed first: rank 0 on node\d: killed by SIGKILL", cause)
    assert starts[-1]["state"] == "COMPLETED"
    logs, status, report, cancel = (
        place.slurm.run(sys.executable, "-m", "cluster_ddp", verb, first, cwd=place.folder)
        for verb in ("logs", "status", "report", "cancel")
    )
    assert logs.stderr.startswith(f"Job {first} was resumed as job {second}.") and "step 6\n" in logs.stdout
    assert status.stdout.splitlines()[1].split()[0] == second
    assert f"Job {first} was resumed as job {second}.\n" in status.stdout
    assert cause in report.stdout
    assert (cancel.returncode, f"it was resumed as job {second}" in cancel.stderr) == (2, True), cancel.stderr


@pytest.mark.full
def test_an_arrays_task_resumes_alone(place: Place) -> None:
    grid = ("--array", "how=fails,works", "--gpus-per-node", "1")
    first = place.start(*grid, "--", "python", "t.py", "{how}")
    array = label_of(first).removesuffix("_0")
    assert place.end_of(first).exit_code == 3
    place.completed(first.with_name("1"))
    whole = place.submit("--resume", array)
    assert (whole.returncode, f"--resume {first}" in whole.stderr.replace("'\"'\"'", "'").replace("'", "")) == (
        2,
        False,
    )
    assert "its tasks are resumed one by one" in whole.stderr
    (place.folder / "mended").touch()
    again = place.submit("--no-check", "--resume", f"{array}_0", "--watch")
    assert again.returncode == 0, again.stdout + again.stderr
    assert steps(again.stdout) in ALL_AFTER_A_CHECKPOINT


def test_one_that_has_not_ended_is_left_alone(place: Place) -> None:
    running = place.start("--name", "one", "--", "sleep", "600")
    label = running.name.removeprefix("one-")
    before = sorted(running.iterdir())
    done = place.submit("--resume", label)
    states = job_status.job_statuses(label, env=place.slurm.env)
    commands.run(["scancel", label], env=place.slurm.env)
    assert done.returncode == 2
    assert re.search(rf"job {label} is (PENDING|RUNNING|CONFIGURING) in it", done.stderr)
    assert "end it: cluster-ddp cancel " in done.stderr
    assert not states[0].ended
    assert [path for path in before if not path.exists()] == []
    assert not (running / f"job-{label}").exists()


def test_what_is_given_changes_and_a_refusal_puts_all_back(place: Place) -> None:
    run_dir = place.start("--name", "one", "--mem", "200M", "--", "bash", "-c", "exit 1")
    assert place.end_of(run_dir).state == "FAILED"
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    refused = place.submit("--no-check", "--resume", str(run_dir), "--partition", "nowhere")
    assert refused.returncode == 2
    assert {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before
    again = place.submit("--no-check", "--resume", str(run_dir), "--mem", "300M", "--watch", "--", "echo", "hello")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "hello" in again.stdout
    script = (run_dir / "job.sbatch").read_text()
    assert "#SBATCH --mem=300M" in script and "#SBATCH --job-name=one" in script
