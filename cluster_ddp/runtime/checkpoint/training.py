"""Training that can be stopped at any moment and goes on as if nothing had happened. In a script of your own:

checkpoint = cluster_ddp.Checkpoint(world, shard=shard, model=model, optimizer=optimizer)
for epoch in checkpoint.epochs(10):
    for images, labels in shard:
        ...
        optimizer.step()
        checkpoint.step()

The first line continues from the newest checkpoint of the run folder, if there is one; the last saves when it is time
to, in the background, and stops when the job is told to stop (see `preemption`). What is continued is exact: the same
bits on the CPU as without the stop, where the number of ranks is the same.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.errors import CheckpointError, SpecError
from cluster_ddp.runtime import clock, hard_exit, last_writes, preemption
from cluster_ddp.runtime.checkpoint import file, folder
from cluster_ddp.runtime.checkpoint.file import DamagedError
from cluster_ddp.runtime.checkpoint.state import Stateful, TrainingState
from cluster_ddp.runtime.data.shard import Shard
from cluster_ddp.runtime.exchange import Exchange
from cluster_ddp.runtime.interval import Interval
from cluster_ddp.runtime.meter import PerRank
from cluster_ddp.runtime.metrics import RunDir, default_run_dir
from cluster_ddp.runtime.metrics_file import set_aside
from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

# How often rank 0 tells the others that it is still writing: they would take it for hanging.
_REPORT_EVERY_S = 2.0


class Checkpoint:
    """All that a training goes on from. Made on every rank, after everything in it, before the first step.

    Args:
        world: of the ranks.
        shard: the training data; its place in the epoch and its shuffling are part of the state.
        run_dir: where checkpoints are, under checkpoints/, and metrics.jsonl: a path, or a `RunDir`; default: the
            submission's run folder.
        every: how often to save: "1epoch", "500steps", "10min", or "never" but when stopped.
        keep: how many of the newest checkpoints stay.
        resume: "auto": from this run folder's newest checkpoint; "never": from the beginning, whatever an earlier job
            has left (a job that was requeued goes on all the same); or a checkpoint or another run's folder to begin
            with.
        identity: what must be the same for a checkpoint to fit, such as the dataset's name.
        meters: what each rank has for itself, such as a `Meter`.
        stop_signals: names of the signals to stop at.
        before_save: called before each save, on every rank; what it raises ends the training, and nothing is saved.
        parts: everything with a state, by name. Of a DDP model, the module's state is saved.

    Raises:
        CheckpointError: a checkpoint that doesn't fit, can't be found or can't be loaded; a state that can't be saved.
        RunDirError: the run folder can't be written, or another job is using it.
        SpecError: an interval or a signal that there is not; no checkpoint to be kept.
        DataError: too few samples are left of the epoch for this number of ranks.
    """

    def __init__(
        self,
        world: World,
        *,
        shard: Shard,
        run_dir: RunDir | str | os.PathLike[str] | None = None,
        every: str = "1epoch",
        keep: int = 3,
        resume: str | os.PathLike[str] = "auto",
        identity: Mapping[str, str | int | float] | None = None,
        meters: Mapping[str, PerRank] | None = None,
        stop_signals: Sequence[str] = preemption.DEFAULT_SIGNALS,
        before_save: Callable[[], object] = lambda: None,
        **parts: Stateful,
    ) -> None:
        self.world, self.shard, self._before_save = world, shard, before_save
        self._stop_flag = preemption.StopFlag(stop_signals)
        self._interval = Interval.parse(every)
        if keep < 1:
            raise SpecError(f"Keeping {keep} checkpoints:", "there is nothing to go on from then.", "keep 1 or more")
        self.run_dir = (
            run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir or default_run_dir("training", world), world)
        )
        self._state = TrainingState(world, shard, identity=identity or {}, meters=meters or {}, parts=parts)
        self._folder = folder.CheckpointFolder(self.run_dir.path / folder.NAME, keep=keep)
        hard_exit.before(self._folder.wait)
        last_writes.expect(self._folder)
        self._saved_steps = -1
        self._resume(resume)
        self._saved_at_s = time.monotonic()
        self._steps_at_start = self.steps
        self._stop_flag.stop_at(clock.deadline(world, os.environ))
        self._exchange, self._evaluation_exchange = Exchange(world), Exchange(world)

    @property
    def steps(self) -> int:
        """Steps since the beginning of the training."""
        return self._state.steps

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 0."""
        return self._state.epoch

    @property
    def last_good(self) -> Path | None:
        """On rank 0: the newest checkpoint that is known to be whole."""
        return self._folder.last_good

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, from 0; after the last one all is saved."""
        if self.epoch >= count:
            self.world.print(f"All {count} epochs are done already: nothing is trained.")
        while self.epoch < count:
            self.shard.set_epoch(self.epoch)
            self._state.restore_rng()
            yield self.epoch
            self._state.epoch += 1
            self.shard.set_epoch(self.epoch)
            self._after(epoch_ended=True)
        self._exchange.finish()
        self._evaluation_exchange.finish()
        if self._saved_steps < self.steps and self._interval.unit != "never":
            self._save_now()
        self._wait()
        self._stop_flag.give_back()

    def step(self) -> None:
        """To be called after each step of the optimizer: saves if it is time to, stops if the job is told to.

        Raises:
            Stopped: all is saved; the process ends with status 75.
        """
        self._state.steps += 1
        if self.steps == self._steps_at_start + 1:
            self._state.reserve()  # now the optimizer has its state, too
        self._after(epoch_ended=False)

    def stop_if_asked(self) -> None:
        """To be called now and then in a long evaluation, as often on every rank: stops as `step` does.

        The evaluation is then made again from its beginning. It is the same if it draws no random numbers.
        """
        if self._evaluation_exchange.is_due():
            (stop,) = self._evaluation_exchange.collect(self._stop_flag.is_set())
            if stop:
                self._stop()
            self._evaluation_exchange.begin(self._stop_flag.is_set())

    def _after(self, *, epoch_ended: bool) -> None:
        """What is to be done after a step, or an epoch."""
        save = self._interval.is_due(self.steps, self.epoch, epoch_ended=epoch_ended)
        is_exchange = epoch_ended or self._exchange.is_due()
        if is_exchange:
            stop, minutes_are_over = self._exchange.collect(*self._flags())
            if stop:
                self._stop()
            save = save or minutes_are_over
        if save:
            self._save()
        if is_exchange:
            self._exchange.begin(*self._flags())  # after the save, which begins the minutes anew

    def _flags(self) -> tuple[bool, bool]:
        """Whether to stop, and, by rank 0's clock, whether a save is due that is made every so many minutes."""
        self._folder.writer.check()  # raises where another job has taken the run directory
        minutes_are_over = self.world.is_main and self._interval.is_over(time.monotonic() - self._saved_at_s)
        return self._stop_flag.is_set(), minutes_are_over

    def _stop(self) -> None:
        """Save, say so, and end this process with all the others'."""
        self._save_now()
        reasons = self.world.gather(self._stop_flag.reason())
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        asked = f"Stopped after step {self.steps} (epoch {self.epoch + 1}): rank {rank}: {reason}."
        last_good = self.world.broadcast(self.last_good)
        saved = -1 if last_good is None else folder.step_of(last_good)
        if saved < self.steps and saved <= self._steps_at_start:
            found = f"nothing could be saved since step {self._steps_at_start}: to start again would lead here again."
            raise CheckpointError(asked, found, "see the errors above; is the disk full, or a quota used up?")
        if self.world.is_main:
            preemption.leave_word(os.environ)
        again = os.environ.get("CLUSTER_DDP_RESUME")
        if again is None:
            again = f"the same command with CLUSTER_DDP_RUN_DIR={shlex.quote(str(self.run_dir.path))}"
        self.world.print(
            f"{asked} {'Saved' if saved == self.steps else 'NOT saved'}. To resume from {last_good}, unless the job "
            f"is queued again: {again}"
        )
        self._stop_flag.ignore()
        self.world.barrier()  # rank 0 has saved: now the first to end may bring the others down
        raise preemption.Stopped

    def _save_now(self) -> None:
        """Save, and wait until all is written. A collective."""
        self._wait()
        self._save()
        self._wait()

    def _wait(self) -> None:
        """Wait until rank 0 has written all, or gives it up. A collective, which takes as long as it takes."""
        while not self.world.broadcast(self._folder.wait(_REPORT_EVERY_S) or self._folder.is_stuck()):
            self._folder.writer.tell_if_slow()

    def _save(self) -> None:
        """Copy the state, and let it be written while training goes on. A collective.

        Where the save before is not written yet, this one is left out.
        """
        self._before_save()
        self.world.synchronize()
        self._saved_at_s = time.monotonic()
        writer = self._folder.writer
        if self.world.broadcast(writer.is_busy()):
            if self.world.is_main:
                words = "The checkpoint before step %d is still being written; this one is left out. (%s)"
                log.warning(words, self.steps, writer.at_work())
            return
        self._saved_steps = self.steps
        ranks = self._state.gather()
        if ranks is None:  # rank 0 writes
            return
        try:
            state = self._state.copy(ranks, metrics_bytes=self.run_dir.metrics_bytes)
        except CheckpointError as error:  # a part has taken something into its state since the beginning
            log.error("%s\nTraining goes on.", error)
            self._folder.note_failure(str(error))
            return
        self._folder.save(self.steps, state, first=self.run_dir.sync)

    # Going on

    def _resume(self, resume: str | os.PathLike[str]) -> None:
        """Load what there is to go on from. Rank 0 decides what; so all ranks go on from the same."""
        found = self.world.broadcast(self._choose(resume) if self.world.is_main else None)
        if found is None or not found[2]:
            self.run_dir.begin_metrics()
        if found is None:
            return
        path, digest, is_own = found
        self._see(path, digest)
        saved = _read(path)
        if complaint := self._state.complaint(saved):
            hint = "give this training a folder of its own (--run-dir PATH), or start anew in this one: --resume never"
            raise CheckpointError(f"Going on from {path}:", f"{complaint}.", hint)
        metrics_bytes, differences = saved["metrics_bytes"], self._state.differences(saved)
        del saved  # and what it takes of memory
        self._state.load(functools.partial(_read, path))
        self._saved_steps = self.steps
        if is_own:
            self.run_dir.continue_metrics(metrics_bytes)
        place = f"step {self.steps}, epoch {self.epoch + 1}, {self.shard.seen} of its {self.shard.size} samples seen"
        self.world.print("\n  ".join([f"Going on from {path}: {place}", *differences]))

    def _see(self, path: Path, digest: str) -> None:
        """Let one rank of each node read all of the file that rank 0 has chosen. A collective."""
        is_reader = self.world.topology.local_rank == 0 and not self.world.is_main
        complaint = file.not_as_chosen(path, digest) if is_reader else None
        ranks = self.world.gather(complaint and f"on {socket.gethostname()}: {complaint}")
        if found := next(filter(None, ranks), None):
            hint = "is the run directory on a file system that all nodes share?"
            raise CheckpointError(f"Going on from {path}, as rank 0 does:", f"{found}.", hint)

    def _choose(self, resume: str | os.PathLike[str]) -> tuple[Path, str, bool] | None:
        """On rank 0: the checkpoint, its SHA-256, and whether it is this run folder's."""
        topology = self.world.topology
        self._folder.remove_leftovers()
        newest = self._folder.newest(set_aside=True)
        if resume == "never" and not (newest and topology.restart_count and self._is_this_jobs(newest[0])):
            set_aside(self._folder.path)
            newest = None
        if newest:
            if resume not in ("auto", "never") and not topology.restart_count:
                log.warning("There are checkpoints in %s already: %s is not used.", self._folder.path, resume)
            return (*newest, True)
        if resume not in ("auto", "never"):
            return (*folder.begin_with(Path(resume)), False)
        if topology.restart_count:
            where = f"restart {topology.restart_count} of job {topology.job_label}"
            log.warning("This is %s, and there is no checkpoint in %s yet.", where, self._folder.path)
        return None

    def _is_this_jobs(self, path: Path) -> bool:
        return bool(file.read(path)["saved_by"]["job"] == self.world.topology.job_label)


def _read(path: Path) -> dict[str, Any]:
    """What is in a checkpoint whose digest is right, mapped into memory."""
    try:
        return file.read(path)
    except DamagedError as error:
        hint = "was it written by another program? Name a checkpoint of this training, or start anew: --resume never"
        raise CheckpointError(f"Going on from {path}:", f"{error}.", hint) from error
