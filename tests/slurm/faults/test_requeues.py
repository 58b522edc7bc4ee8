"""Jobs that are warned, preempted, cancelled, queued again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from chaos import faults
from cluster import Cluster, Place, output, records
from paced_run import ONE_BASH, ONE_TASK, TWO_TASKS, Run, held, start
from slowness import stays, wait_until

from cluster_ddp import processes
from cluster_ddp.run.names import Env
from cluster_ddp.slurm import commands, job_status


@pytest.mark.full
def test_the_last_requeue_and_another_number_of_ranks(place: Place) -> None:
    """After --max-requeues the job ends; a new one resumes with what GPUs it gets."""
    run = start(place, "--max-requeues", "0", nodes=TWO_TASKS, FAULTS=[held(12)])
    run.wait_for_step(6)
    run.slurm("scancel", "--signal=USR1", run.job)
    said = run.failed()
    assert run.status().exit_code == 75
    assert "error: stopped in time, but started again 0 times already (--max-requeues 0)." in said
    said = start(place, nodes=ONE_TASK, run_dir=run.path).completed()
    assert "1 rank instead of 2: same weights and place in the data, new streams of random numbers" in said
    assert run.metrics()[-1]["kind"] == "done"


@pytest.mark.full
def test_a_warning_before_there_is_a_checkpointer(place: Place) -> None:
    """USR1 while a script of one's own has imported nothing yet, and while it reads its data."""
    (place.folder / "early.py").write_text(EARLY)
    run = Run(place, place.start(*TWO_TASKS, "--", "python", "early.py"))
    for phase in ("begun", "imported"):
        run.wait_for(lambda phase=phase: len(list(run.path.glob(f"{phase}-*"))) == 2)
        run.slurm("scancel", "--signal=USR1", run.job)
        stays(lambda: run.status().state == "RUNNING", 2, pause_s=0.3)  # it does not die of it
        (run.path / f"after {phase}").touch()
    said = run.completed(restarts=1)
    assert re.search(r"Stopped after step 1 \(epoch 1\): rank \d: node\d got USR1. Saved", said)
    assert "Resuming from" in said


EARLY = """import os, pathlib, time
def phase(name):
    folder = pathlib.Path(os.environ["CLUSTER_DDP_RUN_DIR"])
    (folder / f"{name}-{os.getpid()}").touch()
    while not (folder / f"after {name}").exists():
        time.sleep(0.1)
phase("begun")
import cluster_ddp
phase("imported")
import torch
with cluster_ddp.distributed() as world:
    data = torch.utils.data.TensorDataset(torch.ones(64, 1))
    model = world.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard = world.shard(data, batch_size=8, shuffle_seed=0)
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)
    for epoch in checkpoint.epochs(1):
        for (numbers,) in shard:
            optimizer.zero_grad()
            model(numbers).sum().backward()
            optimizer.step()
            checkpoint.step()
"""


@pytest.mark.fault(
    "the time limit is extended or shortened while the job runs",
    "the training stops in time before the new end; rank 0 logs the change",
    bound="70 s; at shorter notice, Slurm's TERM",
    also=("test_a_job_that_is_shortened_stops_in_time",),
)
@pytest.mark.full
def test_a_time_limit_that_changes_while_the_job_runs(place: Place) -> None:
    """Extended, it trains on past the old end; shortened, it saves by the clock of the new end, before Slurm's TERM."""
    extended, shortened = (start(place, "--time", time_min, nodes=ONE_TASK, pace_s=1.5) for time_min in ("2", "20"))
    for run, time_min in ((extended, 20), (shortened, 2)):
        run.wait_for_step(1)
        run.slurm("scontrol", "update", f"JobId={run.job}", f"TimeLimit={time_min}")
    changed = "The job's end has changed: it ends at "
    assert extended.completed(restarts=0).count(changed) == 1
    said = shortened.completed()
    assert shortened.status().restarts >= 1
    assert said.count(changed) == 1
    assert re.search(r"Stopped after step \d+ \((after )?epoch \d\): rank 0: the job's time is nearly up. Saved", said)
    assert "Resuming from" in said


@pytest.mark.every_slurm
def test_the_times_of_a_job_as_slurm_writes_them(place: Place) -> None:
    """In seconds of UNIX time; the end is NONE without a time limit. Rank 0 understands just these."""
    ask = 'SLURM_TIME_FORMAT=%s squeue --noheader --format="%S %e" --jobs="$SLURM_JOB_ID"'
    tell = f'cat "$CLUSTER_DDP_JOB_TIMES"; scontrol update JobId="$SLURM_JOB_ID" TimeLimit=UNLIMITED; {ask}'
    run = Run(place, place.start(*ONE_BASH, "--time", "5", "--", "bash", "-c", tell))
    limited, unlimited = re.findall(r"^(\d+) (\d+|NONE)$", run.completed(), re.MULTILINE)
    assert (int(limited[1]) - int(limited[0]), unlimited[1]) == (300, "NONE")


@pytest.mark.fault(
    "`--max-requeues` reached, or Slurm refuses to queue the job again",
    "an error gives Slurm's message and how to resume; status 75",
    also=("test_the_last_requeue_and_another_number_of_ranks",),
)
def test_slurm_may_refuse_to_queue_a_job_again(place: Place) -> None:
    """Its words are in the error."""
    said = Run(place, place.start(*ONE_BASH, "--no-requeue", "--", "bash", "-c", "exit 75")).failed()
    assert "Slurm said: Requested operation is presently disabled" in said


@pytest.mark.full
def test_a_rank_that_notes_its_stop_is_requeued_whatever_its_status(place: Place) -> None:
    """A note of one start counts for no other: the next succeeds."""
    notes = 'if ((!${SLURM_RESTART_COUNT:-0})); then touch "$CLUSTER_DDP_NOTES/stopped-$RANK"; exit 3; fi'
    Run(place, place.start(*ONE_BASH, "--", "bash", "-c", notes)).completed(restarts=1)


@pytest.mark.full
def test_a_rendered_arrays_task_is_requeued_alone(slurm: Cluster, tmp_path: Path) -> None:
    """jobs/mnist_array.sbatch as users submit it: the one that is warned stops, saves and resumes."""
    run_dir = f"{tmp_path}/{{array_task_id}}"
    arguments = ("--dataset", "digits", "--model", "convnet", "--epochs", "4", "--run-dir", run_dir)
    options = ("--array=0-1", "--ntasks-per-node=1", "--gres=gpu:1")
    job = slurm.submit(slurm.job("mnist_array"), tmp_path, *arguments, options=options)
    wait_until(lambda: list(tmp_path.glob("1/checkpoints/*.pt")))
    commands.run(["scancel", "--signal=USR1", f"{job.job_id}_1"], env=slurm.env)
    job.succeed()
    statuses = job_status.job_statuses(job.job_id, env=slurm.env)
    assert {status.array_task: status.restarts for status in statuses} == {"0": 0, "1": 1}
    assert [records(tmp_path / task)[-1]["kind"] for task in "01"] == ["done", "done"]


@pytest.mark.fault(
    "preemption by an urgent job",
    "saves on TERM; Slurm requeues it; resumes. A save that takes longer than KillWait is lost: the checkpoint before "
    "is used. `--signal=USR1@SECONDS` leaves more time",
    bound="KillWait (often 30 s)",
)
@pytest.mark.fault("preemption while a save is under way", "waits for that save, then saves", bound="KillWait")
@pytest.mark.every_slurm
def test_preemption_while_a_save_is_under_way(place: Place, uninterrupted: list[dict]) -> None:
    """An urgent job takes the nodes while a checkpoint is being written to a slow disk."""
    run = start(place, pace_s=0.2, FSYNC_S="0.5", FAULTS=[held(36)])
    run.wait_for(lambda: list(run.path.glob("checkpoints/.step-*.tmp")))
    urgent = place.slurm.submit(URGENT, place.folder)
    urgent.succeed()
    said = run.completed(restarts=1)
    assert re.search(r"Stopped after step \d+ .* got TERM", said)
    assert "this one is skipped" in said  # training does not wait for the disk
    assert run.metrics() == uninterrupted


URGENT = "#!/bin/bash\n#SBATCH --partition=urgent --nodes=4 --exclusive --time=1\nsleep 1\n"


@pytest.mark.fault(
    "scancel",
    "saves and ends, without a requeue. `submit --resume JOB` resumes it in a new job. Without proctrack/cgroup, a "
    "command may get TERM twice, and a `bash run.sh` without a trap ends at once",
    bound="KillWait",
)
def test_scancel_is_final_and_a_new_job_goes_on(place: Place, uninterrupted: list[dict]) -> None:
    """After scancel nothing is requeued. The newest checkpoint is damaged: the one before is used."""
    run = start(place, FAULTS=[held(18)])
    run.wait_for_step(12)
    env = processes.environment(faults.ranks(place.slurm.layout, int(run.job))[0].pid)
    folders = [Path(env[Env.NOTES]), Path(env[Env.JOB_TIMES]).parent]
    assert all(folder.is_dir() for folder in folders)
    run.slurm("scancel", run.job)
    status = run.end()
    run.wait_for(lambda: not any(folder.exists() for folder in folders))  # nothing is left on the node
    assert (status.state, status.restarts) == ("CANCELLED", 0)
    assert "got TERM" in output(run.path)
    newest = max(run.path.glob("checkpoints/*.pt"))
    os.truncate(newest, newest.stat().st_size // 2)
    again = start(place, run_dir=run.path)
    said = again.completed()
    assert f"{newest.name} is damaged: its end is missing. It is renamed to {newest.name}.damaged" in said
    assert "Resuming from" in said
    assert again.metrics(run.path) == uninterrupted
