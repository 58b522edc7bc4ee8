"""Faults of what the job runs on: nodes, slurmctld, file systems, the network, other jobs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from chaos import faults
from cluster import ROOT, Place, output
from paced_run import ONE_BASH, PACED, TRAINING, Run, held, start
from restarting import launch
from slowness import stays

from cluster_ddp.run.names import File
from cluster_ddp.slurm import commands
from cluster_ddp.slurm.port import PORT_COUNT


@pytest.mark.fault(
    "slurmctld is down when a job is to be requeued",
    "the batch script retries for half an hour and prints Slurm's message; then the job is requeued and resumes. "
    "While slurmctld is down, no time limit ends the job; if it is back after the limit, it may end the job first "
    "(not tested)",
    bound="while the node waits",
    also=("test_half_an_hour_is_enough",),
)
@pytest.mark.full
def test_the_controller_is_away_when_a_job_is_to_be_queued_again(place: Place, pytestconfig: pytest.Config) -> None:
    """The batch script asks until slurmctld is back; scontrol of 26.05 waits for it by itself, a minute or so."""
    run = Run(place, place.start(*ONE_BASH, "--time", "10", "--", "bash", "-c", STOPS_LATER))
    run.wait_for(lambda: "begun 0" in output(run.path))
    faults.let_controller_save()  # else, killed, it forgets that the job has started
    (run.path / "stop").touch()
    faults.restart_controller(place.slurm.layout, after_s=45)
    said = run.completed(restarts=1)
    assert "begun 1" in said
    assert "Slurm said: " in said or pytestconfig.getoption("--slurm-version") == "26.05"


STOPS_LATER = """echo "begun ${SLURM_RESTART_COUNT:-0}"; ((${SLURM_RESTART_COUNT:-0} == 0)) || exit 0
until [[ -e $CLUSTER_DDP_RUN_DIR/stop ]]; do sleep 0.1; done; sleep 2; exit 75"""


@pytest.mark.full
def test_a_batch_host_that_is_back_leaves_the_next_start_alone(place: Place, uninterrupted: list[dict]) -> None:
    """Slurm gave it up and started the job elsewhere; its agent still runs there, and learns that its ranks failed."""
    run = launch(place, "--restarts", "3", sbatch=("--gres=gpu:1", "--requeue"), name="back", env={"PACE_S": "0.5"})
    run.wait_for_step(6)
    faults.cut_node(place.slurm.layout, run.batch_host())
    run.completed(restarts=1)
    assert run.metrics() == uninterrupted


@pytest.mark.fault(
    "two jobs start at once on one master node with the same first candidate port", "each finds its own ranks"
)
@pytest.mark.full
def test_two_jobs_that_meet_on_the_same_port(place: Place) -> None:
    """Their ids are so far apart that their first candidate is the same; one waits there while the other meets."""
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


@pytest.mark.fault(
    "the run directory's file system hangs",
    "training does not wait; a message names the path and since when; all is written when the file system returns. "
    "Until then, nothing ends a process that waits for it, not even SIGKILL. (If the wait can be ended, not tested, a "
    "training that has ended or was stopped gives up a write after ten minutes)",
)
@pytest.mark.full
def test_a_file_system_that_hangs(place: Place, uninterrupted: list[dict], tmp_path: Path) -> None:
    """Longer than ranks wait for each other: training does not wait for it, and what hangs is named."""
    image, mounted = tmp_path / "image", tmp_path / "hangs"
    mounted.mkdir()
    with open(image, "wb") as file:
        file.truncate(200 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mount = f'if ((SLURM_PROCID == 0)); then mount -o loop "{image}" "{mounted}"; fi'
    training = (*TRAINING, "--collective-timeout-s", "10")
    run = start(place, training=training, command=place.slurm.wrapped(mount, *PACED), run_dir=mounted, pace_s=0.3)
    run.wait_for(lambda: len(faults.ranks(place.slurm.layout, int(run.job))) == 2)
    seen = Path(f"/proc/{faults.ranks(place.slurm.layout, int(run.job))[0].pid}/root{mounted}")
    run.wait_for(lambda: list(seen.glob("checkpoints/step-*.pt")))
    folder = os.open(seen, os.O_RDONLY)  # keeps it mounted
    try:
        fcntl.ioctl(folder, FREEZE, 0)
        try:
            stays(lambda: run.status().state == "RUNNING", 30, pause_s=1)
        finally:
            fcntl.ioctl(folder, THAW, 0)
        said = run.completed(restarts=0)
        assert "this one is skipped" in said
        assert re.search(rf"Still being written: {mounted}/\S+, for \d+ s\. Does its file system hang\?", said)
        assert run.metrics(Path(f"/proc/self/fd/{folder}")) == uninterrupted
    finally:
        os.close(folder)


FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of linux/fs.h


@pytest.mark.fault("`scontrol requeue` of one array task", "resumes; its siblings are not affected")
@pytest.mark.fault("slurmctld is killed and restarted while the job runs", "no effect")
@pytest.mark.full
def test_an_arrays_task_is_requeued_alone_and_the_controller_is_restarted(
    place: Place, uninterrupted: list[dict]
) -> None:
    """The siblings of a requeued array task go on; so do all when slurmctld is killed and started again."""
    first = start(place, "--array", "0-1", FAULTS=[held(12)])
    runs = [first, Run(place, Path(f"{str(first.path)[:-1]}1"))]
    for run in runs:
        run.wait_for_step(6)
    faults.let_controller_save()  # else, killed, it forgets that a job has started
    faults.restart_controller(place.slurm.layout, after_s=2)
    commands.run(["scontrol", "requeue", f"{runs[1].job}"], env=place.slurm.env)
    first.release()
    for run, restarts in zip(runs, (0, 1)):
        run.completed(restarts=restarts)
        assert run.metrics() == uninterrupted


@pytest.mark.fault("a stranger sends garbage to the store's port", "no effect")
@pytest.mark.full
def test_strangers_at_the_stores_port(place: Place, uninterrupted: list[dict]) -> None:
    """Whatever connects to the ports of rank 0 and talks nonsense does not disturb the training."""
    run = start(place, FAULTS=[held(12)])
    run.wait_for_step(6)
    rank_0 = faults.ranks(place.slurm.layout, int(run.job))[0]
    into = ["nsenter", "--net", f"--target={rank_0.pid}"]
    sockets = subprocess.run([*into, "ss", "-Hltnp"], capture_output=True, text=True).stdout.splitlines()
    ports = {line.split()[3].rpartition(":")[2] for line in sockets if f"pid={rank_0.pid}," in line}
    assert len(ports) >= 2  # the store's and gloo's
    talk = "".join(f"(head -c 4096 /dev/urandom >/dev/tcp/{rank_0.node}/{port}) & " for port in sorted(ports))
    subprocess.run([*into, "timeout", "5", "bash", "-c", f"{talk} wait"])
    run.release()
    run.completed(restarts=0)
    assert run.metrics() == uninterrupted


@pytest.mark.fault(
    "a node is lost: network cut, slurmd and tasks killed",
    "Slurm marks it down and restarts the job on other nodes, where it resumes",
    bound="slurmd's SlurmdTimeout",
)
@pytest.mark.fault("two requeues in a row", "resumes twice")
@pytest.mark.fault("requeue onto other nodes", "resumes there")
@pytest.mark.full
def test_two_requeues_in_a_row_the_second_by_a_lost_node(place: Place, uninterrupted: list[dict]) -> None:
    """Queued again by hand; then a node's network is cut, its slurmd and tasks are killed: Slurm starts the
    job again on others."""
    run = start(place, FAULTS=[held(12), held(30, start=1)])
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
    starts = [json.loads(line) for line in (run.path / File.STARTS).read_text().splitlines()]
    silent = f"It ended without a final record, and Slurm has none either: its first node, {lost}, was probably lost."
    assert silent in [one.get("cause") for one in starts]
    assert run.metrics() == uninterrupted
