"""What a log says of a failure where no agent has told it: srun's and Slurm's English, and Python's last error.

Nothing else of the package reads it. A text that is given here has one start of the job: logs are appended to.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Container

from cluster_ddp.agent.notes import one_line
from cluster_ddp.agent.outcome import FOR_MEMORY, KILL, TERM, Failure, for_memory

# What srun says (22.05 to 26.11); and what the step daemons say, which do not name the node.
_NODE_FAILURE = re.compile(r"node failure on ([^\s.,]+)|DUE TO NODE FAILURE", re.IGNORECASE)
_SRUN = re.compile(r"srun: error: ([^:\s]+): tasks? (\d+)[^:\n]*: ([^\n]+)")
_NOT_LAUNCHED = re.compile(
    r"^srun: error: (task \d+ launch failed: [^\n]+|Unable to create step for job [^\n]+)", re.MULTILINE
)
_EXITED = re.compile(r"Exited with exit code (\d+)")
_OUT_OF_MEMORY = re.compile(r"\d oom[_-]kill event|OOM Killed|Out Of Memory")
SRUN = "srun"
"""In place of a host: srun itself has failed."""


_ERROR = re.compile(r"(\[rank\d+\]: )?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b", re.ASCII)
_OF_OTHERS = re.compile(r"\[rank|torch\.distributed\.elastic\.")


def lost_nodes(log_text: str) -> tuple[str, ...]:
    """Return the nodes that Slurm has lost, by the log of one start of a job; "" for one that it does not name."""
    named = dict.fromkeys(match[1] or "" for match in _NODE_FAILURE.finditer(log_text))
    return tuple(filter(None, named)) or tuple(named)


def srun_says(log_text: str, *, of_ranks: bool, heard: Container[int] = ()) -> Failure | None:
    """Return which task failed first, as srun says: for tasks whose agents have told nothing.

    Args:
        log_text: what the job's log has of this start.
        of_ranks: whether each task has one rank, with its number. Else the failure has no rank.
        heard: numbers of tasks that have told themselves what became of them.

    Returns:
        A task that TERM ended counts only if no other failed. None if the first one was heard.
    """
    found = [_of_srun(match) for match in _SRUN.finditer(log_text)]
    first = next((one for one in found if one.status != TERM), found[0] if found else None)
    if first is None or first.rank in heard:
        return None
    return first if of_ranks else first._replace(rank=None, words=f"task {first.rank}: {first.words}")


def not_launched(log_text: str) -> Failure | None:
    """Return which task was not started, as srun says, which may end with status 0 then (22.05).

    A node that can't write a task's log starts no task, for example.
    """
    said = _NOT_LAUNCHED.search(log_text)
    return said and Failure(None, SRUN, 1, one_line(said[1]))


def _of_srun(match: re.Match[str]) -> Failure:
    host, task, said = match.groups()
    if exited := _EXITED.match(said):
        status = int(exited[1]) & 0xFF
    elif _OUT_OF_MEMORY.search(said):
        status, said = KILL, FOR_MEMORY
    else:
        names = {signal.strsignal(number): 128 + number for number in signal.Signals}
        status = names.get(said.partition(" (core")[0].strip(), 1)
    return Failure(int(task), host, status, one_line(said))


def last_error(log_text: str, rank: int | None) -> str:
    """Return the last line with an error: for scripts that do not use cluster_ddp. Empty without one.

    Args:
        log_text: what a log has of this start. Torch writes "[rank3]: " before the errors of a rank.
        rank: the rank that failed; None for the parent of several.
    """
    mine, errors = f"[rank{rank}]: ", [line for line in log_text.splitlines() if _ERROR.match(line)]
    found = [line for line in errors if mine in line] or [one for one in errors if not _OF_OTHERS.match(one)]
    return one_line(found[-1].replace(mine, "", 1)) if found else ""


def with_memory(failure: Failure, log_text: str) -> Failure:
    """Return a failure that also says that the kernel has killed a process for memory, if Slurm says so.

    Args:
        failure: what failed first.
        log_text: what the job's log has of this start. Slurm does not name the rank there.
    """
    if not _OUT_OF_MEMORY.search(log_text):
        return failure
    return failure._replace(words=for_memory(failure.words, failure.status))
