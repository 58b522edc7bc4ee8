"""Chains of jobs: warned, cut from their batch host, cancelled, requeued, failed, refused."""

from __future__ import annotations

import json
import sys

import pytest
from chaos import faults
from cluster import Place, differing, output
from paced_run import ONE_BASH, Run, held, start

from cluster_ddp.agent.job import chain
from cluster_ddp.run.names import File
from cluster_ddp.slurm import commands, job_status

pytestmark = pytest.mark.every_slurm


@pytest.fixture
def cli(place: Place):
    def run(*words: str) -> str:
        done = place.slurm.run(sys.executable, "-m", "cluster_ddp", *words, cwd=place.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def tasks(run: Run) -> list[str]:
    """The states of the jobs that have begun or wait; those that never began and were cancelled are one at most."""
    found = job_status.job_statuses(run.job, env=run.place.slurm.env)
    return [one.state for one in sorted(found, key=lambda one: int((one.array_task or "0").split("-")[0]))]


def states(run: Run) -> list[str]:
    """Of its jobs, once none is left in the queue."""
    run.wait_for(lambda: {*tasks(run)} <= job_status.FINAL_STATES)
    assert not commands.run(["squeue", "--noheader", f"--jobs={run.job}"], env=run.place.slurm.env).strip()
    return tasks(run)


def warn(run: Run, number: int) -> None:
    """Stop one of its jobs in time. scancel tries again until the job has ended, and then fails (22.05)."""
    run.place.slurm.run("scancel", "--signal=USR1", f"{run.job}_{number}")


@pytest.mark.fault(
    "a job of a chain (`--chain`) is warned; the batch host of the next one is lost",
    "each time the next job resumes in the same run directory, exactly; no job is left at the end",
    bound="as for a requeue",
)
@pytest.mark.full
def test_a_chain_is_warned_and_loses_its_batch_host(place: Place, uninterrupted: list[dict]) -> None:
    """Each time the next job resumes, exactly; those that would follow the last are gone at its end."""
    run = start(place, "--chain", FAULTS=[held(12), held(30, start=1)])
    run.wait_for_step(6)
    warn(run, 0)
    run.wait_for_step(18)
    lost = run.nodes()[0]
    faults.lose_node(place.slurm.layout, lost)
    run.slurm("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=lost")  # as Slurm finds in a minute
    try:
        run.wait_for(lambda: len(chain.links(run.path, run.job)) == 3)
        assert states(run) == ["FAILED", "NODE_FAIL", "COMPLETED", "CANCELLED"]
    finally:
        faults.bring_back_node(place.slurm.layout, lost)
    said = output(run.path)
    assert said.count("Resuming from") == 2
    starts = [json.loads(line) for line in (run.path / File.STARTS).read_text().splitlines()]
    assert [(one["job"], one["restart"]) for one in starts if one["kind"] == "start"] == [
        (run.job, number) for number in range(3)
    ]
    assert run.metrics() == uninterrupted


FIRST = 'env -0 >"env-$SLURM_JOB_ID"; if ((!SLURM_RESTART_COUNT)); then exit 75; fi; '
THEN = {"cancel": "sleep 300", "scancel": "sleep 300", "all": "sleep 300", "fails": "exit 3", "most": "exit 75"}
OF_THE_SHELL = {"SBATCH_QOS": "leaks", "SLURM_NTASKS": "7", "MINE": "it's\nmine"}


@pytest.mark.fault(
    "the middle job of a chain is ended by scancel",
    "Slurm starts the next job after any end: it sees the cancellation, ends without training, and cancels those that "
    "wait. `cluster-ddp cancel`, or scancel of the whole array, ends all of it at once",
    bound="until the next job starts",
)
@pytest.mark.fault(
    "a rank of a chain fails for good, or `--max-requeues` is reached",
    "the jobs that wait are cancelled; the chain ends with the failure's status, or 75",
    bound="seconds",
)
@pytest.mark.full
def test_what_ends_a_chain(place: Place, cli) -> None:
    """Cancelled by us, by scancel of its second job or of all; a failure there; --max-requeues. No job is left."""
    runs = {}
    for name, then in THEN.items():
        options = ("--no-check", *ONE_BASH, "--chain", "--max-requeues", "1" if name == "most" else "20")
        done = place.submit(*options, "--name", name, "--", "bash", "-c", FIRST + then, env=OF_THE_SHELL)
        assert done.returncode == 0, done.stderr
        runs[name] = Run(place, place.named_by(done.stdout))
    for name, run in runs.items():
        run.wait_for(lambda run=run: [one for one in chain.links(run.path, run.job) if one.trains][1:])
        if name == "cancel":
            (shown,) = json.loads(cli("status", "--json", f"{run.job}_1"))
            assert (shown["job"], shown["state"], shown["requeues"]) == (run.job, "RUNNING", 1)
            assert f"Cancelled job {run.job} " in cli("cancel", f"{run.job}_1")
        elif name in ("scancel", "all"):
            run.slurm("scancel", run.job if name == "all" else f"{run.job}_1")
    ends = {name: states(run) for name, run in runs.items()}
    assert ends == {
        "cancel": ["FAILED", "CANCELLED", "CANCELLED"],
        "scancel": ["FAILED", "CANCELLED", "COMPLETED", "CANCELLED"],
        "all": ["FAILED", "CANCELLED", "CANCELLED"],
        "fails": ["FAILED", "FAILED", "CANCELLED"],
        "most": ["FAILED", "FAILED"],
    }
    scancelled = runs["scancel"]
    assert f"nothing is left to do: job {scancelled.job}_1 was cancelled." in output(scancelled.path)
    assert "started again 1 times already (--max-requeues 1)" in output(runs["most"].path)
    shown = json.loads(cli("status", "--json", *(str(run.path) for run in runs.values())))
    assert [(one["job"], one["state"]) for one in shown] == [(run.job, ends[name][1]) for name, run in runs.items()]
    where = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "HOSTNAME")
    of_slurm = ("SLURM_", "SLURMD_NODENAME", "CLUSTER_DDP_", "MASTER_ADDR", "MASTER_PORT", *where)
    first, second = (
        {key: value for key, value in environ(place, one.slurm_job).items() if not key.startswith(of_slurm)}
        for one in chain.links(runs["fails"].path, runs["fails"].job)
    )
    assert differing(first, second) == {}
    assert first["MINE"] == OF_THE_SHELL["MINE"]


def environ(place: Place, job: str) -> dict[str, str]:
    text = (place.folder / f"env-{job}").read_bytes().decode()
    return dict(one.split("=", 1) for one in text.split("\0") if one)


@pytest.mark.full
def test_a_job_of_a_chain_that_somebody_requeues(place: Place) -> None:
    """Slurm refuses that at first (--no-requeue), and may run the next one before it. It counts as one more."""
    script = (
        'echo "begins with $SLURM_RESTART_COUNT"; case $SLURM_RESTART_COUNT in 0|2) exit 75 ;; 1) sleep 300 ;; esac'
    )
    run = start(place, "--chain", nodes=ONE_BASH, command=("bash", "-c", script), training=())
    run.wait_for(lambda: "begins with 1" in output(run.path))
    run.slurm("scontrol", "update", f"JobId={run.job}_1", "Requeue=1")
    run.slurm("scontrol", "requeue", f"{run.job}_1")
    assert "COMPLETED" in states(run)
    said = output(run.path)
    assert [said.count(f"begins with {count}\n") for count in range(5)] == [1, 1, 1, 1, 0]


@pytest.mark.fault(
    "the environment of a chain's job fails (`--setup`, modules), or the chain has more jobs than the cluster allows",
    "the next job looks before its environment, and cancels the others; `submit` refuses the chain and says which "
    "`--max-requeues` fits",
    bound="until the next job starts; at once",
)
def test_a_chain_whose_environment_fails_or_that_is_too_long(place: Place, tmp_path) -> None:
    """The second job looks before its environment is made, and cancels the others."""
    setup = ("--setup", f"echo made >>{tmp_path}/environments; exit 9")
    run = start(place, "--chain", *setup, nodes=ONE_BASH, command=("true",), training=())
    assert states(run) == ["FAILED", "COMPLETED", "CANCELLED"]
    assert f"nothing is left to do: job {run.job}_0 ended before it started its ranks." in output(run.path)
    assert (tmp_path / "environments").read_text() == "made\n"
    refused = place.submit(*ONE_BASH, "--chain", "--max-requeues", "5000", "--", "true")
    assert refused.returncode == 2
    assert "A chain of up to 5001 jobs, an array:" in refused.stderr and "Hint: --max-requeues 1000" in refused.stderr
