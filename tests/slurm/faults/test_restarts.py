"""Failed trainings that start again in their allocation, on spare nodes if need be; and those that are requeued."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos import faults
from cluster import Place, output, selected
from paced_run import PACED, TRAINING
from restarting import Job, launch
from slowness import scaled

from cluster_ddp.jobs.report import cost, training_stats
from cluster_ddp.jobs.status import RunStatus
from cluster_ddp.run.names import File
from cluster_ddp.sandbox import daemons, network

RESUMING = Path(__file__).with_name("resuming")
SPARE, SPARES = (("--restarts", "9", "--spare-nodes", count) for count in "12")
KILLED = "killed by SIGKILL"


@pytest.fixture(scope="module")
def started(place: Place, uninterrupted: list[dict]) -> dict[str, Job]:
    """The jobs whose faults are their own, all at once: they wait for each other's nodes, and the tests for them."""
    limits = ("--collective-timeout-s", "600", "--hang-warning-s", f"{scaled(3):g}")
    sick = place.folder / "sick" / "python"
    sick.parent.mkdir()
    sick.write_text(SICK_PYTHON.format(python=shutil.which("python", path=place.slurm.env["PATH"])))
    sick.chmod(0o755)
    (place.folder / "raises.py").write_text(RAISES)
    return {
        "stopped": launch(
            place,
            *SPARES,
            *("--hang-restart-s", f"{scaled(3):.0f}"),
            nodes=4,
            command=(str(sick), *PACED[1:], *TRAINING, *limits),
            env={"FAULTS": [{"do": "stop", "rank": 1, "step": 8}]},
        ),
        "raises": launch(
            place,
            *("--restarts", "9"),
            nodes=1,
            sbatch=("--gres=gpu:2", "--ntasks-per-node=2"),
            command=("python", "raises.py"),
        ),
    }


@pytest.fixture(scope="module")
def resuming(place: Place, started: dict[str, Job], request: pytest.FixtureRequest) -> dict[str, Job]:
    """Those of scripts that do not use cluster_ddp, for the tests of this session."""
    last = place.folder / "o" / "last.pth.tar"
    snapshot = ("python", str(RESUMING / "snapshot.py"), str(place.folder / "snapshot.pt"))
    path = ("python", str(RESUMING / "resume_path.py"), "--output", str(last.parent))
    init = ("python", str(RESUMING / "init_from.py"), f"--out_dir={place.folder}/gpt")
    resume, from_resume = (
        ("--restarts", "1", "--restart-args", word)
        for word in (f"--resume {shlex.quote(str(last))}", "--init_from=resume")
    )
    on_two, of_array = ("--gres=gpu:2",), ("--gres=gpu:1", "--array=3")
    jobs: dict[str, Callable[[], Job]] = {
        "snapshot": lambda: launch(place, "--restarts", "1", command=snapshot, launcher="srun"),
        "path": lambda: launch(place, *resume, nodes=1, sbatch=on_two, command=path, launcher="fork"),
        "init": lambda: launch(place, *from_resume, nodes=1, sbatch=of_array, command=init, launcher="srun"),
    }
    return {name: begin() for name, begin in jobs.items() if name in selected(request, "name")}


SICK_PYTHON = """#!/bin/bash
[[ $SLURMD_NODENAME == node3 ]] || exec "{python}" "$@"
exec unshare --mount bash -c 'mount -t tmpfs -o ro none /dev/shm && exec "$0" "$@"' "{python}" "$@"
"""
RAISES = """import os, pathlib, sys, time
start, here = os.environ["CLUSTER_DDP_START"], pathlib.Path()
print("start", start)
(here / f"raises.{start}.{os.environ['RANK']}").touch()
while len([*here.glob(f"raises.{start}.?")]) < 2:  # on a busy machine the other rank may begin seconds later
    time.sleep(0.05)
raise ValueError(f"no such column: {sys.argv[0]}")
"""


@pytest.mark.fault(
    "a warning signal or scancel during a restart",
    "as without a restart: the job stops in time and is requeued, or is cancelled",
)
@pytest.mark.full
def test_a_warning_and_a_cancellation_while_a_restart_is_under_way(place: Place) -> None:
    killed = [{"do": "kill", "rank": 0, "step": step, "start": number} for step, number in ((8, 0), (14, 2))]
    job = launch(place, "--restarts", "9", nodes=1, env={"FAULTS": killed, "PACE_S": "0.5"})
    job.wait_for_failures(1)
    job.slurm("scancel", "--batch", "--signal=USR1", job.job)
    job.wait_for_failures(2)
    said = output(job.path)
    assert re.search(r"Stopped after step \d+ \((after )?epoch \d\): rank 0: node\d got USR1", said), said
    assert f"Stopped in time: requeueing job {job.job} (restart 2)." in said, said
    job.slurm("scancel", job.job)
    status = job.end()
    assert (status.state, status.restarts) == ("CANCELLED", 1), output(job.path)


def test_a_job_that_needs_no_spare_ends_without_a_word_of_slurms(place: Place) -> None:
    """It ends after the step of the spares: else Slurm kills that, and says so in the last lines of a sound job."""
    said = launch(place, *SPARE, command=("true",)).completed(restarts=0)
    assert "srun: " not in said and "slurmstepd" not in said, said


@pytest.mark.fault(
    "a rank is stopped (SIGSTOP); with `--restarts` and spares, one of them sick",
    "the hang's verdict names the node, and the job leaves it out; the sick spare is found before use; another one "
    "takes over",
    bound="`--hang-warning-s` + `--hang-restart-s` + 10 s; without the latter, `--collective-timeout-s` + 10 s",
)
def test_a_stopped_rank_is_left_behind_for_a_spare_that_is_not_sick(
    started: dict[str, Job], uninterrupted: list[dict]
) -> None:
    """Long before the collective timeout."""
    job = started["stopped"]
    said = job.completed(restarts=0)
    verdict = r"rank 0 on node1: Waiting \d+ s for rank 1 on node2 to answer: rank 0 .* waits in .*; rank 1 on"
    assert re.search(verdict, said), said
    (failed,) = job.failures()
    assert (failed.node, failed.then, {*failed.without}) == ("node2", "restart", {"node2", "node3"}), said
    assert re.search("Left out from now on: node3: .*/dev/shm can't be written", said), said
    assert (job.path / File.SICK_NODES).read_text().startswith("node2 ")
    assert job.nodes() == ["node1", "node4"]
    assert job.metrics() == uninterrupted
    # Of four nodes with a GPU each, two wait at each time. Saves are known of a start that has trained for ten seconds.
    found = cost.read(RunStatus(job="", name="", state="unknown", run_dir=job.path))
    least = found.gpu_hours / 2 + (failed.lost_s - 0.5) / 1800
    if training_stats.read(job.path).saves_s is None:
        assert found.lost_gpu_hours is None
    else:
        assert least < found.lost_gpu_hours < found.gpu_hours


@pytest.mark.fault(
    "a rank is killed in a script that does not use cluster_ddp; with `--restarts`",
    "the same command runs again with the words of `--restart-args`, and finds its own checkpoint",
)
@pytest.mark.parametrize(
    ("name", "begins"),
    [
        pytest.param("path", "from epoch 2", id="as timm does, by --restart-args"),
        *(
            pytest.param(name, begins, id=id, marks=pytest.mark.full)
            for name, begins, id in (
                ("snapshot", "from epoch 2", "as multinode.py does"),
                ("init", "from iteration 4", "as nanoGPT does, by --restart-args, in an array"),
            )
        ),
    ],
)
def test_a_script_without_cluster_ddp_resumes(name: str, begins: str, resuming: dict[str, Job]) -> None:
    job = resuming[name]
    said = job.completed(restarts=0)
    assert [(one.words, one.then, one.start) for one in job.failures()] == [(KILLED, "restart", 0)], said
    assert begins in said and "done " in said, said


@pytest.mark.fault(
    "a user's error repeats at each start; with `--restarts`",
    "twice on all ranks, or at the same step: the job ends, and its log ends with the error",
    bound="seconds",
    also=("test_what_follows",),
)
def test_a_users_error_that_repeats_ends_the_job_with_its_words(started: dict[str, Job]) -> None:
    job = started["raises"]
    said = job.failed()
    assert sorted(re.findall("^start (.)$", said, re.MULTILINE)) == ["0", "0", "1", "1"], said
    assert said.count("ValueError: no such column: raises.py; not started again.") == 1
    assert re.search(r"Failed first, with status 1: rank \d on node\d: ValueError: no such column: raises.py", said)


@contextmanager
def given_back(place: Place, *nodes: str) -> Iterator[None]:
    """In the end, these nodes are there again."""
    try:
        yield
    finally:
        for node in nodes:
            network.ip("link", "set", place.slurm.layout.link(node), "up")
        daemons.wait_until_usable(place.slurm.layout, nodes, [])


@pytest.mark.fault(
    "a node's link is cut, its processes live on; with `--restarts` and a spare",
    "the job notices after 4 to 6 s and gives the node back to Slurm; the node's ranks end themselves; the spare "
    "takes over; the job outlives the node's DOWN. Also if rank 0 is there and collectives wait for ten minutes",
    bound="seconds",
)
@pytest.mark.every_slurm
def test_faults_in_one_allocation(place: Place, uninterrupted: list[dict]) -> None:
    """Rank 0 is killed, again: its node, which is the batch host, is left out. Then rank 0's new node is cut off.

    Its processes live on. Ranks wait for each other for ten minutes, the job does not, and it outlives the node's end.
    """
    killed = [{"do": "kill", "rank": 0, "step": step, "start": number} for step, number in ((8, 0), (14, 1))]
    waits = [{"do": "wait", "rank": 0, "step": 30, "start": 3}]
    patient = (*PACED, *TRAINING, "--collective-timeout-s", "600")
    job = launch(place, *SPARES, nodes=4, command=patient, env={"FAULTS": [*killed, *waits], "PACE_S": "0.2"})
    cut, _ = job.ranks(2)
    job.wait_for_step(18)
    with given_back(place, cut.node):
        network.ip("link", "set", place.slurm.layout.link(cut.node), "down")
        job.ranks(3)
        daemons.wait_until_given_up(place.slurm.layout, cut.node)
        (job.path / "go").touch()
        said = job.completed(restarts=0)
    kept = [(one.node, one.words, one.without) for one in job.failures()]
    assert kept == [
        ("node1", KILLED, ()),
        ("node1", KILLED, ("node1",)),
        ("node2", "the node does not answer", ("node2",)),
    ], said
    assert (cut.node, job.nodes(), job.nodes_asked_for()) == ("node2", ["node3", "node4"], 3)
    assert job.metrics() == uninterrupted


@pytest.mark.fault(
    "more nodes are lost than there are spares; the batch host is lost; with `--restarts`",
    "the job is requeued, asks for all its nodes again, and resumes. On 22.05 without slurmdbd, Slurm lets a job give "
    "nodes back only once; after that it ends and requeues the job itself",
    bound="Slurm's SlurmdTimeout at most",
)
@pytest.mark.full
def test_more_lost_nodes_than_spares_and_a_lost_batch_host(place: Place, uninterrupted: list[dict]) -> None:
    """The job is requeued with all nodes that it has asked for.

    It asks for no GPUs: Slurm 22.05 forgets those of a job that has given nodes back and is requeued beside a lost one.
    """
    job = launch(place, *SPARE, nodes=3, sbatch=(), env={"PACE_S": "0.4"})
    layout, lost = place.slurm.layout, []
    for start, then in enumerate(("restart", "requeue")):
        lost.append(job.ranks(start)[1].node)
        job.wait_for_step(6 * (start + 1))
        faults.lose_node(layout, lost[-1])
        failed = job.wait_for_failures(start + 1)
        assert (failed.node, failed.then) == (lost[-1], then), output(job.path)
    job.wait_for(lambda: job.status().state == "PENDING")
    for node in lost:
        faults.bring_back_node(layout, node)
    job.ranks(2)
    assert job.nodes_asked_for() == 3
    job.wait_for_step(18)
    host = job.batch_host()
    faults.lose_node(layout, host)
    daemons.wait_until_given_up(layout, host)
    faults.bring_back_node(layout, host)
    said = job.completed(restarts=2)
    assert job.metrics() == uninterrupted, said
