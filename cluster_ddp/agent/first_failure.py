"""Which rank failed first, and why: by what the ranks' supervisors have told, and else by what logs say.

Of logs, it reads srun's and Slurm's English, and Python's last error; nothing else of the package does. A text that is
given here has one start of the job: logs are appended to.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Container, Sequence

from cluster_ddp.agent.rank_end import End
from cluster_ddp.errors import one_line
from cluster_ddp.run import failure_kind
from cluster_ddp.run.names import EXIT_STOPPED, Kind
from cluster_ddp.run.outcome import AGENT_KILLED, FOR_MEMORY, KILL, TERM, Failure, by_signal

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
ENDED_EARLY = "ended with status 0 while other ranks still computed"
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+([.,]\d+)*", re.IGNORECASE)
_OF_OTHERS = re.compile(r"\[rank|torch\.distributed\.elastic\.")


def by_ends(
    ends: Sequence[End],
    gone: Sequence[End] = (),
    silent: Failure | None = None,
    *,
    words_of: Callable[[End], str] = lambda end: "",
) -> Failure | None:
    """Return what failed first: the first cause that was told; else what looks most like one.

    Args:
        ends: in the order in which they were told.
        gone: ranks whose agent ended before it told how they ended.
        silent: what failed first by srun's word, of tasks that have not even told that they begin.
        words_of: says why a rank failed that has not noted it, such as the last error in its log, or nothing. It is
            called only until a cause is found.

    Returns None if nothing failed: status 75 is no failure, nor any other of a rank that was stopped in time.
    """
    failed = [one for one in ends if one.status not in (0, EXIT_STOPPED) and not one.was_stopped]
    killed: list[End] = []  # by KILL, after others failed: perhaps with them
    consequences: list[End] = []
    ended: list[End] = []  # by TERM, or by KILL after it
    for one in failed:
        end = _with_words(one, words_of)
        was_killed = end.status == KILL and not end.is_oom and not end.words
        if end.is_consequence:
            consequences.append(end)
        elif (end.status == TERM and not end.words) or (was_killed and ended):
            ended.append(end)
        elif was_killed and consequences:
            killed.append(end)
        else:
            return _named(_as_others_saw(end, ends))
    if silent is not None and silent.status != TERM:
        return silent
    if gone:
        return _named(gone[0]._replace(status=KILL, words=AGENT_KILLED, failure_kind=Kind.NODE))
    if consequences and (early := _ended_early(ends, consequences[0])) is not None:
        return _named(early._replace(status=consequences[0].status, words=ENDED_EARLY, failure_kind=Kind.PROGRAM))
    return next((_named(one) for one in (*killed, *consequences, *ended)), None)


def _with_words(end: End, words_of: Callable[[End], str]) -> End:
    """Say why a rank failed, if that is not known, and no signal ended it without a word."""
    if end.words or by_signal(end.status):
        return end
    words = one_line(words_of(end))
    return end._replace(words=words, failure_kind=end.failure_kind or failure_kind.of_line(words))


def _as_others_saw(end: End, ends: Sequence[End]) -> End:
    """Let a rank that a signal has ended without a word say what another one knows: where all ranks were."""
    knows = next((one for one in ends if one.failure_kind == Kind.SAW_PEERS and one.words), None)
    if end.words or knows is None or end.status <= 128 or end.status == KILL:
        return end
    return end._replace(words=f"it {end.how}. Rank {knows.rank}: {knows.words}")


def _ended_early(ends: Sequence[End], consequence: End) -> End | None:
    before = ends[: next(index for index, one in enumerate(ends) if one.rank == consequence.rank)]
    return next((one for one in before if one.status == 0 and not one.was_stopped), None)


def _named(end: End) -> Failure:
    killed = by_signal(end.status)
    kind = end.failure_kind or (Kind.KILLED if killed else "")
    found = Failure(end.rank, end.host, end.status, end.words or killed, kind)
    return for_memory(found) if end.is_oom else found


def for_memory(failure: Failure) -> Failure:
    """Say of a failure that the kernel has killed a process for memory; not of one that TERM ended."""
    words = failure.words
    if failure.status == TERM or FOR_MEMORY in words:
        return failure
    is_all = words in (by_signal(KILL), AGENT_KILLED)
    words = FOR_MEMORY if is_all else f"{words} (the kernel has killed a process for memory)".strip()
    return failure._replace(words=words, kind=Kind.HOST_MEMORY)


def without_numbers(words: str) -> str:
    """Return an error as it can be compared: free memory, addresses and process ids differ each time."""
    return _NUMBER.sub("N", words)


def lost_nodes(log_text: str) -> tuple[str, ...]:
    """Return the nodes that Slurm has lost, by the log of one start of a job; "" for one that it does not name."""
    named = dict.fromkeys(match[1] or "" for match in _NODE_FAILURE.finditer(log_text))
    return tuple(filter(None, named)) or tuple(named)


def by_srun(log_text: str, *, of_ranks: bool, heard: Container[int] = ()) -> Failure | None:
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


def last_error(log_text: str, rank: int) -> str:
    """Return the last line with an error, for scripts that do not use cluster_ddp; empty without one.

    Torch writes "[rank3]: " before the errors of a rank.
    """
    mine, errors = f"[rank{rank}]: ", [line for line in log_text.splitlines() if failure_kind.RAISED.match(line)]
    found = [line for line in errors if mine in line] or [one for one in errors if not _OF_OTHERS.match(one)]
    return one_line(found[-1].replace(mine, "", 1)) if found else ""


def with_memory(failure: Failure, log_text: str) -> Failure:
    """Return a failure that also says that the kernel has killed a process for memory, if the job's log says so.

    Slurm does not name the rank there.
    """
    return for_memory(failure) if _OUT_OF_MEMORY.search(log_text) else failure
