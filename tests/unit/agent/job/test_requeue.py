"""The requeue, with a scontrol and a squeue that stand in for Slurm's: what they are told, and what the log says."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from slowness import scaled, wait_until

from cluster_ddp.agent.job import requeue
from cluster_ddp.agent.job.requeue import Policy
from cluster_ddp.contract import Env, File

DISABLED = "Requested operation is presently disabled for job 71"
AWAY = "slurm_update error: Unexpected message received"

# A job's agent around ranks that did what `ranks` says. Waiting for Slurm's TERM it is killed, unless told otherwise.
AGENT = """import json, os, signal, sys, time
sys.path[:0] = json.loads(sys.argv[1])
import threading
from pathlib import Path
from cluster_ddp.agent.job import requeue, scontrol
sleep = time.sleep
time.sleep = lambda s: os.kill(os.getpid(), signal.SIGKILL) if s == 60 else sleep(s / 1000)
given = json.loads(sys.argv[2])
exec(given["setup"])
run_dir = given["run_dir"]
one = requeue.Requeue(requeue.Policy(**given["policy"]), os.environ, run_dir and Path(run_dir))
one.begin()
exec(given["ranks"])
is_requeued = one.after(given["status"], stopped=given["stopped"])
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print("is requeued:", is_requeued, flush=True)
"""


class Done(NamedTuple):
    """How an agent ended."""

    status: int
    log: str

    @property
    def is_requeued(self) -> bool | None:
        """What `after` returned; None if it did not return."""
        *_, last = ["", *self.log.splitlines()]
        return last.endswith("True") if last.startswith("is requeued: ") else None


class Job:
    """A job that ends, in a folder whose name no shell would like."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "it's a $(folder)"
        self.run_dir = self.folder / "run dir"
        self.run_dir.mkdir(parents=True)
        self.stands_in("scontrol", "")

    def stands_in(self, name: str, does: str) -> None:
        """Make a command: it notes how it was called, then does what `does` (bash) says, in the folder."""
        path = self.folder / name
        here = shlex.quote(str(self.folder))
        path.write_text(f'#!/bin/bash\ncd {here}\n[ "$1" = show ] || echo "$*" >>told\n{does}\n')
        path.chmod(0o755)

    def told(self) -> list[str]:
        """What the commands were told, without questions."""
        path = self.folder / "told"
        return path.read_text().splitlines() if path.exists() else []

    def env(self, **env: str) -> dict[str, str]:
        return {"PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "71", **env}

    def start(self, status: int, *, policy: dict[str, int] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start an agent. Options: stopped, setup and ranks (Python), run_dir, env, out."""
        given = {"run_dir": str(self.run_dir), "stopped": False, "setup": "", "ranks": ""} | options
        given |= {"status": status, "policy": policy or {}}
        env, out = given.pop("env", {}), given.pop("out", subprocess.PIPE)
        root = str(Path(requeue.__file__).parents[3])
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", AGENT, json.dumps([root]), json.dumps(given)],
            env=self.env(SLURM_JOB_NODELIST="node[3-4]", **env),
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, status: int, **options: Any) -> Done:
        """Run an agent to its end."""
        agent = self.start(status, **options)
        try:
            log, _ = agent.communicate(timeout=scaled(60))
        finally:
            agent.kill()
        assert log is None or "Traceback" not in log, log
        return Done(agent.returncode, log or "")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


ARRAY = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("status", "stopped", "env", "told"),
    [
        (75, True, {}, "71"),
        (75, False, {}, "71"),
        (143, True, {}, "71"),
        (75, True, ARRAY, "70_3"),
        (75, True, {**ARRAY, "SLURM_ARRAY_JOB_ID": "71"}, "71_3"),  # the array's last task
        (75, True, {"SLURM_RESTART_COUNT": "0"}, "71"),  # the first start from Slurm 26.11 on
        (75, True, {"SLURM_RESTART_COUNT": "1"}, "71"),
        (75, True, {"SLURM_RESTART_COUNT": "2"}, ""),
        (143, True, {"SLURM_RESTART_COUNT": "2"}, ""),
    ],
)
def test_what_was_stopped_in_time_is_requeued(
    job: Job, status: int, stopped: bool, env: dict[str, str], told: str
) -> None:
    """Also where the status is lost, as under torchrun, or where srun tells that of a sibling that it has ended."""
    done = job.end(status, stopped=stopped, policy={"max_requeues": 2}, env=env)
    assert job.told() == ([f"requeue {told}"] if told else [])
    assert done.is_requeued is (None if told else False)
    if told:
        assert done.status == -signal.SIGKILL
        restart = int(env.get("SLURM_RESTART_COUNT", "0")) + 1
        assert done.log == f"Stopped in time: requeueing job {told} (restart {restart}).\n"
    else:
        assert "error: stopped in time, but started again 2 times already (--max-requeues 2)." in done.log


@pytest.mark.parametrize("status", [0, 1, 2, 137, 143])
def test_nothing_else_is_requeued(job: Job, status: int) -> None:
    """Nor are nodes at fault left behind, if that was not asked for."""
    (job.run_dir / File.SICK_NODES).write_text("node3 its disk\n")
    done = job.end(status)
    assert (done.log, job.told()) == ("is requeued: False\n", [])


def test_a_command_that_hides_that_it_was_stopped_is_not_done(job: Job) -> None:
    done = job.end(0, stopped=True, policy={"on_failure": 3, "elsewhere": 1})
    assert (done.is_requeued, job.told()) == (False, [])
    assert "stopped in time, but the command ended with status 0" in done.log
    assert "Hint: let the command end with the training's status (75)" in done.log


def test_failures_are_tried_again_as_often_as_asked_and_not_without_progress(job: Job) -> None:
    def fail(restarts: int) -> Done:
        return job.end(1, policy={"on_failure": 9}, env={"SLURM_RESTART_COUNT": str(restarts)})

    (job.run_dir / File.FAILURES).write_text("none\n" * 9)  # of an earlier job in this run directory
    for restarts in range(3):
        assert f"Failed with status 1: requeueing job 71 (restart {restarts + 1}).\n" in fail(restarts).log
    assert len(job.told()) == 3
    assert "four times without a new checkpoint (the newest: none)" in fail(3).log
    for step in (5, 10, 15, 20, 25):
        (job.run_dir / File.PROGRESS).write_text(f"step-{step:08}.pt\n")
        fail(step)
    assert len(job.told()) == 8
    done = fail(30)
    assert "error: failed 10 times (--requeue-on-failure 9); not started again.\n" in done.log
    assert (done.is_requeued, len(job.told())) == (False, 8)


def test_four_failures_in_a_row_count_and_not_four_in_all(job: Job) -> None:
    (job.run_dir / File.PROGRESS).write_text("b\n")
    (job.run_dir / File.FAILURES).write_text("b\nb\nb\nb\na\n")
    job.end(1, policy={"on_failure": 9}, env={"SLURM_RESTART_COUNT": "5"})
    assert len(job.told()) == 1


@pytest.mark.parametrize("run_dir", [True, False])
def test_failures_that_cannot_be_counted_are_at_most_the_restarts(job: Job, run_dir: bool) -> None:
    (job.run_dir / File.FAILURES).mkdir()
    for restarts, told in (("0", 1), ("1", 2), ("2", 2)):
        options = {} if run_dir else {"run_dir": None}
        job.end(1, policy={"on_failure": 2}, env={"SLURM_RESTART_COUNT": restarts}, **options)
        assert len(job.told()) == told


@pytest.mark.parametrize(("share", "mode"), [({}, 0o600), ({Env.SHARE: "1"}, 0o640)])
def test_a_failure_is_noted_for_those_who_may_read_the_run_directory(job: Job, share: dict, mode: int) -> None:
    job.end(1, policy={"on_failure": 2}, env=share)
    assert stat.S_IMODE((job.run_dir / File.FAILURES).stat().st_mode) == mode


def test_no_file_is_read_or_written_through_a_link(job: Job, tmp_path: Path) -> None:
    others = tmp_path / "another's file"
    others.write_text("node3 its disk\n")
    for name in (File.FAILURES, File.PROGRESS, File.SICK_NODES):
        (job.run_dir / name).symlink_to(others)
    env = {"SLURM_RESTART_COUNT": "1"}
    job.end(1, policy={"on_failure": 1, "elsewhere": 1}, env=env, ranks="one._sick_before = 0")
    assert (others.read_text(), job.told()) == ("node3 its disk\n", [])


@pytest.mark.parametrize("name", [File.FAILURES, File.PROGRESS, File.SICK_NODES])
def test_a_pipe_in_a_files_place_keeps_nobody_waiting(job: Job, name: str) -> None:
    os.mkfifo(job.run_dir / name)
    job.end(1, policy={"on_failure": 1, "elsewhere": 1}, env={"SLURM_RESTART_COUNT": "0"})
    assert job.told() == ["requeue 71"]


NODES = 'if [[ "$1 $2" == "show hostnames" ]]; then [[ $3 == "node[3-4]" ]] && printf "node3\\nnode4\\n"; exit; fi\n'
BAD = f"open(run_dir + '/{File.SICK_NODES}', 'a').write('node3 its disk\\nnode9 not ours\\nnode4 its GPU\\n')"


def on_bad_nodes(job: Job, *, at_most: int, show: str = " ExcNodeList=(null)", more: str = "", **options: Any) -> Done:
    """A start that fails, and finds its two nodes at fault. `more`: what scontrol does else (bash)."""
    job.stands_in("scontrol", f'{NODES}if [[ $1 == show ]]; then echo "{show}"; fi\n{more}')
    return job.end(1, policy={"elsewhere": at_most}, ranks=BAD, **options)


@pytest.mark.parametrize(("at_most", "left"), [(1, "node3"), (2, "node3,node4"), (9, "node3,node4")])
@pytest.mark.parametrize("before", ["", "node[1-2]"])
def test_nodes_at_fault_are_left_behind(job: Job, at_most: int, left: str, before: str) -> None:
    """After a failure, too; those of --exclude stay excluded, and nodes of other jobs do not count."""
    show = f"   ReqNodeList=(null) ExcNodeList={before or '(null)'} Comment=x"
    done = on_bad_nodes(job, at_most=at_most, show=show)
    excluded = f"{before},{left}" if before else left
    assert job.told() == ["requeue 71", f"update JobId=71 ExcNodeList={excluded}"]
    assert done.status == -signal.SIGKILL
    without = ["node3: its disk", "node4: its GPU"][: left.count(",") + 1]
    assert done.log.splitlines() == [
        "Failed with status 1 on a node at fault: requeueing job 71 (restart 1).",
        *(f"Requeueing job 71 without {node}" for node in without),
    ]


def test_nodes_at_fault_are_left_behind_after_a_stop_in_time_too(job: Job) -> None:
    """And of an array, by the task alone."""
    job.stands_in("scontrol", f"{NODES}[[ $* != 'show job 70_3' ]] || echo ' ExcNodeList=(null)'")
    job.end(75, policy={"elsewhere": 1}, ranks=BAD, env=ARRAY)
    assert job.told() == ["requeue 70_3", "update JobId=70_3 ExcNodeList=node3"]


def test_each_node_is_left_behind_once(job: Job) -> None:
    """A second failure on it is the user's, as is one of a job that has left enough behind."""
    on_bad_nodes(job, at_most=2)
    again = on_bad_nodes(job, at_most=2, env={"SLURM_RESTART_COUNT": "1"})
    assert (again.is_requeued, len(job.told())) == (False, 2)
    on_bad_nodes(job, at_most=2)  # another job in the same run directory
    assert len(job.told()) == 4


def test_nodes_of_earlier_starts_count_wherever_the_job_is_now(job: Job) -> None:
    (job.run_dir / File.SICK_NODES).write_text("node1 its link\n")
    done = on_bad_nodes(job, at_most=2, env={"SLURM_RESTART_COUNT": "1"})
    assert job.told()[1:] == ["update JobId=71 ExcNodeList=node3"]
    assert "node4" not in done.log


def test_without_the_nodes_of_this_job_none_is_left_behind(job: Job) -> None:
    job.stands_in("scontrol", "echo node3 is unknown >&2; echo node3; exit 1")
    assert job.end(1, policy={"elsewhere": 1}, ranks=BAD).is_requeued is False
    assert job.told() == []


@pytest.mark.parametrize(
    ("show", "more"),
    [
        ("slurm_load_jobs error: away", "[[ $1 != update ]]"),
        (" ExcNodeList=(null)", "[[ $1 != update ]] || { echo away; exit 1; }"),
    ],
)
def test_slurm_may_refuse_to_exclude_a_node(job: Job, show: str, more: str) -> None:
    """It is asked ten times. The job is requeued all the same, and the log says so."""
    done = on_bad_nodes(job, at_most=1, show=show, more=more)
    assert job.told()[0] == "requeue 71"
    assert len(job.told()) == (11 if "Exc" in show else 1)
    assert done.log.count("error: Excluding node3: Slurm said: ") == 1
    assert "away. Job 71 may start there again.\n  Hint: " in done.log
    assert "scontrol update JobId=71 ExcNodeList=node3" in done.log


def test_a_node_is_excluded_when_the_controller_is_back(job: Job) -> None:
    back = "[[ $1 != update || $(wc -l <told) -gt 5 ]]"
    done = on_bad_nodes(job, at_most=1, more=back)
    assert job.told() == ["requeue 71", *["update JobId=71 ExcNodeList=node3"] * 5]
    assert "error" not in done.log


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (DISABLED, "submit it with --requeue, so that it may be requeued.\n"),
        ("Only batch jobs are accepted or processed", "salloc's jobs are not requeued: start the command again"),
        ("Access/permission denied", "see whether the controller answers: scontrol ping."),
        ("Invalid job id specified", "see whether the controller answers: scontrol ping."),
    ],
)
def test_some_refusals_are_final(job: Job, words: str, hint: str) -> None:
    job.stands_in("scontrol", f"echo {words} >&2; exit 1")
    done = job.end(75)
    assert (done.is_requeued, job.told()) == (False, ["requeue 71"])
    assert f"error: Requeueing job 71:\n  Slurm said: {words}\n  Hint: {hint}" in done.log


def test_without_scontrol_nothing_is_tried_again(job: Job) -> None:
    (job.folder / "scontrol").unlink()
    done = job.end(75, setup=f"os.environ['PATH'] = {str(job.folder)!r}")
    assert done.is_requeued is False
    assert "Slurm said: scontrol: command not found\n  Hint: put Slurm's commands on the PATH" in done.log


@pytest.mark.parametrize("out", ["", "/dev/full"])
def test_it_is_requeued_when_the_controller_is_back(job: Job, out: str) -> None:
    """Also where no line can be written."""
    job.stands_in("scontrol", f"[[ $(wc -l <told) -ge 5 ]] || {{ echo {AWAY} >&2; exit 1; }}")
    with open(out or os.devnull, "w") as full:
        done = job.end(75, **({"out": full} if out else {}))
    assert (done.status, job.told()) == (-signal.SIGKILL, ["requeue 71"] * 5)
    assert done.log.count(f"Slurm said: {AWAY}. Trying again for half an hour.") == (not out)


# Sleep takes no time, but the clock shows it.
CLOCK = """now = [0]
time.monotonic = lambda: now[0]
time.sleep = lambda s: now.append(now.pop() + int(s))
"""


def test_half_an_hour_is_enough(job: Job) -> None:
    job.stands_in("scontrol", f"echo {AWAY} >&2; exit 1")
    done = job.end(75, setup=f"{CLOCK}scontrol.RETRY_S = 600")
    assert len(job.told()) == 3
    assert done.is_requeued is False
    assert f"  Slurm said: {AWAY}\n  Hint: see whether the controller answers: scontrol ping." in done.log


def test_a_request_that_the_controller_has_forgotten_is_made_again(job: Job) -> None:
    done = job.end(75, setup=f"{CLOCK}scontrol.END_S = 900")
    assert len(job.told()) == 2
    assert done.is_requeued is False
    assert "  Slurm accepted the request, but did not end this start within 900 s.\n  Hint: " in done.log


def test_a_scontrol_that_hangs_is_given_up(job: Job) -> None:
    job.stands_in("scontrol", "[[ $(wc -l <told) -ge 2 ]] || exec sleep 600")
    done = job.end(75, setup=f"scontrol.ANSWER_S = {scaled(1)}")
    assert (done.status, len(job.told())) == (-signal.SIGKILL, 2)
    assert "Slurm said: scontrol: no answer within " in done.log


# As Slurm ends a job without cgroups: TERM to all its processes.
TERM = "kill -TERM $PPID $$\nsleep 0.05\n"


def test_term_ends_the_agent_if_nothing_is_left_to_do(job: Job) -> None:
    job.stands_in("scontrol", TERM)
    assert job.end(75, policy={"elsewhere": 1}).status == -signal.SIGTERM


@pytest.mark.parametrize("thread", ["", "threading.Thread(target=sleep, args=(600,), daemon=True).start()"])
@pytest.mark.parametrize("answer", ["", f"[[ $1 != requeue ]] || {{ echo {AWAY}; exit 1; }}"])
def test_term_waits_until_the_nodes_are_excluded(job: Job, thread: str, answer: str) -> None:
    """It ends no scontrol either, and counts where Slurm's answer was lost."""
    more = f"[[ $1 == show ]] || {{ {TERM} echo lived >>told; }}\n{answer}"
    done = on_bad_nodes(job, at_most=1, more=more, setup=thread)
    assert job.told() == ["requeue 71", "lived", "update JobId=71 ExcNodeList=node3", "lived"]
    assert (done.status, done.is_requeued) == (0, True)


def test_term_between_two_tries_is_the_end(job: Job) -> None:
    """Nothing is asked for again: it may have been a scancel."""
    setup = "time.sleep = lambda s: os.kill(os.getpid(), signal.SIGTERM) if s == 5 else sleep(s)"
    done = on_bad_nodes(job, at_most=1, setup=setup, more=f"[[ $1 != requeue ]] || {{ echo {AWAY}; exit 1; }}")
    assert job.told() == ["requeue 71", "update JobId=71 ExcNodeList=node3"]
    assert done.is_requeued is True


def test_term_ends_the_agent_once_the_nodes_are_excluded(job: Job) -> None:
    """It comes while the agent waits for it."""
    setup = "time.sleep = lambda s: os.kill(os.getpid(), signal.SIGTERM) if s == 60 else sleep(s)"
    done = on_bad_nodes(job, at_most=1, setup=setup)
    assert job.told() == ["requeue 71", "update JobId=71 ExcNodeList=node3"]
    assert done.status == -signal.SIGTERM


def test_term_from_outside_does_not_cut_a_request_short(job: Job) -> None:
    """The agent alone gets it, as with cgroups, while scontrol waits for its answer."""
    job.stands_in("scontrol", f"{NODES}[[ $1 != show ]] || echo ' ExcNodeList=(null)'\n[[ $1 != requeue ]] || sleep 1")
    agent = job.start(1, policy={"elsewhere": 1}, ranks=BAD)
    wait_until(job.told, 60)
    agent.terminate()
    log, _ = agent.communicate(timeout=scaled(60))
    assert (agent.returncode, log.splitlines()[-1]) == (0, "is requeued: True")
    assert job.told() == ["requeue 71", "update JobId=71 ExcNodeList=node3"]


def test_a_job_needs_an_id() -> None:
    with pytest.raises(KeyError, match="SLURM_JOB_ID"):
        requeue.Requeue(Policy(), {}, None)


@pytest.mark.parametrize(
    ("answer", "times"),
    [
        ("1896087600 1896091200", (1896087600, 1896091200)),
        ("1896087600 NONE", None),
        ("N/A N/A", None),
        ("", None),
    ],
)
def test_the_times_of_the_job(
    job: Job, monkeypatch: pytest.MonkeyPatch, answer: str, times: tuple[int, int] | None
) -> None:
    """In seconds of UNIX time, of this task alone; an answer at the third time is soon enough for a job's start."""
    job.stands_in("squeue", f'echo "$SLURM_TIME_FORMAT" >>told; echo warning >&2; echo "{answer}"')
    assert requeue.parse_times(requeue.ask_times("70_3", job.env())) == times
    assert job.told() == ["--noheader --format=%S %e --jobs=70_3", "%s"]

    monkeypatch.setattr(requeue, "RETRY_S", 0.01)
    job.stands_in("squeue", f'echo >>asked; [[ $(wc -l <asked) -eq 3 ]] || exit 1; echo "{answer}"')
    assert requeue.ask_times("70_3", job.env(), tries=3) == answer
    assert requeue.parse_times(answer) == times


def test_a_controller_that_is_away_does_not_say_the_times(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue, "RETRY_S", 0.01)
    job.stands_in("squeue", "echo 1 2; exit 1")
    assert requeue.parse_times(requeue.ask_times("71", job.env())) is None
    assert (requeue.ask_times("71", job.env(), tries=3), len(job.told())) == ("", 4)
