"""Where all ranks are, as far as this one can know: by the ranks' store, or by files if rank 0, its server, is gone.

A rank notes its place in the store now and then, so that the last place is known of a rank that is gone. In a hang it
answers the others: in the store, and in its stack file in the run directory.

On GPUs (read in torch's sources only) torch's flight recorder names NCCL's collective: it keeps 2,000.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp import processes
from cluster_ddp.run.names import Env
from cluster_ddp.runtime.failure import hang_verdict, last_progress, stacks
from cluster_ddp.runtime.failure.hang_verdict import Answer
from cluster_ddp.runtime.rendezvous import arrived_ranks
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

if TYPE_CHECKING:
    import torch.distributed as dist

# How long the stacks of a rank may take to be written whole: each line is synced.
_WRITTEN_S = 2.0

Question = Callable[["dist.Store"], Any]
Ask = Callable[[Question], Any]


class HangAnswers:
    """What the ranks say in a hang. `ask` asks their store, with a time limit: it returns None without an answer."""

    def __init__(self, topology: Topology, ask: Ask) -> None:
        self._topology, self._ask = topology, ask
        self._hang = 0  # its number
        self.lost_store = False
        """Whether the store has not answered in this hang."""
        self.have_files: Collection[int] = ()
        """Ranks whose files `collect` has seen."""

    def forget(self) -> None:
        """Forget the answers: a hang is over."""
        self._hang, self.lost_store = self._hang + 1, False

    def ask_store_again(self) -> None:
        """Let the next question reach the store, though it did not answer before."""
        self.lost_store = False

    def here(self, error: BaseException | None, workers: tuple[str, ...]) -> Answer:
        """Return where this rank is now; after an error of a collective, where that was raised."""
        place = stacks.place(stacks.live() if error is None else stacks.of_error(error))
        last: dict[str, Any] = {"operation": place.collective, "layer": place.layer}
        if place.collective or place.doing == "backward":
            last |= recorded(is_done=error is not None)
        if place.collective == "reduce_scatter":  # gloo makes an all-reduce of it
            last["operation"] = place.collective
        return Answer(
            rank=self._topology.rank,
            host=node_name(os.environ),
            pid=os.getpid(),
            where=place.where,
            doing=place.doing,
            workers=workers,
            lost_store=self.lost_store,
            **last,
        )

    def is_asked(self, here: Answer) -> bool:
        """Note where this rank is. Returns whether another one asks for its answer."""

        def note_place(store: dist.Store) -> bool:
            store.set(f"place/{self._topology.rank}", here.text())
            return bool(store.check([f"hang/{self._hang}/ask"]))

        return bool(self._request(note_place))

    def give(self, answer: Answer) -> bool:
        """Answer, and ask all others for the same. Returns whether the store has it."""

        def write(store: dist.Store) -> bool:
            store.set(f"hang/{self._hang}/{self._topology.rank}", answer.text())
            store.set(f"hang/{self._hang}/ask", "")
            return True

        return self._request(write) is not None

    def collect(self, here: Answer, *, patience_s: float) -> list[Answer]:
        """Return where each rank is: from the store, or from the stack files; they may take `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        silent = ended(files())
        told: list[str] | None = self._request(self._answers)
        while told is not None and time.monotonic() < deadline and len(told) + len(silent) < self._topology.world_size:
            time.sleep(0.1)
            told = self._request(self._answers)
        in_files = _whole_files()
        if told is None:
            found = _without_store(in_files)
            while found.keys() < in_files.keys() - ended(in_files) - {0} and time.monotonic() < deadline:
                time.sleep(0.1)
                in_files = files()
                found = _without_store(in_files)
        else:
            found = {one.rank: one for one in map(Answer.of, told)}
        self.have_files = in_files.keys()
        found[here.rank] = here
        absent = [rank for rank in range(self._topology.world_size) if rank not in found]
        seen: list[str] = [] if told is None else self._request(functools.partial(_places, absent)) or []
        noted = {one.rank: one for one in map(Answer.of, seen)}
        return [*found.values(), *(self._last_known(rank, in_files.get(rank), noted.get(rank)) for rank in absent)]

    def _request(self, question: Question) -> Any:
        """The store's answer; None if it has not answered in this hang: each attempt takes seconds."""
        answer = None if self.lost_store else self._ask(question)
        self.lost_store = answer is None
        return answer

    def _answers(self, store: dist.Store) -> list[str]:
        keys = [f"hang/{self._hang}/{rank}" for rank in range(self._topology.world_size)]
        missing = set(arrived_ranks.unset(store, keys))
        return arrived_ranks.values(store, [key for key in keys if key not in missing])

    def _last_known(self, rank: int, in_file: Answer | None, noted: Answer | None) -> Answer:
        """What is known of a rank that does not answer: why, if its file says so, or else where it was seen last."""
        if in_file is not None and in_file.state:
            return in_file
        host = "an unknown node" if rank else self._topology.master_addr
        seen = [one for one in (noted, in_file) if one is not None] or [Answer(rank=rank, host=host)]
        last = next((one for one in seen if one.pid), seen[0])  # of one that has noted no place, the store has its node
        is_near = last.host == node_name(os.environ) and last.pid
        return replace(last, state="stopped" if is_near and processes.is_stopped(last.pid) else "gone")


def run_dir_here() -> Path | None:
    """Return the run directory, if there is one on this node."""
    folder = Path(os.environ.get(Env.RUN_DIR) or last_progress.run_dir or "/nowhere")
    return folder if folder.is_dir() else None


def folders() -> list[Path]:
    """Return where ranks have their files: in the run directory; until there is one, where a local job says."""
    stacks = Path(os.environ.get(Env.STACKS) or "/nowhere")
    return [folder for folder in (run_dir_here(), stacks) if folder is not None and folder.is_dir()]


def recorded(*, is_done: bool) -> dict[str, Any]:
    """Return the collective that torch's flight recorder has last, as fields of an answer; {} if it has none.

    It may be one that has ended (`is_done`), as after its error.
    """
    import torch._C._distributed_c10d as c10d

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with contextlib.suppress(Exception):  # a build of torch without NCCL
            entries = json.loads(getattr(c10d, name)()).get("entries", [])
            entries = [one for one in entries if not one.get("is_p2p") and (is_done or not one.get("retired"))]
            if not entries:
                continue
            last = max(entries, key=lambda one: int(one["collective_seq_id"]))
            sizes = "+".join("x".join(map(str, size)) or "1" for size in last.get("input_sizes", []))
            operation = str(last["profiling_name"]).partition(":")[2]
            return {"operation": operation, "number": int(last["collective_seq_id"]), "sizes": sizes}
    return {}


def files() -> dict[int, Answer]:
    """Return what all ranks have written into their files, by rank."""
    return {one.rank: one for folder in reversed(folders()) for one in hang_verdict.read(folder)}


def _whole_files() -> dict[int, Answer]:
    """As `files`, once the stacks of all that are busy in C code are written, which takes some time."""
    until = time.monotonic() + _WRITTEN_S
    found = files()
    while any(one.state == "locked" and not one.where for one in found.values()) and time.monotonic() < until:
        time.sleep(0.1)
        found = files()
    return found


def ended(found: Mapping[int, Answer]) -> set[int]:
    """Return the ranks that a signal has ended: they answer nobody."""
    return {rank for rank, one in found.items() if one.has_ended}


def _without_store(found: Mapping[int, Answer]) -> dict[int, Answer]:
    """Those that the store does not answer either, and who have written so: they have lost nobody but rank 0."""
    return {rank: one for rank, one in found.items() if rank and one.lost_store}


def _places(ranks: Sequence[int], store: dist.Store) -> list[str]:
    """The places that ranks noted last, as JSON; of one that has noted none, its node."""
    found = []
    for rank in ranks:
        if store.check([f"place/{rank}"]):
            found.append(store.get(f"place/{rank}").decode())
        elif store.check([arrived_ranks.arrival(rank)]):
            found.append(Answer(rank=rank, host=arrived_ranks.hosts(store, [rank])[0]).text())
    return found


def leave_out_torchs_warnings() -> None:
    """Let torch's C++ code log only errors from now on, unless the user has chosen a level.

    A question to a store that is gone raises an error. It is logged as a warning as well, with twenty C++ frames
    (TCPStore.cpp, torch 2.10 to 2.14): a rank that hangs would print them after the verdict that names it. The variable
    is read when torch is imported, which scripts have done before, so the level is set where it is kept.
    """
    if os.environ.get("TORCH_CPP_LOG_LEVEL"):
        return
    import torch

    with contextlib.suppress(OSError, ValueError):  # a build of torch with glog
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        error = 2  # c10/util/logging_is_not_google_glog.h
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        level.value = max(level.value, error)
