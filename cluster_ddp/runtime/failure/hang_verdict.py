"""A verdict in words: which ranks wait in which collective, and which rank is elsewhere. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.run.files import parse, read_text
from cluster_ddp.run.names import File
from cluster_ddp.runtime.failure import sick_nodes, stack_timer, stacks

STATES = {
    "stopped": "is stopped (SIGSTOP, or a debugger)",
    "gone": "does not answer: it is stopped, or its node is gone",
    "locked": "is in C code that holds Python's lock",
    "aborted": "was aborted: with gloo this means that calls or shapes differ between ranks",
}
_SAME_CALLS = "all ranks must make the same calls: is one of them inside `if world.is_main:`?"
_FATAL = "Fatal Python error: "  # of faulthandler


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Where one rank is."""

    rank: int
    host: str
    pid: int = 0
    where: str = ""
    """File and line of the user's code, such as "train.py:96"."""
    doing: str = ""
    operation: str = ""
    """The collective that it waits in; "" for none."""
    number: int = 0
    """Of that collective, as torch's flight recorder counts; 0 if unknown."""
    sizes: str = ""
    """Of its tensors, such as "10" or "3x4"."""
    layer: str = ""
    """The layer of a sharded model that the collective is for, such as "layers.0"."""
    workers: tuple[str, ...] = ()
    """Where the DataLoader's workers are."""
    lost_store: bool = False
    """Whether the ranks' store, which rank 0 serves, did not answer it in this hang."""
    state: str = ""
    """Why the rank itself can't say where it is: a key of `STATES`, or words. Then the rest is what was seen last."""

    @property
    def has_ended(self) -> bool:
        """Whether a signal has ended the rank, as its file says."""
        return self.state == "aborted" or self.state.startswith("crashed")

    @property
    def at(self) -> tuple[str, str]:
        """What the rank waits in, and where."""
        return self.operation, self.where

    def text(self) -> str:
        """Return it as JSON, in one line."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Answer:
        """Return what `text` returned as JSON.

        Raises:
            ValueError, TypeError: it is something else.
        """
        values: dict[str, Any] = parse(text)
        found = cls(**{**values, "workers": tuple(values.get("workers", ()))})
        given, legal = asdict(found), asdict(cls(rank=0, host=""))
        wrong = [name for name in legal if type(given[name]) is not type(legal[name])]
        if wrong or not all(isinstance(one, str) for one in found.workers):
            raise TypeError(f"of another type: {wrong or 'workers'}")
        return found


def verdict(answers: Sequence[Answer]) -> str:
    """Return where all ranks are: those that wait first, ranks at the same place together."""
    collectives: dict[tuple[str, int], set[str]] = {}
    for one in answers:
        collectives.setdefault((one.operation, one.number), set()).add(one.sizes)
    groups: dict[str, list[Answer]] = {}
    for one in sorted(answers, key=lambda one: (bool(one.state), not one.operation, one.rank)):
        differs = len(collectives[one.operation, one.number]) > 1 or any(two.state == "aborted" for two in answers)
        groups.setdefault(_words(one, with_sizes=differs), []).append(one)
    return "; ".join(f"{_names(group)} {_plural(words, len(group))}" for words, group in groups.items())


class Judgement(NamedTuple):
    """What one rank makes of all answers."""

    words: str
    """The verdict."""
    silent: str
    """Ranks that do not answer, and are not known to be busy in C code or to have ended; "" for none."""
    silent_nodes: list[str]
    """Nodes none of whose ranks answers; empty if this rank may not accuse them."""
    may_accuse: bool
    """See `suspects`."""
    is_lowest: bool
    """Whether no rank below it answers."""
    may_end: bool
    """Whether ranks are silent that have stack files here: only by its file is one known to be busy in C code."""


def judge(answers: Sequence[Answer], here: Answer, world_size: int, have_files: Container[int]) -> Judgement:
    """Return what the rank that is `here` makes of all ranks' answers, its own included; some ranks `have_files`."""
    reached = {one.rank: one.host for one in answers if not one.state or one.host == here.host}
    may_accuse = sick_nodes.may_accuse(reached, world_size, os.environ)
    nodes = sorted({one.host for one in answers} - {one.host for one in answers if one.state != "gone"})
    cut_off = f"; rank {here.rank} reaches {len(reached)} of {world_size} ranks: it may be cut off"
    silent = [one for one in answers if one.state in ("gone", "stopped")]
    return Judgement(
        words=verdict(answers) + (cut_off if nodes and not may_accuse else ""),
        silent=_names(silent) if silent else "",
        silent_nodes=nodes if may_accuse else [],
        may_accuse=may_accuse,
        is_lowest=here.rank == min((one.rank for one in answers if not one.state), default=here.rank),
        may_end=bool(silent) and all(one.rank in have_files for one in silent),
    )


def hint(answers: Sequence[Answer], run_dir: Path | None) -> str:
    """Return what to do about ranks that a signal has ended, or that are at different places; else ""."""
    crashed = [one.rank for one in answers if one.state.startswith("crashed")]
    if any(one.state == "aborted" for one in answers):
        return f"{_SAME_CALLS} Else give the tensors of a collective the same shape on all ranks"
    if crashed:
        stacks_of = f", and its stacks: {File.STACK.format(crashed[0])}" if run_dir is not None else ""
        return f"read the output of that rank{stacks_of}"
    all_know = not any(one.state or one.doing.startswith("DataLoader") for one in answers)
    places = {one.at for one in answers}
    return _SAME_CALLS if all_know and len(places) > 1 else ""


def read(run_dir: Path) -> list[Answer]:
    """Return what the ranks' stack files say, by rank. A file that can't be read is left out."""
    found = []
    for path in run_dir.glob(File.STACK.format("*")):
        try:
            text = read_text(path)
            found.append(_from_file(*text.partition("\n")[::2]))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda one: one.rank)


def kept(own_file: Path, limit_s: float) -> str:
    """Return the verdict that a rank has written, at most `limit_s` before this rank's own stack file; else ""."""
    path = own_file.with_name(File.HANG)
    with contextlib.suppress(OSError):
        age_s = own_file.stat().st_mtime - path.stat().st_mtime  # by one clock, the file system's
        if age_s < limit_s:
            return read_text(path).rstrip()
    return ""


def _from_file(head: str, dumps: str) -> Answer:
    """What a stack file says: where its rank was aborted, or stuck in C, else what the rank wrote itself."""
    answer = Answer.of(head.rstrip())
    fatal, stuck = dumps.rfind(_FATAL), dumps.rfind(stack_timer.HEAD)
    if stuck < dumps.rfind(stacks.ANSWERED):  # it was stuck, and could answer later
        stuck = -1
    if max(fatal, stuck) < 0:
        return answer
    place = stacks.place(stacks.of_text(dumps[max(fatal, stuck) :]))
    state = "locked"
    if fatal >= 0:
        reason = dumps[fatal + len(_FATAL) :].partition("\n")[0].strip()
        may_be_in_one = bool(place.collective) or place.doing == "backward"  # DDP's are in C++
        state = "aborted" if reason == "Aborted" and may_be_in_one else f"crashed ({reason})"
    # What the rank itself wrote of number and sizes is of an earlier collective.
    at = replace(answer, where=place.where, doing=place.doing, operation=place.collective)
    return replace(at, number=0, sizes="", state=state)


def _words(one: Answer, *, with_sizes: bool) -> str:
    at = f" ({one.where})" if one.where else ""
    if one.operation:
        number = f" #{one.number}" if one.number else ""
        of = f" of {one.sizes} numbers" if with_sizes and one.sizes else ""
        layer = f" for {one.layer}" if one.layer else ""
        words = f"wait in {one.operation}{number}{of}{layer}{at}"
    else:
        words = f"are in {one.doing or 'unknown code'}{at}"
    if one.workers:
        words += f", and its workers are in {', '.join(dict.fromkeys(one.workers))}"
    if not one.state:
        return words
    seen = one.where or one.operation
    is_here = one.state == "locked" or one.has_ended
    last = f"{':' if is_here else '; seen last:'} {_plural(words, 1)}"
    return f"{STATES.get(one.state, one.state)}{last if seen else ''}"


def _plural(words: str, count: int) -> str:
    """Words for one rank or several."""
    if count > 1:
        return words
    return re.sub("^wait ", "waits ", re.sub("^are ", "is ", words))


def _names(group: Sequence[Answer]) -> str:
    if len(group) == 1:
        return f"rank {group[0].rank} on {group[0].host}"
    return f"ranks {ranges(one.rank for one in group)}"


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks in short: "0-2,5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)
