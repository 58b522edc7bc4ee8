"""Seven ways to hang, with real processes: the verdict names rank, host, file and line."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, job_ids, run_ranks, slurm_step
from slowness import scaled
from torch.utils.data import DataLoader, Dataset

import cluster_ddp
from cluster_ddp import processes
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.doctor.hang_autopsy import autopsy
from cluster_ddp.run.names import Env
from cluster_ddp.runtime.failure import hang_watch, last_progress, stack_timer
from cluster_ddp.runtime.failure.hang_answers import HangAnswers
from cluster_ddp.runtime.failure.hang_verdict import Answer

JOB_ID = job_ids()
HOST = os.uname().nodename
FILE = Path(__file__).name
WARNING_S = scaled(2)  # longer than a busy machine takes to the fault
Ends = tuple[list[Outcome], Path]
EndsOf = Callable[[Callable[[], None]], Ends]


def line(mark: str) -> int:
    """Number of the line that ends with this comment."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"  # {mark}"))


def watched(warning_s: float = WARNING_S) -> AbstractContextManager[cluster_ddp.World]:
    hang_watch._ANSWER_S = scaled(5)  # on a busy machine, a rank may not run for seconds
    limit_s = float(os.environ["TIMEOUT_S"])
    return cluster_ddp.distributed(cuda=False, hang_warning_s=warning_s, collective_timeout_s=limit_s)


def hang(fault: Callable[[int], object], *, warning_s: float = WARNING_S, more: int = 0) -> None:
    with watched(warning_s) as world:
        dist.all_reduce(torch.zeros(1))
        last_progress.note_step()
        fault(world.rank)
        dist.all_reduce(torch.zeros(10 + more * world.rank))  # the collective


def ranks(
    function: Callable[[], None],
    folder: Path,
    job_id: int = JOB_ID,
    *,
    count: int = 2,
    timeout_s: float = 5,
    restart_s: str = "",
    hanging: int | None = 1,
) -> list[Outcome]:
    env = {"CLUSTER_DDP_RUN_DIR": str(folder), "CLUSTER_DDP_NOTES": str(folder), Env.HANG_RESTART_S: restart_s}
    steps = [slurm_step(rank, count, job_id=job_id, TIMEOUT_S=f"{scaled(timeout_s):g}", **env) for rank in range(count)]
    return run_ranks(function, steps, folder, hanging=hanging)


@pytest.fixture(scope="module")
def ends_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndsOf]:
    """How the ranks of one of `HANGS` ended, and their folder. Four run at a time: they do little but wait."""
    folder = tmp_path_factory.mktemp("hangs")
    scaled(1)  # measures the machine, before the threads
    with ThreadPoolExecutor(4) as pool:
        started = {}
        for number, (function, options) in enumerate(HANGS.items(), 1):
            (place := folder / function.__name__).mkdir()
            started[function] = pool.submit(ranks, function, place, JOB_ID + number, **options), place
        yield lambda function: (started[function][0].result(), started[function][1])


def said(ends: list[Outcome], folder: Path, *, warned: bool = True) -> str:
    """The verdict is the last word, and is kept."""
    output = "".join(end.output for end in ends)
    assert ("No step was completed for" in output) == warned, output  # on a busy machine also before
    verdict = (folder / "hang.txt").read_text().strip()
    assert f"{verdict}." in output.partition("error: Waiting")[2], output
    assert verdict in autopsy(folder)
    record = json.loads(autopsy(folder, as_json=True))
    assert record["verdict"] == verdict
    assert all(Path(one["stacks"]).parent == folder and one["host"] for one in record["ranks"])
    notes = [Notes(folder).failure(rank) for rank in range(len(ends))]
    (cause,) = [note.words for note in notes if note is not None and note.kind not in ("peer", "saw peers")]
    assert verdict[:100] in cause
    print(verdict)
    return verdict


def skipping() -> None:
    hang(lambda rank: skip() if rank == 1 else None)


def skip() -> None:
    time.sleep(600)  # the skip


@pytest.mark.fault(
    "in a hang, all ranks answer, or one is in C code, or its file can't be seen; with `--hang-restart-s`",
    "nothing ends before `--collective-timeout-s`: it may be a long step",
    also=(
        "test_a_call_in_c_that_holds_pythons_lock",
        "test_silent_ranks_end_a_start_only_where_their_files_would_say_that_they_are_busy",
    ),
)
def test_a_rank_that_skips_a_collective(ends_of: EndsOf) -> None:
    """All ranks answer: `--hang-restart-s` does not end such a hang."""
    verdict = said(*ends_of(skipping))
    output = "".join(end.output for end in ends_of(skipping)[0])
    assert f"Waiting {scaled(5):g} s for the other ranks:" in output
    waits = rf"ranks 0,2 wait in all_reduce #\d+ \({FILE}:{line('the collective')}\)"
    assert re.fullmatch(rf"{waits}; rank 1 on {HOST} is in skip \({FILE}:{line('the skip')}\)", verdict), verdict


def skipping_before_batch_norm() -> None:
    with watched() as world:
        model = world.wrap(torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2)))
        for number in range(2):
            if number and world.rank == 1:
                skip()
            model(torch.ones(4, 1)).sum().backward()  # the forward pass
            last_progress.note_step()


def test_a_rank_that_skips_a_forward_pass_that_broadcasts_buffers(ends_of: EndsOf) -> None:
    verdict = said(*ends_of(skipping_before_batch_norm))
    waits = rf"rank 0 on {HOST} waits in broadcast( #\d+)? \({FILE}:{line('the forward pass')}\)"
    assert re.fullmatch(rf"{waits}; rank 1 on {HOST} is in skip \({FILE}:{line('the skip')}\)", verdict), verdict


class Late(torch.autograd.Function):
    """Does nothing, and on rank 1 takes its time for it in the second backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_late: bool) -> torch.Tensor:
        ctx.is_late = is_late
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.is_late:
            skip()
        return gradient, None


def late_in_a_sharded_backward_pass() -> None:
    with watched() as world:
        layers = [torch.nn.Linear(2, 2) for _ in range(3)]
        model = world.wrap(torch.nn.Sequential(*layers), strategy="fsdp", blocks=torch.nn.Linear)
        is_late = False
        layers[1].register_forward_pre_hook(lambda _, inputs: Late.apply(inputs[0], is_late))
        for number in range(2):
            is_late = bool(number and world.rank)
            model(torch.ones(4, 2)).sum().backward()  # the backward pass
            last_progress.note_step()


def test_a_rank_that_is_late_in_the_backward_pass_of_a_sharded_model(ends_of: EndsOf) -> None:
    """The other one waits to reduce the layer's gradients, and says of which layer."""
    verdict = said(*ends_of(late_in_a_sharded_backward_pass))
    waits = rf"rank 0 on {HOST} waits in reduce_scatter( #\d+)? for 1 \({FILE}:{line('the backward pass')}\)"
    assert re.fullmatch(rf"{waits}; rank 1 on {HOST} is in skip \({FILE}:{line('the skip')}\)", verdict), verdict


def coming_late() -> None:
    hang(lambda rank: skip() if rank == 1 else evaluate())


def evaluate() -> None:
    """Until the warning has said where all are."""
    while not (Path(os.environ["CLUSTER_DDP_RUN_DIR"]) / "hang.txt").exists():
        time.sleep(0.1)


def test_a_rank_that_came_to_the_collective_after_the_warning(ends_of: EndsOf) -> None:
    """The last verdict says where it is now."""
    verdict = said(*ends_of(coming_late))
    assert "is in evaluate" in ends_of(coming_late)[0][0].output
    waits = rf"rank 0 on {HOST} waits in all_reduce #\d+ \({FILE}:{line('the collective')}\)"
    assert re.fullmatch(rf"{waits}; rank 1 on {HOST} is in skip \({FILE}:{line('the skip')}\)", verdict), verdict


def spinning() -> None:
    hang(lambda rank: spin() if rank == 1 else None)


def spin() -> None:
    while True:
        pass  # the loop


def test_an_endless_loop(ends_of: EndsOf) -> None:
    verdict = said(*ends_of(spinning))
    assert re.search(rf"rank 1 on {HOST} is in spin \({FILE}:\d+\)$", verdict), verdict


def locked() -> None:
    hang(lambda rank: lock() if rank == 1 else None)


def lock() -> None:
    """In a system call that resumes after a signal, as C code is written to."""
    reader, writer = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)  # the call
    os.close(writer)


def test_a_call_in_c_that_holds_pythons_lock(ends_of: EndsOf) -> None:
    """It is busy: `--hang-restart-s` does not end that."""
    verdict = said(*ends_of(locked))
    assert f"Waiting {scaled(15):g} s for the other ranks:" in "".join(end.output for end in ends_of(locked)[0])
    where = rf"is in lock \({FILE}:{line('the call')}\)"
    assert re.search(rf"rank 1 on {HOST} is in C code that holds Python's lock: {where}", verdict), verdict


def before_a_step() -> None:
    with cluster_ddp.distributed(cuda=False, collective_timeout_s=float(os.environ["TIMEOUT_S"])) as world:
        if world.rank == 1:
            skip()
        dist.all_reduce(torch.zeros(1))


def test_a_rank_that_sleeps_before_the_first_step(ends_of: EndsOf) -> None:
    """Or where nothing counts steps, such as without a Checkpointer. Its node is not at fault."""
    verdict = said(*ends_of(before_a_step), warned=False)
    assert re.search(rf"rank 1 on {HOST} is in skip \({FILE}:{line('the skip')}\)$", verdict), verdict


def crashing() -> None:
    hang(lambda rank: ctypes.string_at(0) if rank == 1 else None, warning_s=60)  # the crash


def test_a_rank_that_crashes_is_no_matter_of_shapes(ends_of: EndsOf) -> None:
    ends, folder = ends_of(crashing)
    verdict = (folder / "hang.txt").read_text().strip()
    assert f"{verdict}.\n  Hint: read the output of that rank" in ends[0].output, ends
    assert re.search(
        rf"rank 1 on {HOST} crashed \(Segmentation fault\): is in .* \({FILE}:{line('the crash')}\)", verdict
    )


class Images(Dataset[Any]):
    """The second rank's third image never comes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 2 and os.environ["SLURM_PROCID"] == "1":
            processes.end_with_parent(signal.SIGKILL, os.getppid())  # nobody else would end a worker
            held = threading.Lock()
            held.acquire()
            held.acquire()  # the lock
        return index


def load(workers: int) -> None:
    forked = "fork" if workers else None  # as where the ranks are no forkserver's children
    for _ in DataLoader(Images(), num_workers=workers, multiprocessing_context=forked):  # the loader
        last_progress.note_progress()  # as `world.shard` does: a busy machine starts a worker late


def loading() -> None:
    hang(lambda rank: load(0))


def loading_by_a_worker() -> None:
    hang(lambda rank: load(1))


def test_a_deadlock_in_a_loader(ends_of: EndsOf) -> None:
    verdict = said(*ends_of(loading))
    where = rf"is in DataLoader, in __getitem__ \({FILE}:{line('the lock')}\)"
    assert re.search(rf"rank 1 on {HOST} {where}", verdict), verdict


def test_a_deadlock_in_a_loaders_worker(ends_of: EndsOf) -> None:
    verdict = said(*ends_of(loading_by_a_worker))
    workers = rf"its workers are in __getitem__ \({FILE}:{line('the lock')}\)"
    assert re.search(rf"rank 1 on {HOST} is in DataLoader \({FILE}:{line('the loader')}\), and {workers}", verdict), (
        verdict
    )


def stopped_0() -> None:
    hang(lambda rank: stop() if rank == 0 else None)


def stopped_1() -> None:
    hang(lambda rank: stop() if rank == 1 else None)


def stop() -> None:
    """Once this place is noted: it is what was seen last."""
    noted, is_asked = threading.Event(), HangAnswers.is_asked

    def noting(self: HangAnswers, here: Answer) -> bool:
        found = is_asked(self, here)
        if here.doing == "stop":
            noted.set()
        return found

    HangAnswers.is_asked = noting  # type: ignore[method-assign]
    noted.wait()
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(("function", "rank"), [(stopped_0, 0), (stopped_1, 1)])
def test_a_stopped_rank(ends_of: EndsOf, function: Callable[[], None], rank: int) -> None:
    """With `--hang-restart-s`: long before the collective's timeout, its job may start again."""
    verdict = said(*ends_of(function))
    ends, folder = ends_of(function)
    assert "If that lasts, this start ends in " in ends[1 - rank].output
    assert f"error: Waiting 1 s for rank {rank} on {HOST} to answer:" in ends[1 - rank].output
    assert (ends[1 - rank].exit_code, Notes(folder).failure(1 - rank).kind) == (1, "hang")  # type: ignore[union-attr]
    waits = rf"rank {1 - rank} on {HOST} waits in all_reduce #\d+ \({FILE}:{line('the collective')}\)"
    assert re.match(rf"{waits}; rank {rank} on {HOST} is stopped", verdict), verdict
    assert stack_timer.HEAD not in (folder / f"stack-rank{1 - rank}.txt").read_text()
    if rank:
        assert re.search(rf"seen last: is in stop \({FILE}:\d+\)", verdict), verdict


def mismatched() -> None:
    hang(lambda rank: None, warning_s=60, more=990)


def test_mismatched_shapes(ends_of: EndsOf) -> None:
    """gloo aborts the rank that gets too much."""
    ends, folder = ends_of(mismatched)
    verdict = (folder / "hang.txt").read_text().strip()
    assert verdict in ends[1].output, ends
    at = rf"\({FILE}:{line('the collective')}\)"
    assert re.search(rf"rank 1 on {HOST} waits in all_reduce #\d+ of 1000 numbers {at}", verdict), verdict
    assert re.search(rf"rank 0 on {HOST} was aborted: .* waits in all_reduce {at}", verdict), verdict


def test_a_timeout_before_any_warning(ends_of: EndsOf) -> None:
    verdict = said(*ends_of(skipping_late), warned=False)
    assert re.search(rf"rank 1 on {HOST} is in skip \({FILE}:{line('the skip')}\)$", verdict), verdict


def skipping_late() -> None:
    hang(lambda rank: skip() if rank == 1 else None, warning_s=60)


class Waiting:
    """A stream whose source does not answer on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        yield self.rank
        if self.rank == 1:
            time.sleep(600)  # the source
        yield self.rank


def streaming() -> None:
    with watched() as world:
        last_progress.note_step()
        for _ in world.stream(Waiting(world.rank), batch_size=1, split="own"):  # the stream
            last_progress.note_step()


def test_a_stream_that_waits_for_its_source(ends_of: EndsOf) -> None:
    verdict = said(*ends_of(streaming))
    waits = rf"rank 0 on {HOST} waits in all_reduce.* \({FILE}:{line('the stream')}\)"
    source = rf"rank 1 on {HOST} is in DataLoader, in __iter__ \({FILE}:{line('the source')}\)"
    assert re.fullmatch(f"{waits}; {source}", verdict), verdict


HANGS: dict[Callable[[], None], dict[str, Any]] = {
    skipping: {"count": 3, "restart_s": "1"},
    skipping_before_batch_norm: {},
    late_in_a_sharded_backward_pass: {},
    coming_late: {},
    spinning: {},
    locked: {"restart_s": f"{scaled(3):g}", "timeout_s": 15},  # longer than a busy machine takes to look at it
    before_a_step: {"timeout_s": 3},
    crashing: {"hanging": None},
    loading: {},
    loading_by_a_worker: {},
    stopped_0: {"hanging": 0, "restart_s": "1", "timeout_s": 600},
    stopped_1: {"restart_s": "1", "timeout_s": 600},
    mismatched: {"hanging": None},
    skipping_late: {"timeout_s": 2},
    streaming: {},
}


def healthy() -> None:
    with cluster_ddp.distributed(cuda=False, hang_warning_s=2 * WARNING_S) as world:
        time.sleep(2.5 * WARNING_S)  # before the first step
        last_progress.note_step()
        for _ in range(10):  # an evaluation without steps
            time.sleep(WARNING_S / 4)
            world.sum(1)
        last_progress.note_step()


def test_a_slow_evaluation_is_no_hang(tmp_path: Path) -> None:
    for end in ranks(healthy, tmp_path, timeout_s=30, hanging=None):
        assert (end.exit_code, end.output) == (0, "")
    assert not list(tmp_path.glob("stack-*")) and not (tmp_path / "hang.txt").exists()


def left_by_rank_0() -> None:
    with cluster_ddp.distributed(cuda=False, hang_warning_s=1, collective_timeout_s=60) as world:
        dist.barrier()
        last_progress.note_step()
        if world.rank == 0:
            os._exit(0)  # with the ranks' store
        time.sleep(3)
        os._exit(0)


def test_a_rank_without_a_store_logs_no_cpp_frames(tmp_path: Path) -> None:
    """They would follow the verdict. Here the rank's watch asks the store that is gone."""
    ranks(left_by_rank_0, tmp_path, hanging=None)
    log = (tmp_path / "rank1.log").read_text()
    assert "frame #" not in log and "TCPStore.cpp" not in log, log


def writing_after_the_verdict() -> None:
    limit_s, handler = float(os.environ["TIMEOUT_S"]), logging.StreamHandler()
    try:
        with cluster_ddp.distributed(cuda=False, hang_warning_s=1, collective_timeout_s=limit_s) as world:
            dist.barrier()
            if world.rank == 1:
                skip()
            dist.barrier()
    finally:
        os.write(2, b"frame #0: of C++\n")  # as NCCL's watchdog does
        print("of Python", file=sys.stderr)
        handler.emit(logging.makeLogRecord({"msg": "of a log"}))


def test_what_cpp_code_writes_after_the_verdict_is_in_the_file_with_the_stacks(tmp_path: Path) -> None:
    output = ranks(writing_after_the_verdict, tmp_path, timeout_s=2)[0].output
    assert "rank 1 on" in output.partition("error: Waiting")[2], output
    assert "of Python" in output and "of a log" in output, output
    assert "of C++" not in output, output
    assert "frame #0: of C++" in (tmp_path / "stack-rank0.txt").read_text()
