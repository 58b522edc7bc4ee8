"""A job's agent on its batch host, with programs that stand in for Slurm's."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import unshare
from slowness import LIMIT_S, scaled

ROOT = Path(__file__).parents[4]
FILES = 256
# While squeue answers, the agent has started no ranks yet: so early may sbatch --signal=B:USR1@… or scancel --batch be.
SQUEUE = '#!/bin/bash\nkill -s "$SIGNAL" "$PPID"\nsleep 0.3\necho "1896087600 1896091200"\n'
# As the real one: it passes warnings on to its tasks. Those that have not begun miss it.
SRUN = """#!/bin/bash
for name in USR1 USR2; do trap "kill -s $name \\$!" "$name"; done
while [[ $1 == -* ]]; do shift; done
sleep 0.5
SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 "$@" &
while kill -0 $! 2>/dev/null; do wait $! && status=0 || status=$?; done
exit $status
"""
RANK = "trap 'echo saved; exit 75' USR1 USR2; echo ranks; while :; do sleep 0.1; done"


def start(
    folder: Path,
    name: str = "CONT",
    *,
    srun: str = SRUN,
    scontrol: str = "#!/bin/sh\nexit 1\n",
    options: tuple[str, ...] = ("--max-requeues=0",),
    before: str = "",
    around: tuple[str, ...] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a job's agent, which gets a signal while it asks Slurm for the job's times."""
    for program, text in {"squeue": SQUEUE, "srun": srun, "scontrol": scontrol}.items():
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURMD_NODENAME": "localhost",
    }
    env = {
        **os.environ,
        **job,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SIGNAL": name,
        "TMPDIR": str(folder),
    } | variables
    agent = [sys.executable, "-m", "cluster_ddp.agent", "job", *options, "--", "bash", "-c", RANK]
    command = [*around, "bash", "-c", f"{before}ulimit -Sn {FILES}; exec {shlex.join(agent)}"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_one_that_comes_before_the_ranks_is_passed_on_to_them(tmp_path: Path, name: str) -> None:
    """It would end the agent, and with it the job."""
    done = start(tmp_path, name)
    assert (done.stdout.splitlines()[:2], done.returncode) == (["ranks", "saved"], 75), done


def test_term_is_final(tmp_path: Path) -> None:
    done = start(tmp_path, "TERM")
    assert (done.stdout, done.returncode) == ("", -signal.SIGTERM), done


def test_in_an_allocation_that_goes_on_term_ends_the_ranks_too(tmp_path: Path) -> None:
    """srun would train on after the agent of a shell of salloc. Of a batch job, Slurm ends the ranks itself."""
    srun = "#!/bin/bash\ntrap 'echo ended; exit' TERM\nkill -s TERM $PPID\nfor i in {1..20}; do sleep 0.1; done\n"
    assert start(tmp_path, srun=srun).stdout == "ended\n"
    assert start(tmp_path, srun=srun, ENVIRONMENT="BATCH").stdout == ""


def test_it_may_hear_more_tasks_than_a_process_usually_has_open_files(tmp_path: Path) -> None:
    """1024, say. The ranks keep that limit."""
    ask = '#!/bin/bash\nulimit -Sn\nsleep 0.3\nawk "/open files/ {print \\$4}" /proc/$PPID/limits; ulimit -Hn\n'
    ranks, agent, most = start(tmp_path, srun=ask).stdout.split()
    assert (ranks, agent) == (str(FILES), most)


def test_tasks_that_srun_could_not_start_are_a_failure(tmp_path: Path) -> None:
    """It ends with status 0 then, as if all were done."""
    said = "srun: error: task 0 launch failed: Slurmd could not connect IO"
    script = f"#!/bin/bash\necho '{said}' >&2\n"
    log = tmp_path / "job.log"
    assert start(tmp_path, srun=script, before=f"exec 2>{shlex.quote(str(log))}\n").returncode == 1
    last = log.read_text().splitlines()[-1]
    assert last == "Failed first, with status 1: srun: task 0 launch failed: Slurmd could not connect IO"
    assert start(tmp_path, srun="#!/bin/bash\n").returncode == 0  # all silent: the tasks may not reach the job


@pytest.mark.fault(
    "a node can't start the tasks' agent (its Python is not mounted), or its agent is killed",
    "the log names that node as the first failure, with its log, and not the ranks that TERM ended (Slurm's part was "
    "tested by hand)",
    bound="seconds",
    also=("tests/slurm/test_launchers.py",),
)
def test_a_task_that_never_says_hello_is_blamed_and_not_those_that_end_with_it(tmp_path: Path) -> None:
    """A node without the Python of the agent: srun ends the tasks of the other nodes."""
    missing = "srun: error: node2: task 1: Exited with exit code 2"
    ending = SRUN.replace("while kill", f"sleep 1; echo '{missing}' >&2; kill $!\nwhile kill")
    log = tmp_path / "job.log"
    before = f"exec 2>{shlex.quote(str(log))}\n"
    done = start(tmp_path, srun=ending, before=before, SLURM_JOB_NUM_NODES="2")
    assert done.returncode == 2
    assert log.read_text().splitlines()[-1] == "Failed first, with status 2: rank 1 on node2: Exited with exit code 2"


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("chain", [False, True])
def test_a_batch_host_that_was_cut_off_leaves_the_next_start_alone(tmp_path: Path, restarts: int, chain: bool) -> None:
    """Its node is back, and Slurm has started the job elsewhere; of a chain, the next job runs."""
    state = "NODE_FAIL Reason=None Restarts=0" if chain else "RUNNING Reason=None Restarts=1"
    told, scancel = tmp_path / "it's told", tmp_path / "scancel"
    note = f"echo $1 >>{shlex.quote(str(told))}\n"
    scontrol = f"#!/bin/bash\n[[ $1 == --oneliner ]] && echo ' JobState={state}' || {note}"
    scancel.write_text(f"#!/bin/bash\n{note}")
    scancel.chmod(0o755)
    options = (f"--restarts={restarts}", f"--run-dir={tmp_path}/run", *(("--chain",) if chain else ()))
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"} if chain else {}
    done = start(tmp_path, srun="#!/bin/bash\nexit 3\n", scontrol=scontrol, options=options, **task)
    over = "JobState=NODE_FAIL" if chain else "Restarts=1"
    assert done.returncode == 3 and f"warning: This start of the job is over for Slurm ({over})" in done.stderr
    assert "To resume" not in done.stderr and "To resume" not in done.stdout
    assert {*told.read_text().split()} <= {"show"}


def test_a_full_memory_disk_of_the_batch_host_is_no_failure(tmp_path: Path) -> None:
    """The job's times lie there, and the notes of its ranks."""
    fill = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero >/dev/shm/full\n"
    done = start(tmp_path, srun="#!/bin/bash\necho ranks\n", before=fill, around=unshare("--mount"))
    assert (done.stdout, done.stderr, done.returncode) == ("ranks\n", "", 0)


def test_a_log_on_a_full_disk_costs_nothing(tmp_path: Path) -> None:
    """The agent has something to say at the start and at the end of a restart."""
    full = "export SLURM_RESTART_COUNT=1; exec >/dev/full 2>&1\n"
    assert start(tmp_path, srun="#!/bin/sh\nexit 75\n", before=full).returncode == 75
    assert start(tmp_path, srun="#!/bin/sh\nexit 0\n", before=full).returncode == 0


# As Slurm: it ends the batch script soon after it has accepted a requeue; srun would be refused from then on.
REQUEUES = '#!/bin/bash\n[[ $1 != requeue ]] || { echo "$*" >>"$TOLD"; kill -s TERM "$PPID"; }\n'
CLEANUP = """false; blocked=$(sed -n 's/SigBlk:[[:space:]]*0*//p' /proc/self/status)
echo "$MINE of job $SLURM_JOB_ID, status $status, blocks '$blocked'" >>"$TOLD"; false"""


@pytest.mark.parametrize(
    ("status", "told", "returned"),
    [
        (75, ["it's mine of job 7, status 75, blocks ''", "requeue 7"], -signal.SIGTERM),
        (3, ["it's mine of job 7, status 3, blocks ''"], 3),
        (0, ["it's mine of job 7, status 0, blocks ''"], 0),
    ],
)
def test_the_cleanup_runs_once_the_ranks_have_ended_and_before_a_requeue(
    tmp_path: Path, status: int, told: list[str], returned: int
) -> None:
    env = {"TOLD": str(tmp_path / "told"), "MINE": "it's mine"}
    options, srun = (f"--cleanup={CLEANUP}",), f"#!/bin/sh\nexit {status}\n"
    done = start(tmp_path, srun=srun, scontrol=REQUEUES, options=options, **env)
    assert (tmp_path / "told").read_text().splitlines() == told, done.stderr
    assert done.returncode == returned, done.stderr


KILLS_THE_SCRIPT = """#!/bin/bash
echo srun >>"$TOLD"
read -r _ _ _ script _ <"/proc/$PPID/stat"
kill -s KILL "$script"
sleep 0.5
"""


@pytest.mark.parametrize("status", [75, 3])
def test_an_agent_that_outlives_its_batch_script_starts_nothing_again(tmp_path: Path, status: int) -> None:
    """Only proctrack/cgroup ends it, too. Each start of the job was requeued by the agents of all earlier ones."""
    srun, script = f"{KILLS_THE_SCRIPT}exit {status}\n", ("bash", "-c", '"$@"; exit', "bash")
    options, told = ("--max-requeues=9", "--restarts=9"), tmp_path / "told"
    done = start(tmp_path, srun=srun, scontrol=REQUEUES, options=options, around=script, TOLD=str(told))
    assert told.read_text() == "srun\n", done
    assert "error: The batch script has ended before its ranks, and so has the job" in done.stderr, done
