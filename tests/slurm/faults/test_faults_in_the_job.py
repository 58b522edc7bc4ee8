"""Faults in the job itself: its ranks, its data, its disk, its clocks, its time limit."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from cluster import Place
from paced_run import LARGE, ONE_TASK, PACED, TRAINING, TWO_TASKS, Run, Started, start
from slowness import scaled

from cluster_ddp.run.names import File


@pytest.fixture(scope="module")
def started(uninterrupted: list[dict], place: Place, mnist: Path, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """The jobs whose faults are their own, all at once: they wait for each other's nodes, and the tests for them."""
    folder = tmp_path_factory.mktemp("own faults")
    full = FULL.format(folder=folder)
    elsewhere = f'((SLURM_NODEID == 0)) || mount -t tmpfs none "{mnist}"'
    data = ("--dataset", "mnist", "--dry-run")
    late, wrapped = "until [[ -e go ]]; do sleep 0.2; done", place.slurm.wrapped
    jobs = {
        "limit": start(place, "--time", "1", pace_s=1.2),
        "warned": start(place, "--time", "2", "--signal", "USR1@60", pace_s=1.8),
        "killed": start(place, "--restarts", "6", FAULTS=[{"do": "kill", "rank": 1, "step": 16}]),
        "hangs": start(place, training=PATIENT, FAULTS=[{"do": "stop", "rank": 1, "step": 3}]),
        "full disk": start(
            place,
            nodes=ONE_TASK,
            training=LARGE,
            command=wrapped(full, *PACED),
            run_dir=folder / "full",
            pace_s=0,
            PATIENCE_S="5",
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
            command=wrapped(elsewhere, *PACED),
            training=(*data, "--data-dir", str(mnist)),
        ),
        "nan": start(place, nodes=TWO_TASKS, pace_s=0.2, FAULTS=[{"do": "nan", "rank": 1, "step": 9}]),
    }
    (place.folder / "go").touch()
    return jobs


@pytest.fixture(scope="module")
def others(started: Started, place: Place, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """More of them, for the tests that only `make test-all` has."""
    folder = tmp_path_factory.mktemp("more faults")
    room = place.slurm.wrapped(f"{FULL}\n{ROOM_IN_THE_END}".format(folder=folder), *PACED)
    nan, hang = ([{"do": do, "rank": 0, "step": step}] for do, step in (("nan", 9), ("stop", 3)))
    return {
        "rank 0 hangs": start(place, nodes=TWO_TASKS, training=PATIENT, FAULTS=hang),
        "room in the end": start(
            place, nodes=ONE_TASK, training=LARGE, command=room, run_dir=folder / "full", pace_s=0
        ),
        "clocks": start(place, "--sbatch-options=--nodelist=node1,node2", CLOCK_S={"node1": 3600}),
        "no stdout": start(place, nodes=ONE_TASK, command=place.slurm.wrapped("exec >/dev/full", *PACED)),
        "nan continues": start(place, nodes=ONE_TASK, training=(*TRAINING, "--on-nan", "continue"), FAULTS=nan),
    }


PATIENT = (*TRAINING, "--collective-timeout-s", f"{scaled(10):g}")
FULL = 'mkdir -p "{folder}/full" && mount -t tmpfs -o size=20m none "{folder}/full"'
ROOM_IN_THE_END = """(until grep -qs "Trying again, for" "$CLUSTER_DDP_RUN_DIR"/*.log; do sleep 0.2; done
mount -o remount,size=200m "{folder}/full") &"""


def damaged_copy(mnist: Path, folder: Path) -> Path:
    """MNIST, of which the job finds a file cut short that was whole when it was submitted."""
    shutil.copytree(mnist / "MNIST" / "raw", folder / "MNIST" / "raw", copy_function=os.link)
    images = folder / "MNIST" / "raw" / "train-images-idx3-ubyte"
    images.unlink()
    images.write_bytes(b"cut short")
    return folder


@pytest.mark.fault(
    "one rank gets SIGKILL (for example, out of memory)",
    "the others name it or lose their connection, and end; the job is FAILED. With `--restarts N`, all ranks restart "
    "in the allocation (same job id, Slurm's restart count stays) and resume. On GPUs (not tested), ranks that wait "
    "for it in a kernel end after KillWait, or after about seven seconds if it was rank 0",
    bound="seconds",
    also=("test_faults_in_one_allocation",),
)
def test_a_killed_rank_starts_again_in_the_allocation(started: Started, uninterrupted: list[dict]) -> None:
    """One rank gets SIGKILL in mid-step."""
    run = started["killed"]
    said = run.completed(restarts=0)
    assert "Starting again in the allocation, from step-00000012.pt, after rank 1 on node" in said
    first = r"Failed first, with status 137: (rank 1 on node\d: killed by SIGKILL)"
    words = re.search(rf"^{first}\n  Its log: .*/task-1.log$", said, re.MULTILINE)
    assert words, said
    causes = [json.loads(line).get("cause") for line in (run.path / File.STARTS).read_text().splitlines()]
    assert f"Failed first: {words[1]}" in causes
    assert "step-00000012.pt: step 12, epoch 1" in said
    assert run.metrics() == uninterrupted


@pytest.mark.fault(
    "one rank hangs (SIGSTOP)",
    "FAILED; the log ends with where each rank is: `… waits in all_reduce #24 (train.py:104); rank 2 on node3 does "
    "not answer …`. Later C++ output is in `stack-rankN.txt`. On GPUs, if your own loop waits for the device, NCCL's "
    "watchdog ends it about a minute after twice `--collective-timeout-s`, and names no rank (not tested)",
    bound="`--collective-timeout-s` (600) + 10 s",
    also=("test_a_hanging_rank_0_is_named_and_not_the_node_of_both",),
)
def test_a_hanging_rank_is_named(started: Started) -> None:
    """One rank is stopped with SIGSTOP; the others wait no longer than they were told to."""
    node = names_the_hanging_rank(started["hangs"], 1)
    noted = [path.read_text() for path in started["hangs"].path.glob(File.SICK_NODES)]
    assert noted == [f"{node} its ranks do not answer\n"]


@pytest.mark.full
def test_a_hanging_rank_0_is_named_and_not_the_node_of_both(others: Started) -> None:
    run = others["rank 0 hangs"]
    names_the_hanging_rank(run, 0)
    assert not [*run.path.glob(File.SICK_NODES)]


def names_the_hanging_rank(run: Run, rank: int) -> str:
    """Check what is said of it; returns its node."""
    said = run.failed()
    assert f"Waiting {scaled(10):g} s for the other ranks:" in said
    verdict = (run.path / File.HANG).read_text().strip()
    last = said.partition("for the other ranks:")[2]
    assert verdict in last
    waits = rf"rank {1 - rank} on node\d waits in (?:all_reduce|broadcast)( #\d+)? \(\w+\.py:\d+\)"
    silent = re.match(rf"{waits}; rank {rank} on (node\d) (is stopped|does not answer)", verdict)
    assert silent, verdict
    return silent[2]


def test_a_full_disk(started: Started) -> None:
    """The second checkpoint does not fit into the file system. The log has each failure, and training continues.

    What is not saved in the end is tried again; it is an error if it is lost.
    """
    lost = started["full disk"].failed()
    tells_each_failure(lost)
    assert re.search(r"error: Writing what is left at the end.*\n.*/step-00000080.pt is not saved: No space", lost)


@pytest.mark.full
def test_room_on_the_disk_in_the_end(others: Started) -> None:
    saved = others["room in the end"].completed()
    tells_each_failure(saved)
    assert "error:" not in saved


def tells_each_failure(said: str) -> None:
    assert said.count("No space left on device. Training continues; the last good one is") >= 2
    assert said.count("Test set:") == 2
    assert re.search(r"The training has ended, but: .*/step-00000080.pt is not saved: No space left on", said)


@pytest.mark.fault("the run directory can't be written", "an error before any training; status 2", bound="seconds")
def test_a_run_dir_that_cannot_be_written(started: Started) -> None:
    said = started["unwritable"].failed()
    assert "Writing to the run directory /sys/nowhere" in said
    assert "Hint: choose a directory that you may write to: --run-dir PATH" in said


@pytest.mark.fault(
    "data is cut short after submission",
    "an error names the file, its size and the expected size; status 2",
    bound="seconds",
)
def test_data_that_was_cut_short_after_submission(started: Started) -> None:
    said = started["truncated data"].failed()
    assert "train-images-idx3-ubyte is damaged: 9 bytes instead of 47,040,016" in said


@pytest.mark.fault(
    "only one node sees the data", "an error names the rank and node that lack it; status 2", bound="seconds"
)
def test_data_that_one_node_does_not_see(started: Started) -> None:
    """The rank that misses it is named; nobody waits for it."""
    said = started["data on one node"].failed()
    assert re.search(r"\[rank 1 node\d\] error: Reading MNIST from .*\n.*is missing", said)


@pytest.mark.fault(
    "the loss is NaN on one rank",
    "stops before the update; names rank, step and last good checkpoint. `--on-nan continue` skips that update. On a "
    "GPU (not tested), without that option, it stops before the next log line and the next save",
    bound="one step",
    also=("test_a_step_whose_loss_is_no_number_is_skipped",),
)
def test_a_loss_that_is_no_number(started: Started) -> None:
    """The rank, the step and the last good checkpoint are named; the weights are not touched."""
    run = started["nan"]
    said = run.failed()
    assert re.search(r"Training, step 9 of epoch 1:\n  rank 1 on node\d: loss nan\.", said)
    assert f"last good checkpoint: {run.path.resolve()}/checkpoints/step-00000006.pt" in said


@pytest.mark.full
def test_a_step_whose_loss_is_no_number_is_skipped(others: Started) -> None:
    assert "loss nan. The update of this step is skipped." in others["nan continues"].completed()


@pytest.mark.fault(
    "the nodes' clocks are an hour apart",
    "a warning; the job ignores the clock and stops only on signals",
    also=("test_clocks_an_hour_apart_are_not_believed",),
)
@pytest.mark.full
def test_clocks_an_hour_apart(others: Started) -> None:
    """The end of the job by the clock is not believed, and that is said."""
    said = others["clocks"].completed(restarts=0)
    assert said.count("Clocks can't be right: on node") == 1


@pytest.mark.fault(
    "stdout can't be written (log volume full)",
    "one message on stderr; training continues. If Slurm can't write a rank's output, that rank blocks once a pipe is "
    "full",
)
@pytest.mark.full
def test_a_stdout_that_takes_no_more(others: Started) -> None:
    run = others["no stdout"]
    said = run.completed()
    assert "stdout takes no more output ([Errno 28] No space left on device)" in said
    assert run.metrics()[-1]["kind"] == "done"


@pytest.mark.full
def test_many_kills_in_the_middle_of_a_save(place: Place, tmp_path: Path) -> None:
    """All ranks get SIGKILL at random offsets from the beginning of a save: no checkpoint is ever unreadable."""
    script = ("python", str(Path(__file__).with_name("killed_saves.py")))
    runs = [Run(place, place.start(*TWO_TASKS, "--", *script, str(tmp_path / name), kills)) for name, kills in KILLS]
    for run in runs:
        run.completed(restarts=0)
    often, never = (Run(place, run.path).metrics(tmp_path / name) for run, (name, _) in zip(runs, KILLS))
    assert often == never
    assert len(list(tmp_path.glob("often/kill-*"))) == 25


KILLS = (("often", "25"), ("never", "0"))


@pytest.mark.fault(
    "time limit, no signal",
    "as with a warning, but by the clock: 60 s before the end, or a quarter of a limit under four minutes",
)
def test_the_time_limit_without_a_warning(started: Started, uninterrupted: list[dict]) -> None:
    """No signal: the job stops by the clock."""
    run = started["limit"]
    said = run.completed()
    assert run.status().restarts >= 1
    assert "the job's time is nearly up" in said
    assert run.metrics() == uninterrupted


@pytest.mark.fault(
    "time limit, with USR1 before it",
    "saves and exits with status 75; the batch script requeues the job; resumes. (Without `Checkpointer`: [what a "
    "command must do](how-to/requeue.md))",
    bound="a second or two steps, + one save",
)
def test_the_time_limit_with_a_warning(started: Started, uninterrupted: list[dict]) -> None:
    """USR1 comes before the limit."""
    run = started["warned"]
    said = run.completed()
    assert re.search(r"Stopped after step \d+ \((after )?epoch \d\): rank \d: node\d got USR1", said)
    assert run.status().restarts >= 1
    assert run.metrics() == uninterrupted


@pytest.mark.fault(
    "a second job in the same run directory",
    "refused; the error names the first job's id and host; that job is not disturbed",
    bound="seconds",
)
def test_a_second_run_in_the_same_folder(place: Place) -> None:
    """It is refused, and the first is not disturbed."""
    first = start(place, nodes=ONE_TASK, training=(*TRAINING, "--epochs", "1000"), pace_s=0.3)
    first.wait_for_step(6)
    said = start(place, nodes=ONE_TASK, run_dir=first.path).failed()
    assert f"Using the run directory {first.path}:\n  job {first.job} (process" in said
    assert f"scancel {first.job}" in said
    first.wait_for_step(max(int(path.stem[5:]) for path in first.path.glob("checkpoints/*.pt")) + 1)
    first.slurm("scancel", first.job)
