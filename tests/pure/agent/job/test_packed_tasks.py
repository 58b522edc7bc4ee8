"""Tasks that share a job: which job holds which, and what each one's agent gets."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from cluster_ddp.agent import array_values
from cluster_ddp.agent.job.pack import pack, packed_job
from cluster_ddp.agent.job.pack.task_time_limit import TaskLimits
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.run import journal, turns
from cluster_ddp.run.names import Env, Then
from cluster_ddp.run.outcome import Outcome
from cluster_ddp.slurm import environment, port, variables

# What a batch script had on Slurm 22.05.8, with four tasks of two ranks at a time.
OF_JOB = {
    **{"SLURM_ARRAY_JOB_ID": "2", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_JOB_ID": "4"},
    **{"SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "2", "SLURM_ARRAY_TASK_STEP": "1"},
    **{"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_NTASKS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "8"},
    **{"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "24", "SLURM_JOB_CPUS_PER_NODE": "24"},
    **{"SLURM_GPUS_ON_NODE": "8", "SLURM_MEM_PER_NODE": "4000", "SLURM_RESTART_COUNT": "5"},
}


def test_each_task_is_held_by_one_job() -> None:
    shares = [array_values.share([0, 3, 4, 7, 8, 9, 12], 3, job) for job in range(3)]
    assert shares == [[0, 7, 12], [3, 8], [4, 9]]


def test_the_job_looks_like_the_tasks_own() -> None:
    env = packed_job.environment(OF_JOB, 4, [0, 3, 70], 70, restarts=1)
    assert variables.Variables(env).job_label() == "2_70"
    changed = {name: value for name, value in env.items() if OF_JOB.get(name) != value}
    assert changed == {
        **{"SLURM_ARRAY_TASK_ID": "70", "SLURM_ARRAY_TASK_MAX": "70", "SLURM_RESTART_COUNT": "1"},
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "2"),
        **{"SLURM_CPUS_ON_NODE": "6", "SLURM_JOB_CPUS_PER_NODE": "6", "SLURM_GPUS_ON_NODE": "2"},
        **{"SLURM_MEM_PER_NODE": "1000", Env.SLURM_RESTARTS: "5", Env.PLACE_IN_JOB: "71"},
    }
    asked = AgentOptions(
        command=("x",), pack=4, jobs=3, array="0,3,70", cleanup="rm x", srun_options=("--cpu-bind=none",)
    )
    own = packed_job.options(asked, env)
    assert own.srun_options == ("--exact", "--nodes=1", "--gres=gpu:2", "--mem=1000M", "--cpu-bind=none")
    assert (own.pack, own.cleanup) == (None, None)


def test_tasks_of_a_job_do_not_share_ports() -> None:
    """Their ranks find the other candidates by the same numbers."""
    found = set[int]()
    for task in range(200):
        env = {**OF_JOB, **packed_job.environment(OF_JOB, 1, range(200), task, restarts=0)}
        candidates = port.candidates(4, variables.place_in_job(env))
        rank = {**env, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_ID": "3"}
        rank |= {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "node1", "MASTER_PORT": str(candidates[0])}
        assert environment.read(rank)["port_candidates"] == candidates
        found.add(candidates[0])
    assert len(found) == 200


@pytest.mark.parametrize(
    ("state", "then", "is_final", "is_stopped"),
    [
        ("COMPLETED", Then.END, True, False),
        ("FAILED", Then.END, True, False),
        ("STOPPED", Then.END, True, False),  # too often
        ("STOPPED", Then.REQUEUE, False, True),
        ("FAILED", Then.RESTART, False, False),  # restarts in its place
    ],
)
def test_what_a_requeue_runs_again(tmp_path: Path, state: str, then: str, is_final: bool, is_stopped: bool) -> None:
    turns.begin(tmp_path, "2_7", turn := turns.Turn(2, 1, time.time()), shared=False)
    assert turns.last(tmp_path, "2_7")._replace(time=turn.time) == turn
    journal.append_end(tmp_path, Outcome("2_7", 0, state, 0, then=then), shared=False)
    noted = journal.last_end(tmp_path, "2_7")
    assert noted is not None
    assert noted.starts_again == (not is_final)
    assert turns.last(tmp_path, "2_7").is_stopped(noted) == is_stopped
    assert journal.last_end(tmp_path, "2_8") is None, "another's"
    assert pack._is_elsewhere(tmp_path), "no spec.json"
    (tmp_path / "spec.json").write_text('{"array_task": 7}')
    assert not pack._is_elsewhere(tmp_path)
    (tmp_path / "spec.json").write_text("{}")
    assert pack._is_elsewhere(tmp_path), "resumed as another job"


def test_a_limit_counts_from_the_first_rank_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for its part of the node is not late."""
    now, sent, ended_at = [1000.0], list[signal.Signals](), list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    env = {"SLURM_JOB_ID": "4", "PATH": str(tmp_path)}  # no scancel: srun ends the tasks
    limits = TaskLimits(AgentOptions(time_limit_s=100, signal="USR1@30"), env, tmp_path)

    def look_until(at: float, step: str) -> None:
        while now[0] < at:
            now[0] += 2.0
            limits.look(step, sent.append, lambda: ended_at.append(now[0]))

    look_until(1500.0, "")
    look_until(1560.0, "3")
    now[0] += 3600.0  # suspended
    look_until(5168.0, "3")
    assert (sent, ended_at) == ([], [])
    look_until(5174.0, "3")
    assert (sent, ended_at) == ([signal.SIGUSR1], [])
    look_until(5202.0, "3")
    assert len(ended_at) == 1
    ended = Outcome("2_7", 0, "FAILED", 143)
    assert limits.judged(ended).state == "TIMEOUT"
    assert limits.judged(ended._replace(state="COMPLETED", status=0)).state == "COMPLETED"


def test_a_task_whose_starts_cannot_be_noted_is_not_started_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as on a full disk: --max-requeues then counts Slurm's requeues of the job."""
    given = list[str]()
    monkeypatch.setattr(pack, "spawn", lambda command, env, **more: given.append(env["SLURM_RESTART_COUNT"]) or 77)
    options = AgentOptions(command=("x",), pack=4, jobs=3, array="0-70", run_dir=f"{tmp_path}/%j")
    for number, is_noted in ((1, True), (4, False)):
        folder = tmp_path / f"2_{number}" / ("" if is_noted else "job.jsonl")
        folder.mkdir(parents=True)
        pack.Pack(options, OF_JOB)._start(number)
    assert given == ["0", "5"]
