"""Tasks of an array that share a job (`submit --pack`), and what happens to one of them, or to their job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import Cluster, Place, label_of, output
from slowness import wait_until

from cluster_ddp.run import journal, spec_file, turns
from cluster_ddp.slurm import commands, job_status
from cluster_ddp.slurm.job_status import JobStatus

pytestmark = pytest.mark.every_slurm

TASK = """
import os, sys, time
how, first = sys.argv[1], os.environ["CLUSTER_DDP_START"] == "0"
print(how, *(os.environ.get(f"SLURM_{name}") for name in ("GPUS_ON_NODE", "NTASKS", "MEM_PER_NODE")), flush=True)
if how == "fails once" and first:
    raise ValueError("the first time")
if how == "is killed":
    os.kill(os.getpid(), 9)  # as the kernel does, for memory
time.sleep({"waits": 3600, "is too long": 3600}.get(how, 3))
"""
# One rank, four epochs of four steps. Those that wait do so before their third step, until they are warned.
TRAINING = """
import os, signal, sys, time, torch, cluster_ddp
waits, came = sys.argv[1] == "waits" and os.environ["CLUSTER_DDP_START"] == "0", []
with cluster_ddp.distributed(cuda=False) as world:
    torch.manual_seed(0)
    model = world.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.arange(16.0).reshape(8, 2) / 16)
    shard = world.shard(data, batch_size=2, shuffle_seed=1)
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer, every="1steps")
    signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))  # the Checkpointer's is called, too
    for epoch in checkpoint.epochs(4):
        for (x,) in shard:
            (model(x) ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
            world.print("step", checkpoint.steps)
            while waits and checkpoint.steps >= 2 and not came:
                time.sleep(0.1)
    world.print("weights", *(value.hex() for one in model.parameters() for value in one.flatten().tolist()))
"""


@dataclass(frozen=True)
class Packed:
    """A packed array in one job."""

    place: Place
    folder: Path
    """The run directory of its first task."""

    def id(self, task: int) -> str:
        return label_of(self.path(task))

    def path(self, task: int) -> Path:
        return self.folder.with_name(str(task))

    @property
    def job(self) -> str:
        """The job that holds the tasks."""
        return spec_file.holder(spec_file.read(self.folder))

    def verb(self, *words: str) -> str:
        done = self.place.slurm.run(sys.executable, "-m", "cluster_ddp", *words, cwd=self.place.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[int, dict]:
        found = json.loads(self.verb("status", "--json", str(self.folder.parent)))
        return {int(one["job"].rpartition("_")[2]): one for one in found}

    def states(self) -> list[str]:
        return [one["state"] for _, one in sorted(self.status().items())]

    def wait_for(self, condition: Callable[[], object]) -> None:
        wait_until(condition, said=self.said, pause_s=0.3)

    def wait_for_ends(self, *tasks: int) -> None:
        """Wait until tasks have ended for good. To ask `status` again and again would take the CPUs."""
        self.wait_for(lambda: all(map(self.has_ended, tasks)))

    def has_ended(self, task: int) -> bool:
        ended = journal.last_end(self.path(task), self.id(task))
        return ended is not None and not ended.starts_again

    def said(self) -> str:
        logs = [path.read_text() for path in self.folder.parent.glob("pack-*.log")]
        return "\n".join([str(self.states()), *logs, *(output(self.path(task)) for task in self.status())])

    def end_of_job(self) -> JobStatus:
        self.wait_for(lambda: job_status.job_statuses(self.job, env=self.place.slurm.env)[0].ended)
        return job_status.job_statuses(self.job, env=self.place.slurm.env)[0]


def start(slurm: Cluster, folder: Path, text: str, *options: str) -> Packed:
    (folder / "t.py").write_text(text)
    place = Place(slurm, folder)
    each = ("--gpus-per-node", "1", "--cpus-per-task", "1", "--mem", "200M", "--jobs", "1")
    return Packed(place, place.start(*each, *options))


@pytest.mark.fault(
    "one of several tasks in a job (`--pack`) gets SIGKILL, as for memory, or is cancelled, or reaches its time limit",
    "it ends alone; with `--restarts N` it restarts in its part of the job first. The others, also those whose turn "
    "comes later, are not affected. The job's exit status is that of the first that failed",
    bound="seconds; at its time limit, + 30 s",
    also=("test_each_task_of_a_packed_job_has_a_time_limit_of_its_own",),
)
def test_each_task_of_a_packed_job_ends_alone(slurm: Cluster, tmp_path: Path) -> None:
    """Two at a time: two are cancelled; one is killed and one restarts in the place of the first of them."""
    array = ("--array", "how=waits,waits,is killed,fails once,works")
    limits = ("--pack", "2", "--restarts", "1")
    run = start(slurm, tmp_path, TASK, *array, *limits, "--", "python", "t.py", "{how}")
    run.wait_for(lambda: all("waits" in output(run.path(task)) for task in (0, 1)))
    begun = run.status()
    assert [begun[task]["state"] for task in range(5)] == ["RUNNING", "RUNNING", *["PENDING"] * 3]
    assert "its turn in Slurm's job" in begun[4]["reason"]
    run.verb("cancel", str(run.path(1)))
    run.wait_for_ends(*range(1, 5))
    assert run.states() == ["RUNNING", "CANCELLED", "FAILED", "COMPLETED", "COMPLETED"]
    run.verb("cancel", str(run.path(0)))
    job = run.end_of_job()
    assert (job.state, job.exit_code) == ("FAILED", 137), "that of the first that failed: a cancelled one has not"
    assert run.states() == ["CANCELLED", "CANCELLED", "FAILED", "COMPLETED", "COMPLETED"]
    assert [run.status()[task]["restarts"] for task in range(5)] == [0, 0, 1, 1, 0]
    assert "killed by SIGKILL" in run.status()[2]["failure"]
    assert "works 1 1 200\n" in (run.path(4) / "task-0.log").read_text(), "a part of the job"
    assert run.verb("logs", str(run.path(4))).startswith("works")


def test_each_task_of_a_packed_job_has_a_time_limit_of_its_own(slurm: Cluster, tmp_path: Path) -> None:
    array = ("--array", "how=is too long,is too long,is too long")
    run = start(slurm, tmp_path, TASK, *array, "--pack", "2", "--time", "0:05", "--", "python", "t.py", "{how}")
    run.wait_for_ends(*range(3))
    job = run.end_of_job()
    assert (job.state, job.exit_code) == ("FAILED", 1)
    assert run.states() == ["TIMEOUT"] * 3
    assert all("5 s" in (run.path(task) / "job.log").read_text() for task in range(3))


@pytest.mark.full
def test_a_job_whose_agent_is_killed_runs_the_unfinished_tasks_again(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm ends its tasks then, and they have not failed for good."""
    limits, array = ("--pack", "2", "--time", "5", "--requeue"), ("--array", "how=works,waits,waits")
    run = start(slurm, tmp_path, TRAINING, *array, *limits, "--", "python", "t.py", "{how}")
    logs = [run.path(task) / "task-0.log" for task in range(3)]
    run.wait_for_ends(0)
    run.wait_for(lambda: all(log.exists() and "step 2\n" in log.read_text() for log in logs))
    commands.run(["scancel", "--signal=KILL", "--batch", run.job], env=slurm.env)
    assert run.end_of_job().state == "FAILED"
    assert run.states() == ["COMPLETED", "FAILED", "FAILED"]
    run.wait_for(lambda: all("runs this task again" in (run.path(task) / "job.log").read_text() for task in (1, 2)))
    commands.run(["scontrol", "requeue", run.job], env=slurm.env)
    run.wait_for_ends(*range(3))
    assert run.end_of_job().state == "COMPLETED"
    assert [turns.last(run.path(task), run.id(task)).starts for task in range(3)] == [1, 2, 2]
    assert len({log.read_text().splitlines()[-1] for log in logs}) == 1, "as without a kill"


@pytest.mark.fault(
    "a job that holds several tasks ends in the middle of them, after a warning (USR1); or its agent is killed",
    "each training saves; the job is requeued and resumes only the tasks that have not finished. After a kill, "
    "`scontrol requeue` does that",
    bound="as for a time limit; after a kill, the steps since the newest checkpoint",
    also=("test_a_job_whose_agent_is_killed_runs_the_unfinished_tasks_again",),
)
@pytest.mark.full
def test_a_job_that_ends_in_the_middle_of_its_tasks_resumes_those(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm warns its steps before its end. Those that have finished do not run again."""
    limits = ("--pack", "2", "--time", "5", "--requeue")
    array = ("--array", "how=waits,works,waits")
    run = start(slurm, tmp_path, TRAINING, *array, *limits, "--", "python", "t.py", "{how}")
    logs = [run.path(task) / "task-0.log" for task in range(3)]
    run.wait_for(lambda: all(log.exists() and "step 2\n" in log.read_text() for log in logs))
    commands.run(["scancel", "--signal=USR1", run.job], env=slurm.env)
    run.wait_for_ends(*range(3))
    job = run.end_of_job()
    assert (job.state, job.restarts) == ("COMPLETED", 1)
    assert [turns.last(run.path(task), run.id(task)).starts for task in range(3)] == [2, 1, 2]
    ends = {log.read_text().splitlines()[-1] for log in logs}
    assert len(ends) == 1, "as without a stop"
    assert "weights" in ends.pop()
    assert logs[2].read_text().count("step 1\n") == 1
