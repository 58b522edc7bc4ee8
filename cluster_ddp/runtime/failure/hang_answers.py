"""Where all ranks are, as far as this one can know: by the ranks' store, or by files if rank 0, its server, is gone.

A rank notes its place in the store now and then, so that the last place is known of a rank that is gone. In a hang it
answers the others: in the store, and in its stack file in the run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.runtime.failure import hang_verdict, stack_file
from cluster_ddp.runtime.failure.hang_verdict import Answer
from cluster_ddp.runtime.rendezvous import arrived_ranks
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

if TYPE_CHECKING:
    import torch.distributed as dist

# How long the stacks of a rank may take to be written whole: each line is synced.
_WRITTEN_S = 2.0

Ask = Callable[[Callable[["dist.Store", str], str], str], "str | None"]


class HangAnswers:
    """What the ranks say in a hang.

    Args:
        topology: this rank's place.
        ask: asks the ranks' store, with a time limit: returns None if it does not answer.
    """

    def __init__(self, topology: Topology, ask: Ask) -> None:
        self._topology, self._ask = topology, ask
        self._hang = 0  # its number
        self.lost_store = False
        """Whether the store has not answered in this hang."""

    def forget(self) -> None:
        """Forget the answers: a hang is over."""
        self._hang, self.lost_store = self._hang + 1, False

    def is_asked(self, here: Answer) -> bool:
        """Note where this rank is. Returns whether another one asks for its answer."""

        def note(store: dist.Store, _: str) -> str:
            store.set(f"place/{self._topology.rank}", here.text())
            return "asked" if store.check([f"hang/{self._hang}/ask"]) else "no"

        return self._request(note) == "asked"

    def give(self, answer: Answer) -> bool:
        """Answer, and ask all others for the same. Returns whether the store has it."""
        prefix = f"hang/{self._hang}"

        def write(store: dist.Store, _: str) -> str:
            store.set(f"{prefix}/{self._topology.rank}", answer.text())
            store.set(f"{prefix}/ask", "")
            return "written"

        return self._request(write) is not None

    def collect(self, here: Answer, run_dir: Path | None, *, patience_s: float) -> list[Answer]:
        """Return where each rank is: from the store, or from the files if the store does not answer.

        Args:
            here: where this rank is.
            run_dir: with the stack files; None if there is none.
            patience_s: how long the others may take.
        """
        deadline = time.monotonic() + patience_s
        told = self._request(self._answers)
        while told is not None and time.monotonic() < deadline and len(json.loads(told)) < self._topology.world_size:
            time.sleep(0.1)
            told = self._request(self._answers)
        files = _files(run_dir)
        until = time.monotonic() + _WRITTEN_S
        while any(one.state == "locked" and not one.where for one in files.values()) and time.monotonic() < until:
            time.sleep(0.1)
            files = _files(run_dir)
        if told is None:
            # Those that have lost the store as well have written it into their files.
            while (found := _without_store(files)).keys() < files.keys() - {0} and time.monotonic() < deadline:
                time.sleep(0.1)
                files = _files(run_dir)
        else:
            found = {one.rank: one for one in map(Answer.of, json.loads(told))}
        found[here.rank] = here
        absent = [rank for rank in range(self._topology.world_size) if rank not in found]
        return [*found.values(), *self._absent(absent, files, store_answers=told is not None)]

    def _request(self, question: Callable[[dist.Store, str], str]) -> str | None:
        """The store's answer; None if it has not answered in this hang: each attempt takes seconds."""
        answer = None if self.lost_store else self._ask(question, "")
        self.lost_store = answer is None
        return answer

    def _answers(self, store: dist.Store, _: str) -> str:
        keys = [f"hang/{self._hang}/{rank}" for rank in range(self._topology.world_size)]
        missing = set(arrived_ranks.unset(store, keys))
        there = [key for key in keys if key not in missing]
        values = [value for batch in arrived_ranks.batches(there) for value in store.multi_get(list(batch))]
        return json.dumps([value.decode() for value in values])

    def _absent(self, ranks: Sequence[int], files: dict[int, Answer], *, store_answers: bool) -> list[Answer]:
        """What is known of ranks that do not answer."""
        last = {}
        if store_answers:
            seen = self._request(lambda store, _: json.dumps([_seen(store, rank) for rank in ranks])) or "[]"
            last = {one.rank: one for one in map(Answer.of, filter(None, json.loads(seen)))}
        found = []
        for rank in ranks:
            one = files.get(rank)
            if one is None or not one.state:
                one = (
                    last.get(rank)
                    or one
                    or Answer(rank=rank, host="an unknown node" if rank else self._topology.master_addr)
                )
                is_near = one.host == node_name(os.environ) and one.pid
                one = replace(one, state="stopped" if is_near and stack_file.is_stopped(one.pid) else "gone")
            found.append(one)
        return found


def recorded(*, is_done: bool) -> dict[str, Any]:
    """Return the collective that torch's flight recorder has last, as fields of an answer; {} if it has none.

    Args:
        is_done: also one that has ended, as after its error.
    """
    import torch._C._distributed_c10d as c10d

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with contextlib.suppress(Exception):  # a build of torch without NCCL
            if found := hang_verdict.last_collective(json.loads(getattr(c10d, name)()), is_done=is_done):
                return found
    return {}


def _files(run_dir: Path | None) -> dict[int, Answer]:
    """What all ranks have written into their files, by rank."""
    return {one.rank: one for one in hang_verdict.read(run_dir)} if run_dir else {}


def _without_store(files: Mapping[int, Answer]) -> dict[int, Answer]:
    """Those that the store does not answer either: they, and not this rank, have lost nobody but rank 0."""
    return {rank: one for rank, one in files.items() if rank and one.lost_store}


def _seen(store: dist.Store, rank: int) -> str:
    """The place that a rank noted last, as JSON."""
    if store.check([f"place/{rank}"]):
        return store.get(f"place/{rank}").decode()
    if store.check([arrived_ranks.arrival(rank)]):
        return Answer(rank=rank, host=arrived_ranks.hosts(store, [rank])[0]).text()
    return ""
