"""Slurm's commands on the batch host, and what takes patience there: a requeue, and nodes to be excluded after it.

TERM ends this process soon after Slurm accepted a requeue. While nodes are to be excluded, it has to wait for that.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from cluster_ddp.agent.job import report

ANSWER_S = 60.0
"""Seconds after which a command that does not answer is killed."""
PATIENCE_S = 1800.0
"""Seconds during which a requeue is asked for: a controller that restarts or fails over takes minutes."""
RETRY_S = 5.0
"""Seconds between two such requests."""
END_S = 60.0
"""Seconds that Slurm has to end this process after it accepted a requeue."""
EXCLUDE_TRIES = 10
"""How often Slurm is asked to exclude nodes, once a second: it sends KILL some seconds after TERM."""

_FINAL = re.compile("disabled|denied|Invalid job|Only batch jobs|command not found")
_LONGEST_WORDS = 300


class Answer(NamedTuple):
    """What a command said."""

    is_ok: bool
    """Whether it ended with status 0."""
    words: str
    """Its output; if it failed, never empty."""


def ask(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    with_stderr: bool = False,
    outlives_term: bool = False,
    folder: str | None = None,
) -> Answer:
    """Run one of Slurm's commands, for `ANSWER_S` at most. Nothing is raised: a failure is an answer, too.

    Args:
        argv: the command and its arguments.
        env: its environment, with the PATH on which it is found.
        with_stderr: whether the answer has its stderr, too.
        outlives_term: block TERM in it, which Slurm may send to all processes of the job. Otherwise TERM ends it.
        folder: its working directory; None for this process's.
    """
    stderr = subprocess.STDOUT if with_stderr else subprocess.DEVNULL
    try:
        with _term(signal.SIG_BLOCK if outlives_term else signal.SIG_UNBLOCK):  # a child inherits what is blocked
            child = subprocess.Popen(
                argv, env=dict(env), cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
            )
    except FileNotFoundError:
        return Answer(False, f"{argv[0]}: command not found")
    except OSError as error:
        return Answer(False, f"{argv[0]}: {error.strerror}")
    with child:
        try:
            words = child.communicate(timeout=ANSWER_S)[0].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            child.kill()
            return Answer(False, f"{argv[0]}: no answer within {ANSWER_S:g} s")
    if child.returncode != 0:
        words = words or f"{argv[0]}: exit status {child.returncode}, no message"
    return Answer(child.returncode == 0, words)


class Configuration(NamedTuple):
    """What Slurm's configuration says of a job's tasks."""

    all_get_signals: bool = True
    """Whether a signal may reach all processes of a step, not only the first of each task (no cgroups)."""
    srun_ports: Sequence[int] = ()
    """Ports that srun may listen on, since a site lets nodes connect to them; empty for any."""
    slurmd_port: int = 6818
    """Where Slurm's daemons listen."""


def configuration(env: Mapping[str, str]) -> Configuration:
    """Ask for Slurm's configuration."""
    answer = ask(["scontrol", "show", "config"], env)
    if not answer.is_ok:
        return Configuration()
    values = dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(\S+)", answer.words, flags=re.MULTILINE))
    ports = re.fullmatch(r"(\d+)-(\d+)", values.get("SrunPortRange", ""))
    usable = range(int(ports[1]), int(ports[2]) + 1) if ports and int(ports[1]) else ()
    slurmd = re.match(r"\d+", values.get("SlurmdPort", ""))
    of_slurmd = int(slurmd[0]) if slurmd else Configuration().slurmd_port
    return Configuration(values.get("ProctrackType") != "proctrack/cgroup", usable, of_slurmd)


@contextlib.contextmanager
def _term(how: int) -> Iterator[None]:
    before = signal.pthread_sigmask(how, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _HeldTerm:
    """TERM while nodes are to be excluded: it is noted, and ends nothing.

    By a handler: if this thread blocked TERM, it would end the process in another of its threads.
    """

    def __init__(self) -> None:
        self.is_held = False
        self._came = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    def came(self) -> bool:
        return self._came

    def hold(self) -> None:
        if not self.is_held:
            self._before = signal.signal(signal.SIGTERM, self._note)
            self.is_held = True

    def release(self) -> None:
        """Give TERM the effect that it had before."""
        if self.is_held:
            with _term(signal.SIG_BLOCK):  # else one that comes just now could be lost
                signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            self.is_held = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True


class Requeueing:
    """One requeue of a job. Use it in the main thread.

    Args:
        job: its label, such as "12_3".
        leave: nodes to exclude, in addition to those that are excluded already.
        env: the environment of scontrol.
        nodes: how many nodes to ask for, if the job has given some back.
    """

    def __init__(self, job: str, leave: Sequence[str], env: Mapping[str, str], nodes: int | None = None) -> None:
        self._job, self._leave, self._env, self._nodes = job, leave, env, nodes
        self._term = _HeldTerm()

    def ask(self) -> bool:
        """Ask Slurm to requeue the job, until it ends this process with TERM, it refuses, or `PATIENCE_S` are over.

        TERM has its usual effect, unless nodes are to be excluded. Then it is kept until they are, and this returns.

        Returns:
            True: TERM came. False: the job is not requeued; the log says why.
        """
        try:
            found = self._ask_until_ended()
            if self._term.came():
                self._leave_behind()
                return True
        finally:
            self._term.release()
        if "disabled" in found:
            hint = "submit it with --requeue, so that it may be requeued."
        elif "Only batch jobs" in found:
            hint = "salloc's jobs are not requeued: start the command again; or use sbatch."
        elif "command not found" in found:
            hint = "put Slurm's commands on the PATH of the batch script. Then resume the run by hand."
        else:
            hint = "see whether the controller answers: scontrol ping. Then resume the run by hand."
        report.say(f"error: Requeueing job {self._job}:\n  {found}\n  Hint: {hint}")
        return False

    def _ask_until_ended(self) -> str:
        """Return what was found last."""
        give_up_at, found = time.monotonic() + PATIENCE_S, ""
        while not self._term.came() and time.monotonic() < give_up_at:
            if self._leave or self._nodes:
                self._term.hold()
            answer = self._scontrol("requeue", self._job)
            if answer.is_ok:
                self._leave_behind()
                if not self._term.came():
                    time.sleep(END_S)  # until TERM; a controller that is killed now may forget the request
                found = f"Slurm accepted the request, but did not end this start within {END_S:g} s."
                continue
            last, found = found, f"Slurm said: {_in_a_line(answer.words)}"
            if _FINAL.search(answer.words):
                break
            if found != last:
                report.say(f"{found}. Trying again for half an hour.")
            time.sleep(RETRY_S)
        return found

    def _leave_behind(self) -> None:
        """Exclude the nodes, if TERM is held for that. The job is pending, and can't start while this process lives."""
        if not self._term.is_held:
            return
        for _ in range(EXCLUDE_TRIES):
            wishes, refusal = self._wishes()
            if not refusal and not (refusal := self._update(wishes)):
                break
            time.sleep(1)
        else:
            wishes = wishes or [f"ExcNodeList={','.join(self._leave)}"]
            report.say(
                f"error: Job {self._job} may start on the same nodes again. Slurm said: {_in_a_line(refusal)}\n"
                f"  Hint: while the job is pending: scontrol update JobId={self._job} {' '.join(wishes)}"
            )
        self._term.release()

    def _wishes(self) -> tuple[list[str], str]:
        """What the job is to ask for, and what Slurm said if that is not known."""
        wishes = [] if self._nodes is None else [f"NumNodes={self._nodes}"]
        if not self._leave:
            return wishes, ""
        shown = self._scontrol("show", "job", self._job)
        known = re.search(r"(?<!\S)ExcNodeList=(\S+)", shown.words)
        if known is None:
            return wishes, shown.words or "nothing about the job"
        nodes = [*(() if known[1] == "(null)" else (known[1],)), *self._leave]  # an update replaces the list
        return [*wishes, f"ExcNodeList={','.join(nodes)}"], ""

    def _update(self, wishes: Sequence[str]) -> str:
        """Return what Slurm said if it did not change the job."""
        answer = self._scontrol("update", f"JobId={self._job}", *wishes)
        return "" if answer.is_ok else answer.words

    def _scontrol(self, *arguments: str) -> Answer:
        return ask(["scontrol", *arguments], self._env, with_stderr=True, outlives_term=self._term.is_held)


def _in_a_line(words: str) -> str:
    return "; ".join(line.strip() for line in words.splitlines() if line.strip())[:_LONGEST_WORDS]
