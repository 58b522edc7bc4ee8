"""Say where all ranks are when no step completes. A warning never ends the job; the collective timeout does.

Each rank has a thread. It notes in the ranks' store where its rank is, now and then: so the last place is known of a
rank that is gone. It answers other ranks that ask, also before its first step. After that, if no step, collective of
`World` or batch came for the warning time, all ranks write where they are, and one of them prints the verdict. It is
the lowest one that can. If rank 0, which serves the store, is stopped, the ranks read each other's files in the run
directory. A rank that reaches too few others leaves the verdict to those that reach more (`sick_nodes.may_accuse`).

On GPUs (read in the sources of torch 2.15 only) the main thread waits in `nonblocking_wait`, or in C++ in a call of
the script's own. torch's flight recorder then names NCCL's collective: it keeps 2,000 (FlightRecorder.hpp).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.contract import Env, File
from cluster_ddp.run_files import read_text
from cluster_ddp.runtime.failure import hang_verdict, sick_nodes, stack_file, stacks, step_clock
from cluster_ddp.runtime.failure.hang_verdict import Answer
from cluster_ddp.runtime.rendezvous import arrivals
from cluster_ddp.runtime.run_dir.fenced import atomic_write
from cluster_ddp.runtime.safe_print import complain
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

if TYPE_CHECKING:
    import torch.distributed as dist

DEFAULT_WARNING_S = 120.0
_LONGEST_S = 1.5
# The store's thread on rank 0 needs 19 µs per request: all ranks together may use a fiftieth of its time.
_EVERY_S_PER_RANK = 2e-3
# How long a rank may take to answer, besides twice the time between two looks.
_ANSWER_S = 1.0

Ask = Callable[[Callable[["dist.Store", str], str], str], "str | None"]


class HangWatch:
    """A thread that watches one rank.

    Args:
        topology: this rank's place.
        ask: asks the ranks' store, with a time limit: returns None if it does not answer.
        warning_s: seconds without a step until the ranks say where they are.
        timeout_s: seconds that a collective may take.
    """

    def __init__(self, topology: Topology, ask: Ask, *, warning_s: float, timeout_s: float) -> None:
        self._topology, self._ask = topology, ask
        self._warning_s, self._timeout_s = warning_s, timeout_s
        least_s = _EVERY_S_PER_RANK * topology.world_size
        self._every_s = max(0.05, min(_LONGEST_S, warning_s / 10, timeout_s / 10), least_s)
        self._stopped, self._told = threading.Event(), threading.Lock()
        self._episode, self._answered_at = 0, -1.0
        self._error: BaseException | None = None
        self._is_mute = False  # the store
        self._silent_nodes: list[str] = []
        self._file: stack_file.StackFile | None = None
        self._workers = stack_file.WorkerStacks()
        self._thread = threading.Thread(target=self._watch, name="hangs", daemon=True)
        self.words = ""
        """The verdict of the present hang; "" if there is none."""

    def start(self) -> None:
        """Start the thread. Call it once."""
        step_clock.reset()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and restore faulthandler."""
        self._stopped.set()
        self._thread.join(_ANSWER_S)
        self._workers.close()
        if self._file is not None and not self._thread.is_alive():
            self._file.close()
            self._file = None

    def verdict(self, error: BaseException) -> str:
        """Return where all ranks are, after a collective's error on this one; "" if that is unknown."""
        self._error = error
        with contextlib.suppress(Exception):  # the failure itself must be reported
            if not self.words:
                self._answer()
                self._tell(print_it=False)
            for node in self._silent_nodes:
                sick_nodes.note(os.environ, node, "its ranks do not answer")
            self._take_stderr()
        return self.words

    def answer(self, error: BaseException) -> None:
        """Write for the other ranks where this one was, after a timeout of a collective."""
        self._error = error
        with contextlib.suppress(Exception):
            self._answer()
            self._take_stderr()

    def aborted(self, error: BaseException) -> tuple[str, str] | None:
        """Return verdict and hint if a lost connection is due to a rank that a signal has ended; else None."""
        with contextlib.suppress(Exception):
            folder = self._run_dir()
            hint = hang_verdict.hint(hang_verdict.read(folder)) if folder else ""
            if hint and (verdict := self.verdict(error)):
                return verdict, hint
        return None

    def _watch(self) -> None:
        with contextlib.suppress(Exception):
            self._open_file()
        while not self._stopped.wait(self._every_s):
            with contextlib.suppress(Exception):  # such as a file system that is gone: no training needs this
                self._look()

    def _look(self) -> None:
        self._open_file()
        if self._file is not None:
            self._file.arm(self._warning_s + 4 * self._every_s)
        if self._answered_at == step_clock.last_s:
            return  # nothing new since the answer
        if self._answered_at >= 0:
            self._episode, self._answered_at, self.words = self._episode + 1, -1.0, ""
            self._is_mute = False
        is_late = bool(step_clock.last_s) and time.monotonic() - step_clock.last_s > self._warning_s
        here = self._here().text()
        if self._topology.rank == 0 and self._file is not None:
            self._file.write(here)  # its store would be gone with it
        is_asked = self._request(lambda store, _: self._note(store, here), "") == "asked"
        if is_late or is_asked:
            self._answered_at = step_clock.last_s
            self._answer()
            self._tell()

    def _request(self, question: Callable[[dist.Store, str], str], name: str) -> str | None:
        """The store's answer; None if it has not answered in this hang: each attempt takes seconds."""
        answer = None if self._is_mute else self._ask(question, name)
        self._is_mute = answer is None
        return answer

    def _note(self, store: dist.Store, here: str) -> str:
        store.set(f"place/{self._topology.rank}", here)
        return "asked" if store.check([f"hang/{self._episode}/ask"]) else "no"

    def _open_file(self) -> None:
        folder = self._run_dir()
        if self._file is None and folder is not None:
            self._file = stack_file.StackFile(folder / File.STACK.format(self._topology.rank))
            self._file.write(self._here().text())

    def _take_stderr(self) -> None:
        """Keep the verdict the last word: NCCL's watchdog, say, writes C++ frames after it."""
        if self._file is not None:
            self._file.take_stderr()

    def _run_dir(self) -> Path | None:
        folder = Path(os.environ.get(Env.RUN_DIR) or step_clock.run_dir or "/nowhere")
        return folder if folder.is_dir() else None

    def _here(self, *, ask_workers: bool = False) -> Answer:
        """Where this rank is now; after an error, where that was raised."""
        place = stacks.place(stacks.live() if self._error is None else stacks.of_error(self._error))
        more: dict[str, Any] = {"operation": place.collective, "lost_store": self._is_mute}
        if place.collective or place.doing == "backward":
            more |= _recorded(is_done=self._error is not None)
        if ask_workers:
            more["workers"] = self._workers.places()
        own = {"rank": self._topology.rank, "host": node_name(os.environ), "pid": os.getpid()}
        return Answer(**{**own, "where": place.where, "doing": place.doing, **more})

    def _answer(self) -> None:
        """Write where this rank is, for all others, and ask them for the same."""
        answer = self._here(ask_workers=True)
        self._open_file()
        if self._file is not None:
            self._file.write(answer.text())
            self._file.dump()
        prefix, rank = f"hang/{self._episode}", self._topology.rank

        def write(store: dist.Store, _: str) -> str:
            store.set(f"{prefix}/{rank}", answer.text())
            store.set(f"{prefix}/ask", "")
            return "written"

        if self._request(write, "") is None and self._file is not None:
            self._file.write(replace(answer, lost_store=True).text())

    def _tell(self, *, print_it: bool = True) -> None:
        """Make the verdict. One rank prints it: the lowest that comes so far."""
        turn_s = 0.0 if self._error or self._topology.rank == 0 else 2 * self._every_s + 2 * _ANSWER_S
        if self._stopped.wait(turn_s):
            return
        with self._told:
            if self.words:
                return
            answers = self._collect()
            reached, size = hang_verdict.reached(answers, node_name(os.environ)), self._topology.world_size
            knows = sick_nodes.may_accuse(reached, size, os.environ)
            if not knows and (kept := self._kept()):
                self.words = kept  # by a rank that reaches more
                return
            self.words = hang_verdict.verdict(answers)
            silent = hang_verdict.silent_nodes(answers)
            if silent and not knows:
                self.words += f"; rank {self._topology.rank} reaches {len(reached)} of {size} ranks: it may be cut off"
            self._silent_nodes = silent if knows else []
            present = [one.rank for one in answers if not one.state]
            if self._error is None and self._topology.rank != min(present, default=self._topology.rank):
                return
            if (folder := self._run_dir()) is not None:
                with atomic_write(folder / File.HANG) as file:
                    file.write(f"{self.words}\n".encode())
            if print_it and self._error is None:  # else its error is said, and is the last word
                complain(f"No step was completed for {self._warning_s:g} s: {self.words}.")

    def _kept(self) -> str:
        """The verdict on the present hang that another rank has written; "" if there is none."""
        folder = self._run_dir()
        if folder is None or self._file is None:
            return ""
        with contextlib.suppress(OSError):
            hang = folder / File.HANG
            age_s = self._file.path.stat().st_mtime - hang.stat().st_mtime  # by one clock, the file system's
            if age_s < min(self._warning_s, self._timeout_s):
                return read_text(hang).rstrip()
        return ""

    def _collect(self) -> list[Answer]:
        """Where each rank is: from the store, or from the run directory's files if the store does not answer."""
        deadline = time.monotonic() + 2 * self._every_s + _ANSWER_S
        told = self._request(self._answers, "")
        while told is not None and time.monotonic() < deadline and len(json.loads(told)) < self._topology.world_size:
            time.sleep(0.1)
            told = self._request(self._answers, "")
        files = self._files()
        if told is None:
            # Those that have lost the store as well have written it into their files.
            while (found := _without_store(files)).keys() < files.keys() - {0} and time.monotonic() < deadline:
                time.sleep(0.1)
                files = self._files()
        else:
            found = {one.rank: one for one in map(Answer.of, json.loads(told))}
        found[self._topology.rank] = self._here(ask_workers=True)
        absent = [rank for rank in range(self._topology.world_size) if rank not in found]
        return [*found.values(), *self._absent(absent, files, store_answers=told is not None)]

    def _files(self) -> dict[int, Answer]:
        """What all ranks have written into their files, by rank."""
        folder = self._run_dir()
        return {one.rank: one for one in hang_verdict.read(folder)} if folder else {}

    def _answers(self, store: dist.Store, _: str) -> str:
        keys = [f"hang/{self._episode}/{rank}" for rank in range(self._topology.world_size)]
        missing = set(arrivals.unset(store, keys))
        there = [key for key in keys if key not in missing]
        values = [value for batch in arrivals.batches(there) for value in store.multi_get(list(batch))]
        return json.dumps([value.decode() for value in values])

    def _absent(self, ranks: Sequence[int], files: dict[int, Answer], *, store_answers: bool) -> list[Answer]:
        """What is known of ranks that do not answer."""
        last = {}
        if store_answers:
            seen = self._request(lambda store, _: json.dumps([_seen(store, rank) for rank in ranks]), "") or "[]"
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


def _without_store(files: Mapping[int, Answer]) -> dict[int, Answer]:
    """Those that the store does not answer either: they, and not this rank, have lost nobody but rank 0."""
    return {rank: one for rank, one in files.items() if rank and one.lost_store}


def _seen(store: dist.Store, rank: int) -> str:
    """The place that a rank noted last, as JSON."""
    if store.check([f"place/{rank}"]):
        return store.get(f"place/{rank}").decode()
    if store.check([arrivals.arrival(rank)]):
        return Answer(rank=rank, host=arrivals.hosts(store, [rank])[0]).text()
    return ""


def _recorded(*, is_done: bool) -> dict[str, Any]:
    """The collective that torch's flight recorder has last; {} if it has none."""
    import torch._C._distributed_c10d as c10d

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with contextlib.suppress(Exception):  # a build of torch without NCCL
            if found := hang_verdict.last_collective(json.loads(getattr(c10d, name)()), is_done=is_done):
                return found
    return {}
