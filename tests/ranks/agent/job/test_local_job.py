"""A job on this machine, from its command line: `agent job --ranks N`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled, wait_until
from tasks import PLACE

from cluster_ddp.run import journal
from cluster_ddp.run.outcome import Outcome

ENV = {name: value for name, value in PLACE.items() if not name.startswith("SLURM")}
IMPATIENT = """from cluster_ddp.agent import __main__ as agent
from cluster_ddp.agent.job import local_job
local_job._KILL_AFTER_S = 1.0
agent.run()"""


def start(folder: Path, command: str, *options: str) -> subprocess.Popen[str]:
    (folder / "it's run").mkdir(exist_ok=True)
    agent = [sys.executable, "-c", IMPATIENT, "job", "--ranks=2", f"--run-dir={folder}/it's run"]
    with (folder / "job.log").open("w") as log:
        return subprocess.Popen(
            [*agent, *options, "--", "bash", "-c", command],
            cwd=folder,
            env=ENV,
            stdout=log,
            stderr=log,
            start_new_session=True,
            text=True,
        )


def run(folder: Path, command: str, *options: str) -> tuple[int, str, Outcome]:
    status = start(folder, command, *options).wait(timeout=scaled(LIMIT_S))
    ended = journal.last_end(folder / "it's run")
    assert ended is not None
    return status, (folder / "job.log").read_text(), ended


def pid_in(path: Path) -> Path:
    return Path(f"/proc/{path.read_text().strip()}")


def test_the_rest_of_a_pipeline_is_not_killed_with_a_job_that_fails(tmp_path: Path) -> None:
    """A shell makes the job and what reads its output one process group, which the job leads."""
    agent = shlex.join([sys.executable, "-m", "cluster_ddp.agent", "job", "--ranks=1", "--", "bash", "-c", "exit 5"])
    text = f"set -m; {agent} | {{ cat >read; sleep 1; echo read; }}; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.stdout == "read\n5\n"


@pytest.mark.parametrize("setsid", ["", "setsid "])
def test_what_a_failed_rank_leaves_behind_is_killed(tmp_path: Path, setsid: str) -> None:
    command = f"if ((RANK == 0)); then {setsid}sleep 600 & echo $! >pid; exit 3; fi"
    assert run(tmp_path, command)[0] == 3
    assert not pid_in(tmp_path / "pid").exists()


def test_what_was_stopped_in_time_starts_again_as_often_as_it_may(tmp_path: Path) -> None:
    status, said, ended = run(tmp_path, "echo $CLUSTER_DDP_START; exit 75", "--max-requeues=2")
    assert (status, ended.state, ended.start) == (75, "FAILED", 2)
    assert "error: stopped in time, but started again 2 times already (--max-requeues 2)." in said
    assert (tmp_path / "it's run" / "task-0.log").read_text() == "0\n1\n2\n"
    assert said.startswith(f"The ranks write to {tmp_path}/it's run/task-*.log; to read that: cluster-ddp logs ")


@pytest.mark.quick
def test_what_has_failed_starts_again_as_often_as_it_may(tmp_path: Path) -> None:
    """What the failed start has left behind ends before. From then on, words are added to the command."""
    fails = "((RANK)) || exec sleep 600; setsid sleep 600 & echo $! >pid; exit 3"
    command = f'echo "$CLUSTER_DDP_START $0 $1"; ((CLUSTER_DDP_START)) || {{ {fails}; }}'
    status, said, ended = run(tmp_path, command, "--restarts=1", "--restart-args=--resume 'my last.pth'")
    assert (status, ended.state, ended.start) == (0, "COMPLETED", 1)
    assert (tmp_path / "it's run" / "task-1.log").read_text() == "0 bash \n1 --resume my last.pth\n"
    assert "Failed first, with status 3: rank 1 on " in said and "Starting again in the allocation, " in said
    assert not pid_in(tmp_path / "pid").exists()

    status, said, ended = run(tmp_path, "exit $((3 + CLUSTER_DDP_START))", "--restarts=1")
    assert (status, ended.state, ended.start) == (4, "FAILED", 1)
    assert "error: failed twice (--restarts 1); not started again.\n" in said


def test_the_cleanup_knows_the_ranks_status(tmp_path: Path) -> None:
    status, said, _ = run(tmp_path, "exit 3", '--cleanup=echo "was $status"')
    assert (status, "was 3\n" in said) == (3, True)


def test_a_command_that_hides_that_it_was_stopped_has_failed(tmp_path: Path) -> None:
    status, said, ended = run(tmp_path, ': >"$CLUSTER_DDP_NOTES/stopped-$RANK"', "--restarts=3")
    assert (status, ended.state, ended.start) == (75, "FAILED", 0) and "but the command ended with status 0" in said


def test_an_outcome_that_cannot_be_written_costs_neither_status_nor_cleanup(tmp_path: Path) -> None:
    """The disk is full, or the run directory is gone."""
    command = 'rm "$CLUSTER_DDP_RUN_DIR/job.jsonl"; mkdir "$CLUSTER_DDP_RUN_DIR/job.jsonl"; exit 3'
    assert start(tmp_path, command, "--cleanup=echo cleaned $status").wait(timeout=scaled(LIMIT_S)) == 3
    assert (tmp_path / "job.log").read_text().splitlines()[-1] == "cleaned 3"


def test_the_time_limit_ends_it(tmp_path: Path) -> None:
    status, _, ended = run(tmp_path, "sleep 600", "--time-limit-s=1")
    assert (status, ended.state) == (1, "TIMEOUT")


def test_term_cancels_it_also_what_is_deaf_or_suspended(tmp_path: Path) -> None:
    deaf = "trap '' TERM; echo $$ >pid$RANK; if ((RANK == 1)); then kill -STOP $$; fi; while :; do sleep 0.1; done"
    process = start(tmp_path, deaf)
    wait_until(lambda: all((tmp_path / f"pid{rank}").exists() for rank in (0, 1)))
    process.terminate()
    assert process.wait(timeout=scaled(LIMIT_S)) == 143
    ended = journal.last_end(tmp_path / "it's run")
    assert ended is not None and ended.state == "CANCELLED"
    assert not pid_in(tmp_path / "pid0").exists() and not pid_in(tmp_path / "pid1").exists()
