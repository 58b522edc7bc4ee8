"""What `tests/helpers/launcher_contract.py` asks of every launcher, on a real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
from chaos import faults
from cluster import Cluster, Place, label_of, selected
from launcher_contract import CHECKS, parameters, programs
from launchers import ALL, Job, ancestry, play

from cluster_ddp import processes
from cluster_ddp.slurm import job_status
from cluster_ddp.slurm.job_status import JobStatus

RANKS = ("python", "the ranks.py")
TRAINING = ("python", "-m", "mypkg.train")
ON_TWO_NODES, OF_TWO_RANKS = ("--nodes", "2", "--gpus-per-node", "1"), ("--gpus-per-node", "2")
ON_ONE_NODE = {
    "srun": (*ALL, "ended"),
    "fork": ("stops", "hears", "raises", "aborts"),
}
"""Jobs without torch: where a launcher does nothing of its own, srun's job speaks for all."""
LOST = (*ON_TWO_NODES, "--sbatch-options=--nodelist=node3,node4", "--no-requeue", "--name", "lost")
FIRST = {"srun": (*ON_ONE_NODE["srun"], "trains", "lost")}
"""Those of `make test`."""
LATER = {launcher: (*jobs, "keeper", "trains", "leaves") for launcher, jobs in ON_ONE_NODE.items()}
LATER["srun"] = ("keeper", "leaves")
ORDER = ("srun", "fork")


def submissions(asked: Mapping[str, Collection[str]]) -> Iterator[tuple[str, ...]]:
    """Words for `cluster-ddp submit`, for the jobs of each launcher: what waits longest comes first."""
    if "lost" in asked["srun"]:
        yield ("--launcher", "srun", *LOST, "--", *RANKS, "lost")
    for launcher, jobs in asked.items():
        if names := [name for name in jobs if name in ON_ONE_NODE[launcher]]:
            words = ("--launcher", launcher, *OF_TWO_RANKS, "--signal", "ALRM@60")
            yield (*words, "--array", f"job={','.join(names)}", "--", *RANKS, "{job}")
    for launcher, jobs in asked.items():
        if "keeper" in jobs:
            where = (*ON_TWO_NODES, "--exclude", "node4")  # which may be gone
            yield ("--launcher", launcher, *where, "--name", "keeper", "--", *RANKS, "keeper")
        if names := [name for name in jobs if name in ("trains", "leaves")]:
            array = ("--array", f"job={','.join(names)}")
            yield ("--launcher", launcher, *OF_TWO_RANKS, *array, "--", *TRAINING, "{job}")


class Queue:
    """What squeue says of all jobs, asked at most once in a while."""

    def __init__(self, slurm: Cluster) -> None:
        self._slurm, self._lock, self._asked_at = slurm, threading.Lock(), 0.0
        self._jobs: dict[str, tuple[JobStatus, ...]] = {}

    def status(self, label: str) -> JobStatus | None:
        """The status of a job, such as 12 or 12_3; None while it is one of those that wait together."""
        with self._lock:
            if time.monotonic() - self._asked_at > 0.7:
                self._jobs = {job: tuple(found) for job, found in job_status.all_jobs(env=self._slurm.env).items()}
                self._asked_at = time.monotonic()
        whole, _, task = label.partition("_")
        return next((one for one in self._jobs.get(whole, ()) if not task or one.array_task == task), None)

    def has_ended(self, label: str) -> bool:
        status = self.status(label)
        return status is not None and status.ended


def jobs_of(place: Place, queue: Queue, *words: str) -> list[Job]:
    """Submit; the jobs, of an array one for each task."""
    first, launcher = place.start(*words), words[1]
    if "--array" not in words:
        return [on_slurm(place, queue, launcher, words[-1], first)]
    names = words[words.index("--array") + 1].removeprefix("job=").split(",")
    folders = [first.with_name(str(task)) for task in range(len(names))]
    return [on_slurm(place, queue, launcher, *one) for one in zip(names, folders)]


def on_slurm(place: Place, queue: Queue, launcher: str, name: str, run_dir: Path) -> Job:
    layout, label = place.slurm.layout, label_of(run_dir)
    slurm = place.slurm.run  # scancel fails if the signal ends the job at once

    def lose_node(node: str) -> None:
        faults.lose_node(layout, node)
        try:
            job.wait(lambda: False, 120)
        finally:
            faults.bring_back_node(layout, node)

    def batch_process() -> list[int]:
        mark = {"CLUSTER_DDP_RUN_DIR": str(run_dir.resolve())}
        here = [
            pid
            for pid in faults.processes_on(layout, job.rank(0)[1])
            if mark.items() <= processes.environment(pid).items()
        ]
        return list({ancestry(pid)[-1] for pid in here if processes.name(pid) == "srun"})

    job = Job(
        name=name,
        launcher=launcher,
        run_dir=run_dir,
        has_ended=lambda: queue.has_ended(label),
        ancestry=lambda rank: ancestry(job.rank(rank)[0]),
        batch_process=batch_process,
        signal_all=lambda name: slurm("scancel", f"--signal={name}", label),
        cancel=lambda: slurm("scancel", label),
        lose_node=lose_node,
    )
    return job


@pytest.fixture(scope="module")
def jobs(
    slurm: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[tuple[str, str], Job]:
    """The jobs of this session's tests, ended."""
    pairs = [*zip(selected(request, "launcher"), selected(request, "check"))]
    asked = {name: dict.fromkeys(CHECKS[check].job for launcher, check in pairs if launcher == name) for name in ORDER}
    folder = tmp_path_factory.mktemp("it's launched")
    programs(folder)
    place, queue = Place(slurm, folder), Queue(slurm)
    jobs = [job for words in submissions(asked) for job in jobs_of(place, queue, *words)]
    play(jobs, 300)
    asked = [sys.executable, "-m", "cluster_ddp", "status", "--json"]
    said = subprocess.run(asked, cwd=folder, env=dict(slurm.env), capture_output=True, text=True, check=True).stdout
    ends = {(folder / one["run_dir"]).resolve(): one for one in json.loads(said)}
    for job in jobs:
        status = queue.status(label_of(job.run_dir))
        job.end = ends[job.run_dir.resolve()] | {"exit_status": status and status.exit_code}
    return {(job.launcher, job.name): job for job in jobs}


@pytest.mark.parametrize(("launcher", "check"), [*parameters(FIRST), *parameters(LATER, pytest.mark.full)])
def test_launchers(jobs: dict[tuple[str, str], Job], launcher: str, check: str) -> None:
    asked = CHECKS[check]
    asked.holds(jobs[launcher, asked.job])
