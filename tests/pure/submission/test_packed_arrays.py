"""`submit --pack`: what Slurm is asked for, and what is refused."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from cluster_ddp.errors import SpecError
from cluster_ddp.run import journal, turns
from cluster_ddp.run.names import File, Then
from cluster_ddp.run.outcome import Outcome
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.slurm.partitions import NodeGroup
from cluster_ddp.submission.backends import held_status
from cluster_ddp.submission.checks import preflight
from cluster_ddp.submission.pack import jobs
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.spec import JobSpec

PACKED: dict[str, Any] = {"name": "fit", "command": ("x",), "array": "0-99", "pack": 4, "jobs": 5}


def test_the_jobs_have_what_their_tasks_need() -> None:
    """A hundred tasks in five jobs are twenty each, five turns of four."""
    spec = JobSpec(**PACKED, gpus_per_node=2, cpus_per_task=3, mem="8G", time="20", launcher="fork")
    found = jobs.of(spec)
    assert (found.array, found.gpus_per_node, found.ranks_per_node, found.mem) == ("0-4", 8, 8, "32G")
    assert (found.cpus_per_task, found.nodes, found.time) == (3, 1, "0-01:45:00")
    assert (found.pack, found.jobs) == (None, None)
    holders = jobs.holders(spec)
    assert [holders[task] for task in (0, 1, 4, 5, 99)] == [0, 1, 4, 0, 4]
    unlimited = jobs.of(JobSpec(**PACKED, time="UNLIMITED"))
    assert (unlimited.time, unlimited.mem) == ("UNLIMITED", None)
    plain = JobSpec(name="fit", command=("x",), array="0-3")
    assert jobs.of(plain) is plain
    assert jobs.holders(plain) == {}


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"array": None, "jobs": None}, "--array 0-9999 --pack 4"),
        ({"pack": None}, "--pack 4 --jobs 5"),
        ({"nodes": 2}, "--nodes 1"),
        ({"spare_nodes": 1, "restarts": 1}, "--spare-nodes 0"),
        ({"mem": "1G", "max_mem": "2G", "restarts": 1}, "leave out --max-mem or --pack"),
        ({"max_nodes": 8}, "--nodes 1"),
        ({"array": "0-99%4"}, "--array 0-99 --pack 4 --jobs 5: 20 at a time"),
        ({"jobs": 101}, "--jobs 25"),
        ({"jobs": 50}, "--pack 2"),
        ({"mem": "0"}, "--mem 8G"),
        ({"signal": "TERM@60"}, "USR1@120"),
        ({"pack": 0}, "--pack 1"),
    ],
    ids=str,
)
def test_what_cannot_be_packed(fields: dict[str, Any], hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec(**(PACKED | fields))
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("fields", "hint"),
    [({"gpus_per_node": 2}, "--pack 2"), ({"mem": "9G"}, "--pack 1"), ({"time": "30"}, "--jobs 9")],
    ids=str,
)
def test_more_than_a_node_has_is_refused(fields: dict[str, Any], hint: str) -> None:
    node = {"partition": "main", "default": True, "up": True, "usable": True, "nodes": 3, "cpus": 16, "mem_mb": 16000}
    groups = [NodeGroup(**node, time_limit_s=2 * 3600, gpus={"": 4})]
    with pytest.raises(SpecError, match="4 tasks at a time on one node") as caught:
        preflight._check_cluster(Plan(spec=JobSpec(**(PACKED | fields)), must_run=False), groups)
    assert caught.value.hint == hint


RUNNING = JobStatus(job_id=14, state="RUNNING", exit_code=0, signal=0, array_task="1", restarts=1, elapsed="01:00:00")
PENDING = dataclasses.replace(RUNNING, state="PENDING", reason="Resources", elapsed="")
CANCELLED = dataclasses.replace(RUNNING, state="CANCELLED", signal=15)


@pytest.mark.parametrize(
    ("job", "starts", "at_requeue", "ended", "state", "reason"),
    [
        (PENDING, 0, 0, None, "PENDING", "Resources"),
        (RUNNING, 0, 0, None, "PENDING", "its turn in Slurm's job 12_1"),
        (RUNNING, 1, 1, None, "RUNNING", "None"),
        (RUNNING, 1, 0, None, "PENDING", "its turn in Slurm's job 12_1"),
        (RUNNING, 1, 1, ("STOPPED", True), "PENDING", "its turn in Slurm's job 12_1"),
        (RUNNING, 1, 1, ("FAILED", True), "RUNNING", "None"),
        (RUNNING, 1, 0, ("COMPLETED", False), "COMPLETED", "None"),
        (CANCELLED, 1, 1, ("COMPLETED", False), "COMPLETED", "None"),
        (CANCELLED, 1, 1, ("STOPPED", True), "CANCELLED", "None"),
        (CANCELLED, 1, 1, None, "CANCELLED", "None"),
        (RUNNING, 2, 1, ("STOPPED", False), "FAILED", "None"),
    ],
)
def test_the_state_of_a_task(
    tmp_path: Path,
    job: JobStatus,
    starts: int,
    at_requeue: int,
    ended: tuple[str, bool] | None,
    state: str,
    reason: str,
) -> None:
    if starts:
        turns.begin(tmp_path, "12_7", turns.Turn(starts, at_requeue, time.time() - 61), shared=False)
    if ended is not None:
        then = Then.REQUEUE if ended[1] else Then.END
        journal.append_end(tmp_path, Outcome("12_7", 0, ended[0], 3, then=then), shared=False)
    found = held_status.of_task(tmp_path, "12_7", job)
    assert (found.state, found.reason, found.array_task) == (state, reason, "7")
    assert found.restarts == max(0, starts - 1)
    if state == "RUNNING":
        assert found.elapsed == "00:01:01"


def test_a_task_that_waits_is_cancelled_at_once(tmp_path: Path) -> None:
    (tmp_path / File.CANCEL).touch()
    assert held_status.of_task(tmp_path, "12_7", RUNNING).state == "CANCELLED"
    turns.begin(tmp_path, "12_7", turns.Turn(1, 1, time.time()), shared=False)
    assert held_status.of_task(tmp_path, "12_7", RUNNING).state == "RUNNING", "until its agent has ended it"
