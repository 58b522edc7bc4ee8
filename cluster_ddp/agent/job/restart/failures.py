"""The failures of a job, and what follows one: the ranks start again in the allocation, a requeue, or the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.agent import first_failure
from cluster_ddp.agent.job.restart.job_nodes import Nodes, Reason
from cluster_ddp.run import journal
from cluster_ddp.run.files import open_own
from cluster_ddp.run.journal import Event
from cluster_ddp.run.names import File, Kind, Then
from cluster_ddp.run.outcome import Outcome
from cluster_ddp.run.start import NO_CHECKPOINT, Failed

_LARGEST_FILE = 1 << 20
_ON_ANY_NODE = (Kind.PROGRAM, Kind.GPU_MEMORY, Kind.HOST_MEMORY)
_TOO_SMALL = {Kind.GPU_MEMORY: "a GPU", Kind.HOST_MEMORY: "a node"}
_WITHOUT_PROGRESS = 4  # so many failures with the same newest checkpoint: three restarts were of no use


class History:
    """What the job's agent notes of a job, its failures so far, and what its ranks have noted. Nothing is raised.

    Args:
        run_dir: the run directory; None if there is none: then only this process knows the failures.
        job: the job's label: 12, or 12_3 for an array task.
        is_first: whether Slurm starts the job for the first time: then those of an earlier job are forgotten.
        shared: whether the group may read the file.
    """

    def __init__(self, run_dir: Path | None, job: str, *, is_first: bool, shared: bool = False) -> None:
        self._run_dir, self._job, self._shared, self._has_begun = run_dir, job, shared, False
        if run_dir is not None and is_first:
            with contextlib.suppress(OSError):
                (run_dir / File.SICK_NODES).unlink()
        self._micro_batch_before = None if run_dir is None else journal.micro_batch(run_dir)
        self.failures = [] if run_dir is None or is_first else journal.failures(run_dir, job)
        self._sick_before = len(self._lines(File.SICK_NODES))

    @property
    def restarts(self) -> int:
        """How often the ranks were started again in an allocation."""
        return sum(one.then == Then.RESTART for one in self.failures)

    @property
    def micro_batch(self) -> int | None:
        """Most samples of a rank in a batch, as the run's starts have found; None if none was too large."""
        found = (self._micro_batch_before, *(one.micro_batch for one in self.failures))
        return min((one for one in found if one is not None), default=None)

    def begin(self, start: int, **has: Any) -> str:
        """Note a start of the ranks, and what the job has of the cluster. Returns its id (`Env.START_ID`)."""
        self._has_begun = True
        now = round(time.time() * 1000)
        self._note(Event.START, start=start, id=now, **has)
        return str(now)

    def note_nodes(self, count: int) -> None:
        """Note how many nodes the job has from now on."""
        self._note(Event.NODES, nodes=count)

    def end(self, ended: Outcome, failed: Failed | None = None) -> bool:
        """Note how a start has ended, and what follows. Returns whether the job will know it after a requeue.

        Args:
            ended: how it ended.
            failed: of a start that failed, if restarts were asked for.
        """
        if failed is not None:
            self.failures.append(failed)
        return self._run_dir is not None and journal.append_end(
            self._run_dir, ended, shared=self._shared, saved_s=self.saved_s, failed=failed
        )

    def close(self) -> None:
        """Note that the job has nothing from now on; without a start before, the end would be that of another job."""
        if self._has_begun:
            self._note(Event.OVER, saved=self.saved_s)

    def _note(self, event: str, **values: Any) -> bool:
        return self._run_dir is not None and journal.append(
            self._run_dir, event, shared=self._shared, job=self._job, **values
        )

    @property
    def saved_s(self) -> float | None:
        """When the newest checkpoint was saved, in seconds of UNIX time; None without one."""
        with contextlib.suppress(OSError):
            return None if self._run_dir is None else (self._run_dir / File.PROGRESS).stat().st_mtime
        return None

    def newest_checkpoint(self, since: float) -> tuple[str, float | None]:
        """Return the name of the newest checkpoint, and for how many seconds nothing was saved since ranks started.

        Without a run directory both are unknown: the name is empty.
        """
        if self._run_dir is None:
            return "", None
        name, saved = NO_CHECKPOINT, since
        if lines := self._lines(File.PROGRESS):
            name = lines[0] or NO_CHECKPOINT
            saved = max(since, self.saved_s or since)
        return name, max(0.0, time.time() - saved)

    def new_sick_nodes(self) -> dict[str, str]:
        """Return nodes that the ranks have found at fault since the last call: name -> why."""
        lines = self._lines(File.SICK_NODES)
        new, self._sick_before = lines[self._sick_before :], len(lines)
        return {node: fault for node, _, fault in (line.partition(" ") for line in new) if node}

    def _lines(self, name: str) -> list[str]:
        """The lines of a file of the run directory; none if it can't be read, or is a symbolic link."""
        if self._run_dir is None:
            return []
        try:
            with open(open_own(self._run_dir / name, os.O_RDONLY | os.O_NONBLOCK, shared=False), "rb") as file:
                text = file.read(_LARGEST_FILE).decode(errors="replace")
        except OSError:
            return []
        return text.removesuffix("\n").split("\n") if text else []


class Decision(NamedTuple):
    """What follows a start of the ranks."""

    then: str
    """One of `Then`."""
    why: str = ""
    """Why it ends, if --restarts asks for more; empty if it does not."""
    left_out: Mapping[str, Reason] = {}
    """Nodes that are left out from now on."""
    nodes: Nodes | None = None
    """Those of a restart; None if the nodes are not known, and stay."""


def what_follows(
    now: Failed,
    before: Sequence[Failed],
    out: Mapping[str, Reason],
    restarts: int,
    nodes: Nodes,
    has_others: Callable[[Mapping[str, Reason]], bool],
) -> Decision:
    """Return what follows a failure.

    Args:
        now, before: the failure, and earlier ones of this job.
        out: nodes that are lost or at fault.
        restarts: --restarts.
        nodes: of the allocation. If they are not known, all start again as they are.
        has_others: whether the cluster has nodes enough for the job if these are left out.
    """
    if not restarts:
        return Decision(Then.END)
    if why := _no_more(now, before, restarts):
        return Decision(Then.END, why)
    if now.mem_mb is not None:
        return Decision(Then.REQUEUE, left_out=out)
    if not nodes.training:
        return Decision(Then.RESTART)
    at_fault = _at_fault(now, before, is_alone=len(nodes.training) == 1)
    for left_out in ({**at_fault, **out}, out):
        if (others := nodes.without(left_out)) is not None:
            return Decision(Then.RESTART, left_out=left_out, nodes=others)
        if has_others(left_out):
            break
    return Decision(Then.REQUEUE, left_out=left_out)


def _no_more(now: Failed, before: Sequence[Failed], restarts: int) -> str:
    """Why the job ends; empty if it does not."""
    failures = [one for one in (*before, now) if one.is_counted]
    if not now.is_counted:
        return ""
    is_new = now.checkpoint not in ("", before[-1].checkpoint if before else NO_CHECKPOINT)
    if now.kind in _TOO_SMALL and not is_new:
        return f"the memory of {_TOO_SMALL[now.kind]} is too small, and the next start would need as much"
    if len(failures) > restarts:
        times = {1: "once", 2: "twice"}.get(len(failures), f"{len(failures)} times")
        return f"failed {times} (--restarts {restarts})"
    newest = [one.checkpoint for one in failures[-_WITHOUT_PROGRESS:]]
    if now.checkpoint and newest == [now.checkpoint] * _WITHOUT_PROGRESS:
        return f"failed four times without a new checkpoint (the newest: {now.checkpoint})"
    for one in before:
        is_same = first_failure.without_numbers(one.words) == first_failure.without_numbers(now.words)
        if not now.words or not is_same or (one.checkpoint, one.step) != (now.checkpoint, now.step):
            continue
        if one.on_all_ranks and now.on_all_ranks:
            return f"all ranks failed twice with the same error: {now.words}"
        if now.step is not None and one.node != now.node:
            return f"the same error at step {now.step} on {one.node} and on {now.node}: {now.words}"
        if now.step is not None and now.kind == Kind.PROGRAM:
            return f"the same error twice at step {now.step}: {now.words}"
    return ""


def smaller_micro_batch(samples: int | None, most: int | None) -> int | None:
    """Return the most samples of a rank in a batch after the memory of its GPU was too small; None if it stays.

    Args:
        samples: of the batch that was too large; None if its update can't have more batches.
        most: what was found before.
    """
    half = 0 if samples is None else -(-samples // 2)
    return half if samples is not None and half < min(samples, most or samples) else None


def more_memory(had_mb: int, most_mb: int, before: Sequence[Failed]) -> int | None:
    """Return with how much memory of each node a job continues, after what it had was too small; None if that stays.

    Args:
        had_mb: what it had, in MiB.
        most_mb: at most so much, in MiB.
        before: earlier failures. If Slurm has not given what was asked for then, it would not do so now.
    """
    is_refused = any(one.mem_mb is not None and one.mem_mb > had_mb for one in before)
    return None if is_refused or had_mb >= most_mb else min(had_mb * 3 // 2, most_mb)


def _at_fault(now: Failed, before: Sequence[Failed], *, is_alone: bool) -> dict[str, Reason]:
    """The node where a start failed first a second time, or at once by its hardware.

    Not if the program itself failed: that does so on any node. The only node `is_alone`: all failures are there.
    """
    if now.kind == Kind.GPU_HARDWARE and now.node:
        return {now.node: Reason(now.words)}
    there = [one for one in (*before, now) if one.node == now.node and now.node not in one.without]
    blamed = [one for one in there if not one.suspended and one.kind not in _ON_ANY_NODE]
    is_second = bool(now.node) and not is_alone and len(blamed) > 1 and blamed[-1] is now
    why = Reason(f"A start failed first there twice; now: {now.words or 'without a word'}")
    return {now.node: why} if is_second else {}
