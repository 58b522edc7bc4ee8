"""The requeue, with a scontrol and a squeue that stand in for Slurm's: what they are told, and what the log says."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
from slowness import LIMIT_S, scaled, wait_until

from cluster_ddp.agent.job import slurm_commands
from cluster_ddp.agent.job.restart import requeue

DISABLED = "Requested operation is presently disabled for job 71"
AWAY = "slurm_update error: Unexpected message received"

# A job's agent, once its ranks have ended. Waiting for Slurm's TERM it is killed, unless told otherwise.
AGENT = """import json, os, signal, sys, time
sys.path[:0] = json.loads(sys.argv[1])
import threading
from cluster_ddp.agent.job import slurm_commands
from cluster_ddp.agent.job.restart import requeue
from cluster_ddp.slurm.variables import Variables
sleep = time.sleep
time.sleep = lambda s: os.kill(os.getpid(), signal.SIGKILL) if s == 60 else sleep(s / 1000)
given = json.loads(sys.argv[2])
exec(given["setup"])
label = Variables(os.environ).job_label()
is_requeued = requeue.Requeue(label, os.environ, **given["asked"]).ask("Stopped in time", 3)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print("is requeued:", is_requeued, flush=True)
"""
SAID = "Stopped in time: requeueing job 71 (restart 3).\n"


class Done(NamedTuple):
    """How an agent ended."""

    status: int
    log: str

    @property
    def is_requeued(self) -> bool | None:
        """What `ask` returned; None if it did not return."""
        *_, last = ["", *self.log.splitlines()]
        return last.endswith("True") if last.startswith("is requeued: ") else None


class Job:
    """A job that ends, in a folder whose name no shell would like."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "it's a $(folder)"
        self.folder.mkdir()
        self.stands_in("scontrol", "")
        self.stands_in("sinfo", "seq -f node%g 9")

    def stands_in(self, name: str, does: str) -> None:
        """Make a command: it notes how it was called, then does what `does` (bash) says, in the folder."""
        path = self.folder / name
        here = shlex.quote(str(self.folder))
        first = f"#!/bin/bash\ncd {here}\n[[ $1 != --oneliner ]] || {{ cat instead 2>/dev/null; exit 0; }}\n"
        path.write_text(f'{first}[[ $1 == show || $1 == --Node ]] || echo "$*" >>told\n{does}\n')
        path.chmod(0o755)

    def told(self) -> list[str]:
        """What the commands were told, without questions."""
        path = self.folder / "told"
        return path.read_text().splitlines() if path.exists() else []

    def env(self, **env: str) -> dict[str, str]:
        return {"PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "71", **env}

    def start(
        self,
        *,
        leave: Mapping[str, str] = {},
        changes: Sequence[str] = (),
        needed: int = 1,
        setup: str = "",
        env: Mapping[str, str] = {},
        out: IO[str] | int = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start an agent, which asks for a requeue. `setup`: Python."""
        asked, root = {"leave": leave, "changes": [*changes], "needed": needed}, str(Path(requeue.__file__).parents[4])
        given = {"asked": asked, "setup": setup}
        words = [sys.executable, "-I", "-S", "-c", AGENT, json.dumps([root]), json.dumps(given)]
        return subprocess.Popen(words, env=self.env(**env), stdout=out, stderr=subprocess.STDOUT, text=True)

    def end(self, **options: Any) -> Done:
        """Run an agent to its end. Options: those of `start`."""
        agent = self.start(**options)
        try:
            log, _ = agent.communicate(timeout=scaled(LIMIT_S))
        finally:
            agent.kill()
        assert log is None or "Traceback" not in log, log
        return Done(agent.returncode, log or "")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


ARRAY = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("env", "label"),
    [
        ({}, "71"),
        ({"SLURM_RESTART_COUNT": "2"}, "71"),
        (ARRAY, "70_3"),
        ({**ARRAY, "SLURM_ARRAY_JOB_ID": "71"}, "71_3"),  # the array's last task
    ],
)
def test_a_job_is_requeued_under_its_own_id(job: Job, env: dict[str, str], label: str) -> None:
    """Of an array, only this task."""
    done = job.end(env=env)
    assert (done.status, done.log, job.told()) == (-signal.SIGKILL, SAID.replace("71", label), [f"requeue {label}"])


NODE, TWO = {"node3": "its disk"}, {"node3": "its disk", "node4": "its GPU"}
WISH = "update JobId=71 ExcNodeList=node3"


def on_bad_nodes(
    job: Job, *, leave: Mapping[str, str] = NODE, show: str = " ExcNodeList=(null)", more: str = "", **options: Any
) -> Done:
    """A requeue without some nodes. `more`: what scontrol does else (bash)."""
    job.stands_in("scontrol", f'if [[ $2 == job ]]; then echo "{show}"; fi\n{more}')
    return job.end(leave=leave, **options)


@pytest.mark.parametrize("leave", [NODE, TWO])
@pytest.mark.parametrize("before", ["", "node[1-2]"])
def test_nodes_at_fault_are_left_out(job: Job, leave: dict[str, str], before: str) -> None:
    """Those of --exclude stay excluded."""
    show = f"   ReqNodeList=(null) ExcNodeList={before or '(null)'} Comment=x"
    done = on_bad_nodes(job, leave=leave, show=show)
    excluded = ",".join(filter(None, (before, *leave)))
    assert job.told() == ["requeue 71", f"update JobId=71 ExcNodeList={excluded}"]
    said = [f"Requeueing job 71 without {node}: {fault}\n" for node, fault in leave.items()]
    assert (done.status, done.log) == (-signal.SIGKILL, "".join([SAID, *said]))


@pytest.mark.parametrize(
    ("required", "wish"),
    [("node3", "ReqNodeList= "), ("node1,node3", "ReqNodeList=node1 "), ("node1", ""), ("(null)", "")],
)
def test_a_job_does_not_require_a_node_that_it_excludes(job: Job, required: str, wish: str) -> None:
    """It would be pending for ever."""
    more = 'if [[ $2 == hostnames ]]; then tr , "\n" <<<"$3"; fi'
    on_bad_nodes(job, show=f" ReqNodeList={required} ExcNodeList=(null)", more=more)
    assert job.told() == ["requeue 71", f"update JobId=71 {wish}ExcNodeList=node3"]


def test_of_an_array_a_task_alone_leaves_a_node_out(job: Job) -> None:
    job.stands_in("scontrol", "[[ $* != 'show job 70_3' ]] || echo ' ExcNodeList=(null)'")
    job.end(leave=NODE, env=ARRAY)
    assert job.told() == ["requeue 70_3", "update JobId=70_3 ExcNodeList=node3"]


@pytest.mark.parametrize("before", ["(null)", "node2"])
@pytest.mark.parametrize("num_nodes", [2, 3])
@pytest.mark.parametrize(("away", "asked"), [("", 1), ("[[ $(wc -l <asked) -gt 2 ]] || exit 1", 3)])
def test_nodes_are_left_out_only_if_others_are_enough(
    job: Job, before: str, num_nodes: int, away: str, asked: int
) -> None:
    """The job would be pending for ever. Slurm may not say at once which nodes it has, nor which --exclude excludes."""
    job.stands_in("sinfo", f"echo >>asked\n{away}\nseq -f node%g 4")
    more = 'if [[ $2 == hostnames ]]; then tr , "\\n" <<<"$3"; fi'
    done = on_bad_nodes(job, show=f" ExcNodeList={before}", more=more, needed=num_nodes)
    excluded, are_enough = "node3" if before == "(null)" else "node2,node3", num_nodes + (before != "(null)") <= 3
    assert job.told() == ["requeue 71", *([f"update JobId=71 ExcNodeList={excluded}"] if are_enough else [])]
    said = "Requeueing job 71 without node3: its disk\n"
    if not are_enough:
        said = "Slurm has too few other nodes for the job: it may start on node3 again.\n"
    assert (done.status, done.log) == (-signal.SIGKILL, SAID + said)
    assert (job.folder / "asked").read_text() == "\n" * asked


@pytest.mark.parametrize("nodes", ["3", "2-8"])
@pytest.mark.parametrize(("leave", "wish"), [({}, []), (NODE, ["ExcNodeList=node3"])])
def test_a_job_that_gave_nodes_back_asks_for_all_again(
    job: Job, leave: dict[str, str], wish: list[str], nodes: str
) -> None:
    on_bad_nodes(job, leave=leave, changes=[f"NumNodes={nodes}", "MinMemoryNode=24000"])
    wishes = [f"NumNodes={nodes}", "MinMemoryNode=24000", *wish]
    assert job.told() == ["requeue 71", *(f"update JobId=71 {one}" for one in wishes)]


@pytest.mark.parametrize(("changes", "number"), [((), ""), (("NumNodes=3",), "NumNodes=3 ")])
@pytest.mark.parametrize(
    ("show", "more"),
    [
        ("slurm_load_jobs error: away", "[[ $1 != update ]]"),
        (" ExcNodeList=(null)", "[[ $1 != update ]] || { echo away; exit 1; }"),
    ],
)
def test_slurm_may_refuse_to_exclude_a_node(
    job: Job, show: str, more: str, changes: tuple[str, ...], number: str
) -> None:
    """It is asked ten times. The job is requeued all the same, and the log says so."""
    done = on_bad_nodes(job, show=show, more=more, changes=changes)
    assert job.told()[0] == "requeue 71"
    assert len(job.told()) == (11 + 10 * len(changes) if "Exc" in show else 1)
    assert done.log.count(f"error: Job 71 may start without {number}ExcNodeList=node3. Slurm said: ") == 1
    assert f"away\n  Hint: while the job is pending: scontrol update JobId=71 {number}ExcNodeList=node3\n" in done.log


def test_a_node_is_excluded_when_the_controller_is_back(job: Job) -> None:
    back = "[[ $1 != update || $(wc -l <told) -gt 5 ]]"
    done = on_bad_nodes(job, more=back)
    assert job.told() == ["requeue 71", *[WISH] * 5]
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
    done = job.end()
    assert (done.is_requeued, job.told()) == (False, ["requeue 71"])
    assert f"error: Requeueing job 71:\n  Slurm said: {words}\n  Hint: {hint}" in done.log


INSTEAD = "JobId=71 JobName=x JobState={} Reason=None Requeue=1 Restarts={} BatchFlag=1 BatchHost={} NumNodes=2"
OURS = {"SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "node1", "ENVIRONMENT": "BATCH"}


@pytest.mark.fault(
    "a batch host that was cut off comes back after Slurm has requeued the job elsewhere",
    "it asks for nothing more: it neither requeues the new start nor excludes its nodes",
    bound="at once",
    also=("test_what_a_start_is_known_by", "test_a_batch_host_that_is_back_leaves_the_next_start_alone"),
)
@pytest.mark.parametrize("leave", [{}, NODE])
@pytest.mark.parametrize(
    ("instead", "over"),
    [
        (("RUNNING", 2, "node1"), ""),
        (("SUSPENDED", 2, "node1"), ""),
        (("RUNNING", 3, "node1"), "Restarts=3"),
        (("RUNNING", 2, "node5"), "BatchHost=node5"),
        (("PENDING", 3, "node1"), "JobState=PENDING, Restarts=3"),
        (("CANCELLED", 2, "node1"), "JobState=CANCELLED"),
    ],
)
def test_a_start_that_is_over_asks_for_nothing(
    job: Job, leave: Mapping[str, str], instead: tuple[object, ...], over: str
) -> None:
    """A batch host that was cut off and comes back: the job runs elsewhere, and its new nodes are healthy."""
    (job.folder / "instead").write_text(INSTEAD.format(*instead))
    done = on_bad_nodes(job, leave=leave, env=OURS)
    if over:
        assert (done.is_requeued, job.told()) == (True, [])
        assert f"warning: This start of the job is over for Slurm ({over}): nothing is asked for it.\n" in done.log
    else:
        assert (done.status, job.told()) == (-signal.SIGKILL, ["requeue 71", *([WISH] if leave else [])])


COUNTED = {"SLURM_RESTART_COUNT": "7", "CLUSTER_DDP_SLURM_RESTARTS": "2"}


@pytest.mark.parametrize(
    ("env", "over"),
    [
        (COUNTED, ""),
        ({**COUNTED, "CLUSTER_DDP_SLURM_RESTARTS": "1"}, "Restarts=2"),
        ({"ENVIRONMENT": ""}, ""),
        (ARRAY, ""),
    ],
)
def test_what_a_start_is_known_by(job: Job, env: Mapping[str, str], over: str) -> None:
    """In a chain, Slurm counts the requeues of one task alone. A shell of salloc has no batch host."""
    host = "login" if "ENVIRONMENT" in env else "node1"
    (job.folder / "instead").write_text(INSTEAD.format("RUNNING", 2, host))
    answer = slurm_commands.why_not_this_start("71", {**job.env(), **OURS, **env})
    assert answer == slurm_commands.CommandAnswer(True, over)


def test_without_scontrol_nothing_is_tried_again(job: Job) -> None:
    (job.folder / "scontrol").unlink()
    done = job.end(setup=f"os.environ['PATH'] = {str(job.folder)!r}")
    assert done.is_requeued is False
    assert "Slurm said: scontrol: command not found\n  Hint: put Slurm's commands on the PATH" in done.log


@pytest.mark.parametrize("out", ["", "/dev/full"])
def test_it_is_requeued_when_the_controller_is_back(job: Job, out: str) -> None:
    """Also where no line can be written."""
    job.stands_in("scontrol", f"[[ $(wc -l <told) -ge 5 ]] || {{ echo {AWAY} >&2; exit 1; }}")
    with open(out or os.devnull, "w") as full:
        done = job.end(**({"out": full} if out else {}))
    assert (done.status, job.told()) == (-signal.SIGKILL, ["requeue 71"] * 5)
    assert done.log.count(f"Slurm said: {AWAY}. Trying again for half an hour.") == (not out)


# Sleep takes no time, but the clock shows it.
CLOCK = """now = [0]
time.monotonic = lambda: now[0]
time.sleep = lambda s: now.append(now.pop() + int(s))
"""


def test_half_an_hour_is_enough(job: Job) -> None:
    job.stands_in("scontrol", f"echo {AWAY} >&2; exit 1")
    done = job.end(setup=f"{CLOCK}requeue.RETRY_S = 600")
    assert len(job.told()) == 3
    assert done.is_requeued is False
    assert f"  Slurm said: {AWAY}\n  Hint: see whether the controller answers: scontrol ping." in done.log


def test_a_request_that_the_controller_has_forgotten_is_made_again(job: Job) -> None:
    done = job.end(setup=f"{CLOCK}requeue.END_S = 900")
    assert len(job.told()) == 2
    assert done.is_requeued is False
    assert "  Slurm accepted the request, but did not end this start within 900 s.\n  Hint: " in done.log


def test_a_scontrol_that_hangs_is_given_up(job: Job) -> None:
    job.stands_in("scontrol", "[[ $(wc -l <told) -ge 2 ]] || exec sleep 600")
    done = job.end(setup=f"slurm_commands.ANSWER_S = {scaled(1)}")
    assert (done.status, len(job.told())) == (-signal.SIGKILL, 2)
    assert "Slurm said: scontrol: no answer within " in done.log


# As Slurm ends a job without cgroups: TERM to all its processes.
TERM = "kill -TERM $PPID $$\nsleep 0.05\n"


def test_term_ends_the_agent_if_nothing_is_left_to_do(job: Job) -> None:
    job.stands_in("scontrol", TERM)
    assert job.end().status == -signal.SIGTERM


@pytest.mark.parametrize("thread", ["", "threading.Thread(target=sleep, args=(600,), daemon=True).start()"])
@pytest.mark.parametrize("answer", ["", f"[[ $1 != requeue ]] || {{ echo {AWAY}; exit 1; }}"])
def test_term_waits_until_the_nodes_are_excluded(job: Job, thread: str, answer: str) -> None:
    """It ends no scontrol either, and counts where Slurm's answer was lost."""
    more = f"[[ $1 == show ]] || {{ {TERM} echo lived >>told; }}\n{answer}"
    done = on_bad_nodes(job, more=more, setup=thread)
    assert job.told() == ["requeue 71", "lived", WISH, "lived"]
    assert (done.status, done.is_requeued) == (0, True)


def test_term_between_two_tries_is_the_end(job: Job) -> None:
    """Nothing is asked for again: it may have been a scancel."""
    setup = "time.sleep = lambda s: os.kill(os.getpid(), signal.SIGTERM) if s == 5 else sleep(s)"
    done = on_bad_nodes(job, setup=setup, more=f"[[ $1 != requeue ]] || {{ echo {AWAY}; exit 1; }}")
    assert job.told() == ["requeue 71", WISH]
    assert done.is_requeued is True


def test_term_ends_the_agent_once_the_nodes_are_excluded(job: Job) -> None:
    """It comes while the agent waits for it."""
    setup = "time.sleep = lambda s: os.kill(os.getpid(), signal.SIGTERM) if s == 60 else sleep(s)"
    done = on_bad_nodes(job, setup=setup)
    assert job.told() == ["requeue 71", WISH]
    assert done.status == -signal.SIGTERM


def test_term_from_outside_does_not_cut_a_request_short(job: Job) -> None:
    """The agent alone gets it, as with cgroups, while scontrol waits for its answer."""
    job.stands_in("scontrol", "[[ $1 != show ]] || echo ' ExcNodeList=(null)'\n[[ $1 != requeue ]] || sleep 1")
    agent = job.start(leave=NODE)
    wait_until(job.told)
    agent.terminate()
    log, _ = agent.communicate(timeout=scaled(LIMIT_S))
    assert (agent.returncode, log.splitlines()[-1]) == (0, "is requeued: True")
    assert job.told() == ["requeue 71", WISH]
