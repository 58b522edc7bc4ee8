"""Every fault that a cluster has to offer, made for real; docs/faults.md is the table of them.

Where a training is said to go on, its metrics and its weights are, bit for bit, those of one that nothing happened to.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import ROOT, Cluster, Place, output, records
from slowness import scaled

from cluster_ddp.sandbox import faults
from cluster_ddp.slurm import commands
from cluster_ddp.slurm.commands import JobStatus
from cluster_ddp.slurm.port import PORT_COUNT

PACED = ("python", str(ROOT / "tests" / "slurm" / "paced_training.py"))
THREE_NODES = ("--nodes", "3", "--gpus-per-node", "1")
# 2 epochs of 20 steps.
TRAINING = ("--dataset", "digits", "--epochs", "2", "--batch-size", "24", "--checkpoint-every", "6steps")
VOLATILE = ("time", "samples_per_s")
ONE_TASK = ("--nodes", "1", "--gpus-per-node", "1")
TWO_TASKS = ("--nodes", "1", "--gpus-per-node", "2")


@dataclass(frozen=True)
class Run:
    """A submitted training."""

    place: Place
    path: Path

    @property
    def job(self) -> str:
        return self.path.name.rpartition("-")[2]

    def status(self) -> JobStatus:
        (status,) = commands.job_statuses(self.job, env=self.place.slurm.env)
        return status

    def metrics(self, folder: Path | None = None) -> list[dict]:
        found = records(folder or self.path)
        return [{key: value for key, value in record.items() if key not in VOLATILE} for record in found]

    def nodes(self) -> list[str]:
        return json.loads((self.path / "run.json").read_text())["topology"]["nodes"]

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 300) -> None:
        deadline = time.monotonic() + scaled(timeout_s)
        while not condition():
            assert time.monotonic() < deadline, f"{self.status()}\n{output(self.path)}"
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        """Until a checkpoint of this step or a later one is there."""
        folder = self.path / "checkpoints"
        self.wait_for(lambda: any(int(path.stem[5:]) >= step for path in folder.glob("step-*.pt")))

    def end(self, timeout_s: float = 600) -> JobStatus:
        return self.place.end_of(self.path, timeout_s)

    def completed(self, *, restarts: int | None = None) -> str:
        status, said = self.end(), output(self.path)
        assert status.state == "COMPLETED", f"{status}\n{said}"
        assert restarts in (None, status.restarts), said
        return said

    def failed(self) -> str:
        status, said = self.end(), output(self.path)
        assert status.state == "FAILED", f"{status}\n{said}"
        assert status.restarts == 0
        return said

    def slurm(self, *command: str) -> None:
        commands.run(command, env=self.place.slurm.env)


Started = dict[str, Run]


def start(
    place: Place,
    *submission: str,
    training: tuple[str, ...] = TRAINING,
    run_dir: Path | None = None,
    command: tuple[str, ...] = PACED,
    backend: str = "sbatch",
    nodes: tuple[str, ...] = THREE_NODES,
    pace_s: float = 0.05,
    **env: object,
) -> Run:
    """Submit a paced training; `env` becomes environment variables, in JSON unless they are texts."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in env.items()}
    words = ["env", f"PACE_S={pace_s}", *(f"{key}={value}" for key, value in texts.items()), *command, *training]
    if run_dir is not None:
        words += ["--run-dir", str(run_dir)]
    return Run(place, place.start(*nodes, "--backend", backend, *submission, "--", *words))


@pytest.fixture(scope="module")
def place(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(slurm, tmp_path_factory.mktemp("it's faulty"))


@pytest.fixture(scope="module")
def uninterrupted(place: Place) -> list[dict]:
    run = start(place, pace_s=0)
    run.completed(restarts=0)
    assert run.metrics()[-1]["kind"] == "done"
    return run.metrics()


@pytest.fixture(scope="module")
def started(uninterrupted: list[dict], place: Place, mnist: Path, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """The jobs whose faults are their own, all at once: they wait for each other's nodes, and the tests for them."""
    folder = tmp_path_factory.mktemp("own faults")
    full = f'mkdir -p "{folder}/full" && mount -t tmpfs -o size=20m none "{folder}/full"'
    elsewhere = f'((SLURM_NODEID == 0)) || mount -t tmpfs none "{mnist}"'
    patient = (*TRAINING, "--collective-timeout-s", f"{scaled(10):g}")
    data = ("--dataset", "mnist", "--dry-run")
    late, wrapped = "until [[ -e go ]]; do sleep 0.2; done", place.slurm.wrapped
    jobs = {
        "limit": start(place, "--time", "1", pace_s=1.2),
        "warned": start(place, "--time", "2", "--signal", "USR1@60", backend="submitit", pace_s=1.8),
        "killed": start(place, "--requeue-on-failure", "2", FAULTS=[{"do": "kill", "rank": 1, "step": 16}]),
        "raises": start(place, nodes=TWO_TASKS, FAULTS=[{"do": "raise", "rank": 1, "step": 3}]),
        "first hangs": start(place, nodes=TWO_TASKS, training=patient, FAULTS=[{"do": "stop", "rank": 0, "step": 3}]),
        "other hangs": start(place, training=patient, FAULTS=[{"do": "stop", "rank": 2, "step": 3}]),
        "full disk": start(
            place,
            nodes=ONE_TASK,
            command=wrapped(full, *PACED),
            run_dir=folder / "full",
            pace_s=0,
            PATIENCE_S="5",
        ),
        "room in the end": start(
            place,
            nodes=ONE_TASK,
            command=wrapped(f"{full}\n{ROOM_IN_THE_END.format(folder=folder)}", *PACED),
            run_dir=folder / "full",
            pace_s=0,
        ),
        "unwritable": start(place, nodes=ONE_TASK, run_dir=Path("/sys/nowhere")),
        "truncated data": start(
            place,
            nodes=ONE_TASK,
            command=wrapped(late, *PACED),
            training=(*data, "--data-dir", str(damaged_copy(mnist, folder / "mnist"))),
        ),
        "data on one node": start(
            place,
            nodes=("--nodes", "2", "--gpus-per-node", "1"),
            command=wrapped(elsewhere, *PACED),
            training=(*data, "--data-dir", str(mnist)),
        ),
        "nan": start(place, nodes=TWO_TASKS, pace_s=0.2, FAULTS=[{"do": "nan", "rank": 1, "step": 9}]),
        "nan goes on": start(
            place,
            nodes=TWO_TASKS,
            training=(*TRAINING, "--on-nan", "continue"),
            FAULTS=[{"do": "nan", "rank": 1, "step": 9}],
        ),
        "clocks": start(place, nodes=("--nodes", "2", "--gpus-per-node", "1"), CLOCK_S={"node1": 3600, "node3": 3600}),
        "no stdout": start(place, nodes=ONE_TASK, command=wrapped("exec >/dev/full", *PACED)),
    }
    (place.folder / "go").touch()
    return jobs


ROOM_IN_THE_END = """(until grep -qs "Trying again, for" "$CLUSTER_DDP_RUN_DIR"/*.log; do sleep 0.2; done
mount -o remount,size=200m "{folder}/full") &"""


def damaged_copy(mnist: Path, folder: Path) -> Path:
    """MNIST, of which the job finds a file cut short that was whole when it was submitted."""
    shutil.copytree(mnist / "MNIST" / "raw", folder / "MNIST" / "raw", copy_function=os.link)
    images = folder / "MNIST" / "raw" / "train-images-idx3-ubyte"
    images.unlink()
    images.write_bytes(b"cut short")
    return folder


def test_a_killed_rank_and_requeue_on_failure(started: Started, uninterrupted: list[dict]) -> None:
    """1. One rank gets SIGKILL in mid-step.

    slurmctld repeats after a minute what a slurmd did not acknowledge. On a busy machine it has ended the second start
    so: the sandbox's jobs start again within seconds (cred_expire=5), where a cluster's wait for two minutes.
    """
    run = started["killed"]
    said = run.completed()
    assert "restart 1" in said
    assert "Failed with status" in said
    assert "step-00000012.pt: step 12, epoch 1" in said
    assert run.metrics() == uninterrupted


def test_an_exception_ends_the_job_and_is_not_tried_again(started: Started) -> None:
    """2. One rank raises."""
    said = started["raises"].failed()
    assert said.count("Traceback (most recent call last)") == 1
    assert re.search(r"^\[rank 1 node\d\] Traceback", said, re.MULTILINE)
    assert "ValueError: the one that matters" in said


@pytest.mark.parametrize(("name", "rank"), [("first hangs", 0), ("other hangs", 2)])
def test_a_hanging_rank_is_named(started: Started, name: str, rank: int) -> None:
    """3. One rank is stopped with SIGSTOP; the others wait no longer than they were told to."""
    said = started[name].failed()
    assert f"Waiting {scaled(10):g} s for the other ranks:" in said
    assert re.search(rf"rank {rank}( on node\d)? did not answer", said)


def test_a_full_disk(started: Started) -> None:
    """15. The second checkpoint does not fit into the file system: each failure is told, training goes on.

    What is not saved in the end is tried again; it is an error if it is lost.
    """
    for said in (lost := started["full disk"].failed(), saved := started["room in the end"].completed()):
        assert said.count("No space left on device. Training goes on; the last good one is") >= 2
        assert said.count("Test set:") == 2
        assert re.search(r"The training has ended, but: .*/step-00000120.pt is not saved: No space left on", said)
    assert re.search(r"error: Writing what is left at the end.*\n.*/step-00000120.pt is not saved: No space", lost)
    assert "error:" not in saved


def test_a_run_folder_that_cannot_be_written(started: Started) -> None:
    """16."""
    said = started["unwritable"].failed()
    assert "Writing to the run directory /sys/nowhere" in said
    assert "Hint: choose a directory that you may write to: --run-dir PATH" in said


def test_data_that_was_cut_short_after_submission(started: Started) -> None:
    """21."""
    said = started["truncated data"].failed()
    assert "train-images-idx3-ubyte is damaged: 9 bytes instead of 47,040,016" in said


def test_data_that_one_node_does_not_see(started: Started) -> None:
    """22. The rank that misses it is named; nobody waits for it."""
    said = started["data on one node"].failed()
    assert re.search(r"\[rank 1 node\d\] error: Reading MNIST from .*\n.*is missing", said)


def test_a_loss_that_is_no_number(started: Started) -> None:
    """23. The rank, the step and the last good checkpoint are named; the weights are not touched."""
    run = started["nan"]
    said = run.failed()
    assert re.search(r"Training, step 9 of epoch 1:\n  rank 1 on node\d: loss nan\.", said)
    assert f"last good checkpoint: {run.path}/checkpoints/step-00000006.pt" in said
    said = started["nan goes on"].completed()
    assert "loss nan. This step's update is left out." in said


def test_clocks_an_hour_apart(started: Started) -> None:
    """24. The end of the job by the clock is not believed, and that is said."""
    said = started["clocks"].completed(restarts=0)
    assert said.count("Clocks can't be right: on node") == 1


def test_a_stdout_that_takes_no_more(started: Started) -> None:
    """30."""
    run = started["no stdout"]
    said = run.completed()
    assert "stdout takes no more output ([Errno 28] No space left on device)" in said
    assert run.metrics()[-1]["kind"] == "done"


def test_many_kills_in_the_middle_of_a_save(place: Place, tmp_path: Path) -> None:
    """11. All ranks get SIGKILL at random offsets from the beginning of a save: no checkpoint is ever unreadable."""
    script = ("python", str(ROOT / "tests" / "slurm" / "killed_saves.py"))
    runs = [Run(place, place.start(*TWO_TASKS, "--", *script, str(tmp_path / name), kills)) for name, kills in KILLS]
    for run in runs:
        run.completed(restarts=0)
    often, never = (Run(place, run.path).metrics(tmp_path / name) for run, (name, _) in zip(runs, KILLS))
    assert often == never
    assert len(list(tmp_path.glob("often/kill-*"))) == 50


KILLS = (("often", "50"), ("never", "0"))


def test_the_time_limit_without_a_warning(started: Started, uninterrupted: list[dict]) -> None:
    """6. No signal: the job stops by the clock."""
    run = started["limit"]
    said = run.completed()
    assert run.status().restarts >= 1
    assert "the job's time is nearly up" in said
    assert run.metrics() == uninterrupted


def test_the_time_limit_with_a_warning(started: Started, uninterrupted: list[dict]) -> None:
    """5. USR1 comes before the limit. With the backend submitit."""
    run = started["warned"]
    said = run.completed()
    assert re.search(r"Stopped after step \d+ \(epoch \d\): rank \d: node\d got USR1", said)
    assert run.status().restarts >= 1
    assert run.metrics() == uninterrupted


def test_a_second_run_in_the_same_folder(place: Place) -> None:
    """28. It is refused, and the first is not disturbed."""
    first = start(place, nodes=ONE_TASK, pace_s=0.3)
    first.wait_for_step(6)
    said = start(place, nodes=ONE_TASK, run_dir=first.path).failed()
    assert f"Using the run folder {first.path}:\n  job {first.job} (process" in said
    assert f"scancel {first.job}" in said
    first.wait_for_step(max(int(path.stem[5:]) for path in first.path.glob("checkpoints/*.pt")) + 1)
    first.slurm("scancel", first.job)


def test_the_last_requeue_and_another_number_of_ranks(place: Place) -> None:
    """26, 27. After --max-requeues the job ends; a new one goes on with what GPUs it gets."""
    run = start(place, "--max-requeues", "0", nodes=TWO_TASKS, pace_s=0.2)
    run.wait_for_step(6)
    run.slurm("scancel", "--signal=USR1", run.job)
    said = run.failed()
    assert run.status().exit_code == 75
    assert "error: stopped in time, but started again 0 times already (--max-requeues 0)." in said
    said = start(place, nodes=ONE_TASK, run_dir=run.path).completed()
    assert "1 ranks instead of 2: same weights and place in the data, new streams of random numbers" in said
    assert run.metrics()[-1]["kind"] == "done"


def test_a_signal_before_the_ranks_have_met(place: Place) -> None:
    """29. Nothing is to be saved yet: the job ends at once."""
    wait = "if ((SLURM_PROCID == 1)); then sleep 86400; fi"
    run = start(place, nodes=TWO_TASKS, command=place.slurm.wrapped(wait, *PACED))
    run.wait_for(lambda: faults.ranks(place.slurm.layout, int(run.job)))
    begun = time.monotonic()
    run.slurm("scancel", "--signal=TERM", run.job)
    run.failed()
    assert time.monotonic() - begun < scaled(20)


@pytest.mark.every_slurm
@pytest.mark.parametrize("backend", ["sbatch", "submitit"])
def test_a_warning_before_there_is_a_checkpointer(place: Place, backend: str) -> None:
    """29. USR1 while a script of one's own has imported nothing yet, and while it reads its data."""
    (place.folder / "early.py").write_text(EARLY)
    run = Run(place, place.start(*TWO_TASKS, "--backend", backend, "--", "python", "early.py"))
    for phase in ("begun", "imported"):
        run.wait_for(lambda phase=phase: len(list(run.path.glob(f"{phase}-*"))) == 2)
        run.slurm("scancel", "--signal=USR1", run.job)
        time.sleep(2)  # it does not die of it
        (run.path / f"after {phase}").touch()
    said = run.completed(restarts=1)
    assert re.search(r"Stopped after step 1 \(epoch 1\): rank \d: node\d got USR1. Saved", said)
    assert "Going on from" in said


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
    checkpoint = cluster_ddp.Checkpoint(world, shard=shard, model=model, optimizer=optimizer)
    for epoch in checkpoint.epochs(1):
        for (numbers,) in shard:
            optimizer.zero_grad()
            model(numbers).sum().backward()
            optimizer.step()
            checkpoint.step()
"""


@pytest.mark.parametrize("backend", ["sbatch", "submitit"])
def test_a_command_of_ones_own_is_requeued(place: Place, backend: str) -> None:
    """It gets the signal; its status 75 queues the job again, in appended logs, and its status 0 ends that."""
    command = ("bash", "-c", BASH) if place.slurm.launcher == "srun" else ("python", "own.py")
    (place.folder / "own.py").write_text(PYTHON)
    run = Run(place, place.start(*TWO_TASKS, "--backend", backend, "--", *command))
    run.wait_for(lambda: output(run.path).count("begun 0") == 2)
    run.slurm("scancel", "--signal=USR1", run.job)
    said = run.completed(restarts=1)
    assert (said.count("begun 0"), said.count("begun 1")) == (2, 2)
    assert said.count("saved") >= 2  # the signal may come twice: from Slurm, and passed on


# As the README says: the ranks wait for each other, and are not ended by the end of the first.
BASH = """trap 'trap "" TERM USR1; echo saved; touch "$CLUSTER_DDP_RUN_DIR/saved-$SLURM_PROCID"
  until [[ -e $CLUSTER_DDP_RUN_DIR/saved-0 && -e $CLUSTER_DDP_RUN_DIR/saved-1 ]]; do sleep 0.1; done
  exit 75' USR1; echo "begun ${SLURM_RESTART_COUNT:-0}"
if ((${SLURM_RESTART_COUNT:-0})); then exit 0; fi; while :; do sleep 0.2; done"""
PYTHON = """import os, signal, sys, time
def save(number, frame):
    signal.signal(number, signal.SIG_IGN)  # Slurm may send it to all processes, so that it comes twice
    print("saved")
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
print("begun", restarts)
while not restarts:
    time.sleep(0.2)
"""


def test_the_controller_is_away_when_a_job_is_to_be_queued_again(place: Place) -> None:
    """31. The batch script asks until slurmctld is back."""
    run = Run(place, place.start(*ONE_TASK, "--time", "10", "--", "bash", "-c", STOPS_LATER))
    run.wait_for(lambda: "begun 0" in output(run.path))
    time.sleep(6)  # killed, slurmctld forgets its last seconds, and with them that the job has started
    (run.path / "stop").touch()
    faults.restart_controller(place.slurm.layout, after_s=45)
    said = run.completed(restarts=1)
    assert "Slurm said: " in said and "begun 1" in said


STOPS_LATER = """echo "begun ${SLURM_RESTART_COUNT:-0}"; ((${SLURM_RESTART_COUNT:-0} == 0)) || exit 0
until [[ -e $CLUSTER_DDP_RUN_DIR/stop ]]; do sleep 0.1; done; sleep 2; exit 75"""


def test_slurm_may_refuse_to_queue_a_job_again(place: Place) -> None:
    """27. Its words are in the error."""
    said = Run(place, place.start(*ONE_TASK, "--no-requeue", "--", "bash", "-c", "exit 75")).failed()
    assert "Slurm said: Requested operation is presently disabled" in said


def test_a_stale_stop_marker_queues_nothing_again(place: Place) -> None:
    """A rank of an earlier start may leave it late. A command that says 0 though it was stopped is not done."""
    late = 'for i in {0..9}; do touch "$CLUSTER_DDP_RUN_DIR/.stopped" "${CLUSTER_DDP_STOPPED%-*}-$((i + 1))"; done'
    stale = Run(place, place.start(*ONE_TASK, "--", "bash", "-c", late))
    hidden = Run(place, place.start(*ONE_TASK, "--", "bash", "-c", 'touch "$CLUSTER_DDP_STOPPED"'))
    stale.completed(restarts=0)
    assert "but the command ended with status 0" in hidden.failed()


def test_torchrun_passes_the_signal_on(place: Place) -> None:
    command = ("python", "-m", "cluster_ddp.train")
    training = (*TRAINING, "--epochs", "6")
    nodes = ("--nodes", "2", "--gpus-per-node", "1", "--launcher", "torchrun")
    run = start(place, nodes=nodes, command=command, training=training)
    run.wait_for_step(6)
    run.slurm("scancel", "--signal=USR1", run.job)
    said = run.completed(restarts=1)
    assert "got USR1" in said
    assert "Going on from" in said


@pytest.mark.every_slurm
def test_a_rendered_arrays_task_is_requeued_alone(slurm: Cluster, tmp_path: Path) -> None:
    """jobs/mnist_array.sbatch as users submit it: the one that is warned stops, saves and goes on."""
    arguments = ("--dataset", "digits", "--epochs", "8", "--run-dir", f"{tmp_path}/{{}}")
    rendered = slurm.job("mnist_array")
    text = rendered if isinstance(rendered, str) else rendered.read_text()
    script = text.replace('exec "$@"\'', 'exec "${@/{\\}/$SLURM_ARRAY_TASK_ID}"\'')
    options = ("--array=0-1", "--ntasks-per-node=1", "--gres=gpu:1")
    job = slurm.submit(script, tmp_path, *arguments, options=options)
    deadline = time.monotonic() + scaled(300)
    while not list(tmp_path.glob("1/checkpoints/*.pt")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    commands.run(["scancel", "--signal=USR1", f"{job.job_id}_1"], env=slurm.env)
    job.succeed()
    statuses = commands.job_statuses(job.job_id, env=slurm.env)
    assert {status.array_task: status.restarts for status in statuses} == {"0": 0, "1": 1}
    assert [records(tmp_path / task)[-1]["kind"] for task in "01"] == ["done", "done"]


def test_two_jobs_that_meet_on_the_same_port(place: Place) -> None:
    """19. Their ids are so far apart that their first candidate is the same; one waits there while the other meets."""
    hello = ("python", str(ROOT / "examples" / "hello_ddp.py"))
    where = ("--nodes", "2", "--gpus-per-node", "1", "--sbatch-options=--nodelist=node3,node4")
    late = "if ((SLURM_PROCID == 1)); then until [[ -e met ]]; do sleep 0.2; done; fi"
    first = Run(place, place.start(*where, "--", *place.slurm.wrapped(late, *hello)))
    first.wait_for(lambda: faults.ranks(place.slurm.layout, int(first.job)))
    other_id = int(first.job) + PORT_COUNT
    again = ("env", "MASTER_PORT=", f"SLURM_JOB_ID={other_id}", *hello)
    second = Run(place, place.start(*where, "--", *again))
    assert "The sum of all ranks is 1." in second.completed()
    (place.folder / "met").touch()
    assert "The sum of all ranks is 1." in first.completed()


@pytest.mark.every_slurm
def test_preemption_while_a_save_is_under_way(place: Place, uninterrupted: list[dict]) -> None:
    """7, 8, 17. An urgent job takes the nodes while a checkpoint is being written to a slow disk."""
    run = start(place, FSYNC_S="0.5")
    run.wait_for(lambda: list(run.path.glob("checkpoints/.step-*.tmp")))
    urgent = place.slurm.submit(URGENT, place.folder)
    urgent.succeed()
    said = run.completed(restarts=1)
    assert re.search(r"Stopped after step \d+ .* got TERM", said)
    assert "this one is left out" in said  # training does not wait for the disk
    assert run.metrics() == uninterrupted


def test_a_file_system_that_hangs(place: Place, uninterrupted: list[dict], tmp_path: Path) -> None:
    """17. Longer than ranks wait for each other: training does not wait for it, and what hangs is named."""
    image, mounted = tmp_path / "image", tmp_path / "hangs"
    mounted.mkdir()
    with open(image, "wb") as file:
        file.truncate(200 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mount = f'if ((SLURM_PROCID == 0)); then mount -o loop "{image}" "{mounted}"; fi'
    training = (*TRAINING, "--collective-timeout-s", "10")
    run = start(place, training=training, command=place.slurm.wrapped(mount, *PACED), run_dir=mounted, pace_s=0.3)
    run.wait_for(lambda: len(faults.ranks(place.slurm.layout, int(run.job))) == 3)
    seen = Path(f"/proc/{faults.ranks(place.slurm.layout, int(run.job))[0].pid}/root{mounted}")
    run.wait_for(lambda: list(seen.glob("checkpoints/step-*.pt")))
    folder = os.open(seen, os.O_RDONLY)  # keeps it mounted
    try:
        fcntl.ioctl(folder, FREEZE, 0)
        try:
            time.sleep(30)
        finally:
            fcntl.ioctl(folder, THAW, 0)
        said = run.completed(restarts=0)
        assert "this one is left out" in said
        assert re.search(rf"Still being written: {mounted}/\S+, for \d+ s\. Does its file system hang\?", said)
        assert run.metrics(Path(f"/proc/self/fd/{folder}")) == uninterrupted
    finally:
        os.close(folder)


FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of linux/fs.h
URGENT = "#!/bin/bash\n#SBATCH --partition=urgent --nodes=4 --exclusive --time=1\nsleep 1\n"


def test_an_arrays_task_is_requeued_alone_and_the_controller_is_restarted(
    place: Place, uninterrupted: list[dict]
) -> None:
    """9, 13. The siblings of a requeued array task go on; so do all when slurmctld is killed and started again."""
    first = start(place, "--array", "0-1", pace_s=0.5)
    runs = [first, Run(place, Path(f"{str(first.path)[:-1]}1"))]
    for run in runs:
        run.wait_for_step(6)
    time.sleep(6)  # killed, slurmctld forgets its last seconds, and with them that a job has started
    faults.restart_controller(place.slurm.layout, after_s=2)
    commands.run(["scontrol", "requeue", f"{runs[1].job}"], env=place.slurm.env)
    for run, restarts in zip(runs, (0, 1)):
        run.completed(restarts=restarts)
        assert run.metrics() == uninterrupted


def test_scancel_is_final_and_a_new_job_goes_on(place: Place, uninterrupted: list[dict]) -> None:
    """10, 14. After scancel nothing is requeued. The newest checkpoint is damaged: the one before is used."""
    run = start(place)
    run.wait_for_step(12)
    run.slurm("scancel", run.job)
    status = run.end()
    assert (status.state, status.restarts) == ("CANCELLED", 0)
    assert "got TERM" in output(run.path)
    newest = max(run.path.glob("checkpoints/*.pt"))
    os.truncate(newest, newest.stat().st_size // 2)
    again = start(place, run_dir=run.path)
    said = again.completed()
    assert f"{newest.name} is damaged: its end is missing. It is set aside as {newest.name}.damaged" in said
    assert "Going on from" in said
    assert again.metrics(run.path) == uninterrupted


def test_strangers_at_the_stores_port(place: Place, uninterrupted: list[dict]) -> None:
    """20. Whatever connects to the ports of rank 0 and talks nonsense does not disturb the training."""
    run = start(place)
    run.wait_for_step(6)
    rank_0 = faults.ranks(place.slurm.layout, int(run.job))[0]
    into = ["nsenter", "--net", f"--target={rank_0.pid}"]
    sockets = subprocess.run([*into, "ss", "-Hltnp"], capture_output=True, text=True).stdout.splitlines()
    ports = {line.split()[3].rpartition(":")[2] for line in sockets if f"pid={rank_0.pid}," in line}
    assert len(ports) >= 2  # the store's and gloo's
    talk = "".join(f"(head -c 4096 /dev/urandom >/dev/tcp/{rank_0.node}/{port}) & " for port in sorted(ports))
    subprocess.run([*into, "timeout", "5", "bash", "-c", f"{talk} wait"])
    run.completed(restarts=0)
    assert run.metrics() == uninterrupted


def test_two_requeues_in_a_row_the_second_by_a_lost_node(place: Place, uninterrupted: list[dict]) -> None:
    """4, 12, 25. Queued again by hand; then a node's network is cut, its slurmd and tasks are killed: Slurm starts the
    job again on others."""
    run = start(place)
    run.wait_for_step(6)
    run.slurm("scontrol", "requeue", run.job)
    run.wait_for_step(18)
    lost = run.nodes()[0]  # the one where the ranks have met
    faults.lose_node(place.slurm.layout, lost)
    try:
        run.completed(restarts=2)
    finally:
        faults.bring_back_node(place.slurm.layout, lost)
    assert lost not in run.nodes()
    assert run.metrics() == uninterrupted
