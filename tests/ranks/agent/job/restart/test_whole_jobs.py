"""A job that starts its ranks again: real agents of tasks and spares, and programs that stand in for Slurm's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled

from cluster_ddp import processes
from cluster_ddp.agent.job.restart.job_nodes import LOST
from cluster_ddp.run import journal
from cluster_ddp.run.journal import Failed
from cluster_ddp.run.names import File, Then
from cluster_ddp.run.outcome import AGENT_KILLED, Outcome

ROOT = Path(__file__).parents[5]
# As the real one with --kill-on-bad-exit: one that fails ends all.
SRUN = """#!/bin/bash
given=()
while [[ $1 == -* ]]; do
  case $1 in --ntasks=*) count=${1#*=} ;; --nodelist=*) IFS=, read -ra nodes <<<"${1#*=}" ;; esac
  [[ $1 == --n* ]] || given+=("$1")
  shift
done
[[ $* != *" spare "* ]] || given=(--spare)
echo "srun ${nodes[*]} ${given[*]}" >>"$FOLDER/told"
trap 'kill $(jobs -p) 2>/dev/null' TERM
for ((task = 0; task < count; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task SLURMD_NODENAME=${nodes[task]} \\
    SLURM_STEP_NUM_NODES=$count "$@" &
done
while [[ -n $(jobs -pr) ]]; do wait -n || { status=$?; kill $(jobs -pr) 2>/dev/null; }; done
exit ${status:-0}
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") printf '127.0.0.%s\\n' $(seq "$SLURM_JOB_NUM_NODES") ;;
  "show config") echo "SlurmdPort = $SLURMD_PORT" ;;
  "show job" | "--oneliner show") echo " JobState=RUNNING ExcNodeList=(null)" ;;
  *) echo "scontrol $*" >>"$FOLDER/told"; [[ $1 != requeue ]] || kill -s TERM "$PPID" ;;
esac
"""
# The second rank fails in the first start, once the other one computes.
FAILS = """(IFS=/; echo "$CLUSTER_DDP_START/$RANK/$MASTER_ADDR/$MASTER_PORT${*:+/}$*") >>"$FOLDER/rank-$RANK"
(( CLUSTER_DDP_START )) && exit
(( RANK )) || exec sleep 600
until [[ -s $FOLDER/rank-0 ]]; do sleep 0.02; done
"""
ONCE, LOSES_AGENT = f"{FAILS}exit 3", f"{FAILS}kill -KILL $PPID; exec sleep 600"


class Job:
    """A job, in a folder whose name no shell would like."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "it's a $(folder)"
        self.folder.mkdir()
        self.run_dir = self.folder / "run dir"
        self.slurmd_port = 0
        self.stands_in("srun", SRUN)
        self.stands_in("scontrol", SCONTROL)
        self.stands_in("squeue", "#!/bin/sh\necho 1896087600 1896091200\n")
        self.stands_in("sinfo", "#!/bin/sh\nseq -f 127.0.0.%g 9\n")
        self.stands_in("python", "#!/bin/sh\n")  # the doctor of a spare's node

    def stands_in(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run(self, rank: str, *options: str, nodes: int = 2, **more: str) -> tuple[int, list[str]]:
        """Run its agent to its end. Returns its status, and what it has said."""
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NTASKS_PER_NODE": "1"}
        slurm |= {"SLURM_JOB_NODELIST": "127.0.0.[1-3]", "SLURMD_NODENAME": "127.0.0.1", "ENVIRONMENT": "BATCH"}
        self.own = {"FOLDER": str(self.folder), "SLURMD_PORT": str(self.slurmd_port), "PYTHONPATH": str(ROOT)}
        path = f"{self.folder}:{os.environ['PATH']}"
        agent = [sys.executable, "-m", "cluster_ddp.agent", "job", f"--run-dir={self.run_dir}", *options, "--"]
        with (self.folder / "job.log").open("w+") as log:
            command = [*agent, "bash", "-c", rank, "bash"]
            env = {**os.environ, **slurm, **self.own, "PATH": path, "TMPDIR": str(self.folder), **more}
            agent_of_job = subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log)
            try:
                status = agent_of_job.wait(timeout=scaled(LIMIT_S))
            finally:
                agent_of_job.kill()
            log.seek(0)
            said = log.read()
        assert "Traceback" not in said, said
        where, *rest = said.splitlines()
        assert where.startswith("The ranks write to ") and "cluster-ddp logs " in where
        return status, rest

    def told(self) -> list[str]:
        """How srun was called, without the agents' commands, and what scontrol was told."""
        return [line.rstrip() for line in (self.folder / "told").read_text().splitlines()]

    def starts(self, rank: int) -> list[list[str]]:
        """The starts of a rank: each with its number, rank, address, port and arguments."""
        return [line.split("/") for line in (self.folder / f"rank-{rank}").read_text().splitlines()]

    def left(self) -> list[int]:
        """Processes of it that still run."""
        return list(processes.environments({"FOLDER": str(self.folder)}))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    one = Job(tmp_path)
    yield one
    for pid in one.left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def slurmds(job: Job) -> Iterator[dict[str, socket.socket]]:
    """Slurm's daemons of three nodes."""
    with contextlib.ExitStack() as stack:
        found: dict[str, socket.socket] = {}
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            found[host] = stack.enter_context(socket.create_server((host, job.slurmd_port)))
            job.slurmd_port = found[host].getsockname()[1]
        yield found


@pytest.mark.quick
def test_all_ranks_start_again_in_the_same_step(job: Job) -> None:
    """Those that still compute are killed first. They meet on another port."""
    status, said = job.run(ONCE, "--restarts=2", "--restart-args=--resume 'it is'")
    assert (status, job.left()) == (0, []), said
    logs = f"--output={job.run_dir}/task-%t.log --open-mode=append"
    assert job.told() == [f"srun 127.0.0.1 127.0.0.2 --kill-on-bad-exit=1 {logs}"]
    first, second = job.starts(0)
    assert [first[:3], second[:3]] == [[start, "0", "127.0.0.1"] for start in "01"]
    assert (first[4:], second[4:]) == ([], ["--resume", "it is"])
    assert first[3] != second[3] and [one[3] for one in job.starts(1)] == [first[3], second[3]]
    assert said[0] == "Failed first, with status 3: rank 1 on 127.0.0.2"
    assert said[1].startswith("Starting again in the allocation, from the beginning, after rank 1 on 127.0.0.2; ")
    assert "each rank starts Python anew, since the command is no Python" in said[2]
    ended = journal.last_end(job.run_dir)
    assert ended is not None and (ended.state, ended.start, ended.job) == ("COMPLETED", 1, "7")


def test_without_an_agent_a_second_step_starts_beside_the_first(job: Job, slurmds: dict[str, socket.socket]) -> None:
    """What the agent has left behind is killed before its rank starts again."""
    status, said = job.run(LOSES_AGENT, "--restarts=2")
    assert (status, job.left()) == (0, []), said
    assert [line.split(" --output")[0] for line in job.told()] == [
        "srun 127.0.0.1 127.0.0.2 --kill-on-bad-exit=1",
        "srun 127.0.0.1 127.0.0.2 --overlap --mem=0 --kill-on-bad-exit=1",
    ]
    assert [len(job.starts(rank)) for rank in (0, 1)] == [2, 2]
    assert f"Failed first, with status 137: rank 1 on 127.0.0.2: {AGENT_KILLED}" in said


TERM_ELSEWHERE = 'kill -TERM "$(cat "$FOLDER/agent-0")"; exit 3'


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("kill -TERM $PPID $$", "143: rank 1 on 127.0.0.2: killed by SIGTERM"),
        ("kill -TERM $PPID; exec sleep 600", "143: rank 1 on 127.0.0.2: killed by SIGTERM"),
        (TERM_ELSEWHERE, "3: rank 1 on 127.0.0.2"),
    ],
    ids=["all", "the agent", "another rank's agent"],
)
def test_a_step_that_slurm_ends_on_a_node_is_not_used_again(job: Job, told: str, why: str) -> None:
    """After TERM comes KILL: it would end the next start, too, and two failures there leave a healthy node out."""
    status, said = job.run(f'((RANK)) || echo $PPID >"$FOLDER/agent-0"; {FAILS}{told}', "--restarts=1")
    assert (status, job.left()) == (0, []), said
    assert [line.split(" --output")[0] for line in job.told()] == [
        "srun 127.0.0.1 127.0.0.2 --kill-on-bad-exit=1",
        "srun 127.0.0.1 127.0.0.2 --overlap --mem=0 --kill-on-bad-exit=1",
    ]
    assert said[0] == f"Failed first, with status {why}"


def test_a_spare_takes_the_place_of_a_lost_node(job: Job, slurmds: dict[str, socket.socket]) -> None:
    slurmds["127.0.0.2"].close()
    status, said = job.run(LOSES_AGENT, "--restarts=2", "--spare-nodes=1", nodes=3)
    assert status == 0, said
    told = [line.split(" --output")[0] for line in job.told()]
    assert [*sorted(told[:2]), *told[2:]] == [  # two begin at once
        "srun 127.0.0.1 127.0.0.2 --kill-on-bad-exit=1",
        "srun 127.0.0.3 --spare",
        "scontrol update JobId=7 NodeList=127.0.0.1,127.0.0.3",
        "srun 127.0.0.1 127.0.0.3 --overlap --mem=0 --kill-on-bad-exit=1",
    ]
    assert f"Left out from now on: 127.0.0.2: {LOST.words}" in said


def test_with_a_sick_spare_the_job_is_requeued_with_all_its_nodes(job: Job, slurmds: dict[str, socket.socket]) -> None:
    slurmds["127.0.0.2"].close()
    job.stands_in("python", "#!/bin/sh\necho 'its GPU'; exit 1\n")
    status, said = job.run(LOSES_AGENT, "--restarts=2", "--spare-nodes=1", nodes=3)
    assert status == 137, said
    assert job.told()[3:] == [
        "scontrol requeue 7",
        "scontrol update JobId=7 NumNodes=3",
        "scontrol update JobId=7 ExcNodeList=127.0.0.2,127.0.0.3",
    ]
    assert "Failed with status 137: requeueing job 7 (restart 1)." in said
    assert "Requeueing job 7 without 127.0.0.3: its GPU" in said
    ended = journal.last_end(job.run_dir)
    assert ended is not None and ended.then == Then.REQUEUE and ended.lost_nodes == ("127.0.0.2",)


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_last_failure_is_the_jobs(job: Job, restarts: int) -> None:
    status, said = job.run("exit $((3 + CLUSTER_DDP_START))", f"--restarts={restarts}")
    assert (status, job.left()) == (3 + restarts, []), said
    assert len(job.told()) == 1
    assert ("error: failed twice (--restarts 1); not started again." in said) is bool(restarts)


STOPS = ': >"$CLUSTER_DDP_NOTES/stopped-$RANK"; '


@pytest.mark.fault(
    "a command exits with 0 although its training was stopped in time",
    "an error; status 75, so that `--after` does not start; not requeued",
)
@pytest.mark.parametrize("restarts", [0, 3])
def test_a_command_that_hides_that_it_was_stopped_is_not_done(job: Job, restarts: int) -> None:
    """Nor is it started again: it may be finished."""
    status, said = job.run(STOPS, f"--restarts={restarts}")
    assert status == 75 and len(job.told()) == 1, said
    assert "error: A training was stopped in time, but the command ended with status 0:" in said


@pytest.mark.parametrize("restarts", [0, 3])
def test_nodes_at_fault_are_left_out_after_a_stop_in_time_too(job: Job, restarts: int) -> None:
    """With --restarts. Nodes of other jobs do not count."""
    sick = f'printf "%s\\n" "node9 not ours" "127.0.0.2 its disk" >>"$CLUSTER_DDP_RUN_DIR/{File.SICK_NODES}"'
    status, said = job.run(f"((RANK)) || {sick}; exit 75", f"--restarts={restarts}")
    excluded = ["scontrol update JobId=7 ExcNodeList=127.0.0.2"] if restarts else []
    assert job.told()[1:] == ["scontrol requeue 7", *excluded]
    assert said[0] == "Stopped in time: requeueing job 7 (restart 1)."
    assert status == (75 if restarts else -signal.SIGTERM), said


def test_starts_are_counted_on_after_a_requeue(job: Job) -> None:
    """A stop in time has its own budget."""
    job.run_dir.mkdir()
    failed = Failed(1.0, 0, "a", 0, "", then=Then.RESTART)
    ended = Outcome("7", 0, "FAILED", 1, then=Then.RESTART, time=1.0)
    journal.append_end(job.run_dir, ended, shared=False, failed=failed)
    options = ("--restarts=9", "--max-requeues=1")
    status, said = job.run('echo "start $CLUSTER_DDP_START" >&2; exit 75', *options, SLURM_RESTART_COUNT="1")
    assert said[0] == "Restart 2 of job 7."
    assert (status, len(job.told())) == (75, 1), said
    assert said.count("start 2") == 2
    assert "error: stopped in time, but started again 1 times already (--max-requeues 1)." in said
