"""The requeue of a job: after a stop in time, or a failure; without nodes at fault.

It runs on the batch host, in the job's agent, when all ranks have ended. The job is requeued under its own id; of an
array, only this task. `scontrol` asks for it. No failure here ends the process: a log on a full disk, a file that can't
be read or a controller that is away for minutes must not cost the requeue.

TERM ends this process soon after Slurm accepted a requeue. While the job is to ask for something else, it has to wait.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence

from cluster_ddp.agent.job import job_log, slurm_commands
from cluster_ddp.run.names import EXIT_STOPPED

PATIENCE_S = 1800.0
"""Seconds during which a requeue is asked for: a controller that restarts or fails over takes minutes."""
RETRY_S = 5.0
"""Seconds between two such requests."""
END_S = 60.0
"""Seconds that Slurm has to end this process after it accepted a requeue."""
EXCLUDE_TRIES = 10
"""How often Slurm is asked to exclude nodes, once a second: it sends KILL some seconds after TERM."""

_FINAL = re.compile("disabled|denied|Invalid job|Only batch jobs|command not found")
_NODE_LISTS = re.compile(r"(?<!\S)(Req|Exc)NodeList=(\S+)")  # in what scontrol shows of a job
_LONGEST_WORDS = 300
_HINTS = (
    ("disabled", "submit it with --requeue, so that it may be requeued."),
    ("Only batch jobs", "salloc's jobs are not requeued: start the command again; or use sbatch."),
    ("command not found", "put Slurm's commands on the PATH of the batch script. Then resume the run by hand."),
)
_HINT = "see whether the controller answers: scontrol ping. Then resume the run by hand."

NOT_FINISHED = f"""\
error: A training was stopped in time, but the command ended with status 0:
  the job is not finished, and does not start again.
  Hint: let the command end with the training's status ({EXIT_STOPPED}), as with set -e in a shell script."""

SCRIPT_ENDED = """\
error: The batch script has ended before its ranks, and so has the job: nothing starts again.
  Hint: a signal to the batch script ends bash; launch takes its place by: exec cluster-ddp launch …"""


ANOTHER_START = """\
warning: This start of the job is over for Slurm ({}): nothing is asked for it.
  Its batch host was cut off, or somebody has requeued or ended the job. The run directory is the next start's."""


def may_restart(restarts: int, most: int) -> bool:
    """Whether a job that was stopped in time may start again, after so many restarts. If not, the log says why."""
    if restarts >= most:
        job_log.say(
            f"error: stopped in time, but started again {restarts} times already (--max-requeues {most}).\n"
            "  Hint: to resume, start it again with the same run directory; for more restarts: --max-requeues N"
        )
    return restarts < most


def node_lists(shown: str) -> dict[str, str]:
    """Return the nodes that a job requires ("Req") and excludes ("Exc"), by what scontrol shows of it."""
    return {key: value.replace("(null)", "") for key, value in _NODE_LISTS.findall(shown)}


@contextlib.contextmanager
def _term_noted(is_needed: bool) -> Iterator[list[int]]:
    """TERM during the body, if it has to wait, is noted in the list, and ends nothing.

    By a handler: if this thread blocked TERM, it would end the process in another of its threads.
    """
    came = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number)) if is_needed else None
    try:
        yield came
    finally:
        if is_needed:
            with slurm_commands.term(signal.SIG_BLOCK):  # else one that comes just now could be lost
                signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


class Requeue:
    """One requeue of a job.

    Args:
        job: its label, such as "12_3".
        env: the environment of scontrol.
        leave: nodes to exclude, in addition to those that are excluded already -> why. None is excluded if Slurm
            would then have too few for the job.
        changes: what else the job is to ask for, in the words of scontrol: NumNodes=2-8, if it has given some back.
        needed: with how many it can start.
        last: of a chain, the number of its last task, if all tasks from `job` on are meant.
    """

    def __init__(
        self,
        job: str,
        env: Mapping[str, str],
        *,
        leave: Mapping[str, str] = {},
        changes: Sequence[str] = (),
        needed: int = 1,
        last: int | None = None,
    ) -> None:
        self._jobs = job if last is None else f"{job}-{last}"
        """What is changed; `scontrol show` takes one task only."""
        self._job, self._env, self._leave, self._changes, self._needed = job, env, leave, changes, needed
        self._does, self._has_said, self._instead = "Starting", False, ""
        self._is_other = bool(leave or changes)
        """Whether the job is to ask for something else. Until it does, TERM is held in what runs here."""

    def ask(self, why: str, start: int) -> bool:
        """Have the job requeued. Call it in the main thread.

        Slurm ends this process with TERM soon after it accepted the request, and this function does not return. So say
        and write before what is to be said of this start. Only if the job is to ask for something else, TERM waits
        until it does, and then this returns.

        Args:
            why: for the log.
            start: number of the next start.

        Returns:
            True: Slurm is ending this start, or has ended it. End this process soon. False: the job is not requeued,
            and the log says why: Slurm refuses it, or `PATIENCE_S` are over.
        """
        job_log.say(f"{why}: requeueing job {self._job} (restart {start}).")
        self._does = "Requeueing"
        give_up_at, found = time.monotonic() + PATIENCE_S, ""
        while time.monotonic() < give_up_at:
            with _term_noted(self._is_other) as came:
                refusal = self._request(came, give_up_at)
                if self._is_other and (came or not refusal) and not self._instead:
                    self.exclude()  # the job is pending, and can't start while this process lives
            if self._instead and not found:  # else it is what was asked for
                job_log.say(ANOTHER_START.format(self._instead))
            if came or self._instead:
                return True
            if refusal:
                found = f"Slurm said: {_in_a_line(refusal)}"
                break
            time.sleep(END_S)  # until TERM; a controller that is killed now may forget the request
            found = f"Slurm accepted the request, but did not end this start within {END_S:g} s."
        hint = next((hint for sign, hint in _HINTS if sign in found), _HINT)
        job_log.say(f"error: Requeueing job {self._job}:\n  {found}\n  Hint: {hint}")
        return False

    def _request(self, came: Sequence[int], give_up_at: float) -> str:
        """Ask until Slurm accepts it, refuses it for good, or TERM came. Returns what Slurm said; empty if accepted."""
        said = ""
        while True:
            is_known, words = slurm_commands.why_not_this_start(self._job, self._env, outlives_term=self._is_other)
            if is_known and words:
                self._instead = words
                return ""
            refusal = words or self._scontrol("requeue", self._job)
            if not refusal or _FINAL.search(refusal) or time.monotonic() + RETRY_S >= give_up_at:
                return refusal
            if refusal != said:
                job_log.say(f"Slurm said: {_in_a_line(refusal)}. Trying again for half an hour.")
            said = refusal
            time.sleep(RETRY_S)
            if came:
                return refusal

    def exclude(self) -> None:
        """Tell Slurm which nodes the job, which is pending, is to exclude, and what else it asks for.

        Each by itself. If Slurm refuses one, the log says so.
        """
        for _ in range(EXCLUDE_TRIES):
            wishes, refusal = self._wishes()
            if not refusal:
                said = {wish: self._scontrol("update", f"JobId={self._jobs}", *wish.split()) for wish in wishes}
                wishes = [wish for wish in wishes if said[wish]]
                if not wishes:
                    return
                refusal = said[wishes[0]]
            time.sleep(1)
        job_log.say(
            f"error: Job {self._job} may start without {' '.join(wishes)}. Slurm said: {_in_a_line(refusal)}\n"
            f"  Hint: while the job is pending: scontrol update JobId={self._jobs} {' '.join(wishes)}"
        )

    def _wishes(self) -> tuple[list[str], str]:
        """What the job is to ask for, each the words of an update; and what Slurm said if that is not surely right."""
        wishes = [*self._changes]
        if not self._leave:
            return wishes, ""
        unsure = [*wishes, f"ExcNodeList={','.join(self._leave)}"]
        shown = self._ask("show", "job", self._job)
        known = node_lists(shown.words)
        if "Exc" not in known:
            return unsure, shown.words or "nothing about the job"
        nodes = ",".join(filter(None, [known["Exc"], *self._leave]))  # an update replaces the list
        excluded = slurm_commands.expanded(nodes, self._env, outlives_term=True)
        required = slurm_commands.expanded(known.get("Req", ""), self._env, outlives_term=True)
        usable = slurm_commands.usable_nodes(self._env, outlives_term=True)
        if excluded is None or required is None or usable is None:
            return unsure, "nothing about its nodes"
        if len(usable - {*excluded}) < self._needed:  # it would be pending for ever
            self._say(f"Slurm has too few other nodes for the job: it may start on {', '.join(self._leave)} again.")
            return wishes, ""
        self._say(*(f"{self._does} job {self._job} without {node}: {why}" for node, why in self._leave.items()))
        if {*required} & {*excluded}:  # else it would be pending for ever
            kept = ",".join(one for one in required if one not in excluded)
            return [*wishes, f"ReqNodeList={kept} ExcNodeList={nodes}"], ""
        return [*wishes, f"ExcNodeList={nodes}"], ""

    def _say(self, *lines: str) -> None:
        """Say it once: Slurm may refuse what is asked for."""
        for line in () if self._has_said else lines:
            job_log.say(line)
        self._has_said = True

    def _scontrol(self, *arguments: str) -> str:
        """Return what Slurm said if it refused; empty if it did what was asked."""
        answer = self._ask(*arguments)
        return "" if answer.is_ok else answer.words

    def _ask(self, *arguments: str) -> slurm_commands.CommandAnswer:
        argv = ["scontrol", *arguments]
        return slurm_commands.ask(argv, self._env, with_stderr=True, outlives_term=self._is_other)


def _in_a_line(words: str) -> str:
    return "; ".join(line.strip() for line in words.splitlines() if line.strip())[:_LONGEST_WORDS]
