"""Training that can be stopped at any moment and resumes as if nothing had happened. In a script of your own:

checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)
for epoch in checkpoint.epochs(10):
    for images, labels in shard:
        ...
        optimizer.step()
        checkpoint.step()

The first line resumes from the newest checkpoint of the run directory, if there is one. The last saves when it is time
to, in the background, and stops when the job is told to stop (see `stop_signals`). A resumed training is exact: the
same bits on the CPU as without the stop, where the number of ranks is the same.

What follows the loop over the shard (an evaluation, the scheduler's step) may stand in any order. The state is copied
when the shard has given its last batch, before any of that runs; a stop in it writes this copy. So after a stop or a
kill, all that follows the last batch is made again from its beginning, and nothing of it counts twice. To copy only
what is small would not do: averages of the weights may be renewed there, too. The copy costs one save's wait an epoch,
and no memory: it is the memory of the saves. Where a save is still being written then, there is no copy.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.contract import File
from cluster_ddp.errors import CheckpointError, SpecError
from cluster_ddp.runtime.checkpoint import folder, time_limit
from cluster_ddp.runtime.checkpoint.interval import Interval
from cluster_ddp.runtime.checkpoint.resume import choose, read, see
from cluster_ddp.runtime.checkpoint.state import Stateful, TrainingState
from cluster_ddp.runtime.checkpoint.stop_agreement import StopAgreement
from cluster_ddp.runtime.data.shard import Shard
from cluster_ddp.runtime.failure import hard_exit
from cluster_ddp.runtime.meter import PerRank
from cluster_ddp.runtime.run_dir import final_flush
from cluster_ddp.runtime.run_dir.run_dir import RunDir
from cluster_ddp.runtime.stop_signals import DEFAULT_SIGNALS, StopFlag, Stopped, write_stop_marker
from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

# How often rank 0 tells the others that it is still writing: they would take it for hanging.
_REPORT_EVERY_S = 2.0


class Checkpointer:
    """Saves and resumes a training. Made on every rank, after everything in it, before the first step.

    Args:
        world: of the ranks.
        shard: the training data; its place in the epoch and its shuffling are part of the state.
        run_dir: where checkpoints are, under checkpoints/, and metrics.jsonl: a path, or a `RunDir`; default: the
            submission's run directory.
        every: how often to save: "1epoch", "500steps", "10min", or "never" but when stopped.
        keep: how many of the newest checkpoints stay.
        resume: "auto": from this run directory's newest checkpoint; "never": from the beginning, whatever an earlier
            job has left (a job that was requeued resumes all the same); or a path: start from this checkpoint, or from
            the newest one of another run directory.
        identity: what must be the same for a checkpoint to fit, such as the dataset's name.
        meters: what each rank has for itself, such as a `Meter`.
        stop_signals: names of the signals to stop at.
        before_save: called before each save, on every rank; what it raises ends the training, and nothing is saved.
        parts: everything with a state, by name. Of a DDP model, the module's state is saved.

    Raises:
        CheckpointError: a checkpoint that doesn't fit, can't be found or can't be loaded; a state that can't be saved.
        RunDirError: the run directory can't be written, or another job is using it.
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
        stop_signals: Sequence[str] = DEFAULT_SIGNALS,
        before_save: Callable[[], object] = lambda: None,
        **parts: Stateful,
    ) -> None:
        self.world, self.shard, self._before_save = world, shard, before_save
        self._stop_flag = StopFlag(stop_signals)
        self._interval = Interval.parse(every)
        if keep < 1:
            raise SpecError(f"Keeping {keep} checkpoints:", "there is nothing to resume from then.", "keep 1 or more")
        self.run_dir = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir, world)
        self._state = TrainingState(world, shard, identity=identity or {}, meters=meters or {}, parts=parts)
        self._folder = folder.CheckpointFolder(self.run_dir.path / File.CHECKPOINTS, keep=keep)
        hard_exit.before(self._folder.wait)
        final_flush.expect(self._folder)
        # Places: the epoch and the number of steps.
        self._saved = self._trained = (-1, -1)
        self._is_training = False
        self._copied: dict[str, Any] | None = None
        self._resume(resume)
        self._saved_at_s = time.monotonic()
        self._steps_at_start = self.steps
        self._stop_flag.stop_at(time_limit.deadline(world, os.environ))
        self._exchange, self._evaluation_exchange = StopAgreement(world), StopAgreement(world)

    @property
    def steps(self) -> int:
        """Steps since the beginning of the training."""
        return self._state.steps

    @property
    def epoch(self) -> int:
        """The epoch that is under way, from 0."""
        return self._state.epoch

    @property
    def _place(self) -> tuple[int, int]:
        return self.epoch, self.steps

    @property
    def last_good(self) -> Path | None:
        """On rank 0: the newest checkpoint that is known to be whole."""
        return self._folder.last_good

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, from 0; after the last one all is saved."""
        if self.epoch >= count:
            self.world.print(f"All {count} epochs are done already: nothing is trained.")
        self.shard.at_end = self._after_training
        try:
            while self.epoch < count:
                self.shard.set_epoch(self.epoch)
                self._state.restore_rng()
                yield self.epoch
                self._state.epoch, self._is_training = self.epoch + 1, False
                self.shard.set_epoch(self.epoch)
                self._after(epoch_ended=True)
        finally:
            if self.shard.at_end == self._after_training:
                self.shard.at_end = None  # it holds this object, and all its memory
        self._exchange.finish()
        self._evaluation_exchange.finish()
        if self._saved != self._place and self._interval.unit != "never":
            self._save_now()
        self._wait()
        self._stop_flag.give_back()

    def step(self) -> None:
        """To be called after each step of the optimizer: saves if it is time to, stops if the job is told to.

        Raises:
            Stopped: all is saved; the process ends with status 75.
        """
        self._state.steps, self._is_training = self.steps + 1, True
        if self.steps == self._steps_at_start + 1:
            self._state.reserve()  # now the optimizer has its state, too
        self._after(epoch_ended=False)
        if self.shard.seen == self.shard.size:  # also of a loop that is left by a break, or by counting
            self._after_training()

    def stop_if_asked(self) -> None:
        """To be called now and then in a long evaluation, as often on every rank: stops as `step` does.

        After the epoch's last batch, all that follows that batch is then made again. Between two batches call it after
        `step`: what there is at that moment is saved, and that evaluation is not made again.
        """
        if self._evaluation_exchange.is_due():
            (stop,) = self._evaluation_exchange.collect(self._stop_flag.is_set())
            if stop:
                self._stop()
            self._evaluation_exchange.begin(self._stop_flag.is_set())

    def _after_training(self) -> None:
        """Copy the state after an epoch's last batch, and save it if it is time to. A collective."""
        if not self._is_training or self._trained == self._place:  # another pass over the same data
            return
        self._trained = self._place
        if self._saved != self._place:
            self._save(write=self._interval.is_due(self.steps, self.epoch + 1, epoch_ended=True))

    def _after(self, *, epoch_ended: bool) -> None:
        """What is to be done after a step, or an epoch."""
        save = self._interval.is_due(self.steps, self.epoch, epoch_ended=epoch_ended)
        save = save and not (epoch_ended and self._saved[1] == self.steps)  # it was saved after the last batch
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
        if self._trained == self._place:
            self._save_copy()
        else:
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
            write_stop_marker(os.environ)
        is_saved = "Saved" if saved == self.steps else "NOT saved"
        words = f"{asked} {is_saved}. To resume from {last_good}, unless the job is queued again:"
        self.world.print(f"{words} {self.run_dir.resume_command}")
        self._stop_flag.ignore()
        self.world.barrier()  # rank 0 has saved: now the first to end may bring the others down
        raise Stopped

    def _save_now(self) -> None:
        """Save, and wait until all is written. A collective."""
        self._wait()
        self._save()
        self._wait()

    def _save_copy(self) -> None:
        """Save the state as it was after the epoch's last batch, and wait until it is written. A collective."""
        self._wait()
        is_written = self.last_good is not None and folder.step_of(self.last_good) == self.steps
        if self._copied and self._copied["position"]["steps"] == self.steps and not is_written:
            self._folder.save(self.steps, self._copied, first=self.run_dir.sync)
        self._wait()

    def _wait(self) -> None:
        """Wait until rank 0 has written all, or gives it up. A collective, which takes as long as it takes."""
        while not self.world.broadcast(self._folder.wait(_REPORT_EVERY_S) or self._folder.is_stuck()):
            self._folder.writer.tell_if_slow()

    def _save(self, *, write: bool = True) -> None:
        """Copy the state, and let it be written while training continues. A collective.

        Where the save before is not written yet, this one is left out. What could not be written is overwritten by the
        copy: then this one is written in its place.

        Args:
            write: or only copy it.
        """
        self._before_save()
        self.world.synchronize()
        writer = self._folder.writer
        is_busy, has_failed = self.world.broadcast((writer.is_busy(), self._folder.has_failed))
        write = write or has_failed
        self._saved_at_s = time.monotonic() if write else self._saved_at_s
        if is_busy:
            if self.world.is_main and write:
                words = "The checkpoint before step %d is still being written; this one is left out. (%s)"
                log.warning(words, self.steps, writer.at_work())
            return
        self._saved = self._place if write else self._saved
        ranks = self._state.gather()
        if ranks is None:  # rank 0 writes
            return
        self._copied = None
        try:
            self._copied = self._state.copy(ranks, metrics_bytes=self.run_dir.metrics_bytes)
        except CheckpointError as error:  # a part has taken something into its state since the beginning
            log.error("%s\nTraining continues.", error)
            self._folder.note_failure(str(error))
            return
        if write:
            self._folder.save(self.steps, self._copied, first=self.run_dir.sync)

    def _resume(self, resume: str | os.PathLike[str]) -> None:
        """Load the checkpoint to resume from. Rank 0 chooses it for all ranks."""
        found = self.world.broadcast(choose(self.world, self._folder, resume) if self.world.is_main else None)
        if found is None or not found[2]:
            self.run_dir.begin_metrics()
        if found is None:
            return
        path, digest, is_own = found
        see(self.world, path, digest)
        saved = read(path)
        if complaint := self._state.complaint(saved):
            hint = "give this training a folder of its own (--run-dir PATH), or start anew in this one: --resume never"
            raise CheckpointError(f"Resuming from {path}:", f"{complaint}.", hint)
        metrics_bytes, differences = saved["metrics_bytes"], self._state.differences(saved)
        del saved  # and what it takes of memory
        self._state.load(functools.partial(read, path))
        self._is_training = self.shard.seen == self.shard.size  # what follows the training is left of the epoch
        if is_own:
            self._saved = self._place
            self.run_dir.continue_metrics(metrics_bytes)
        place = f"step {self.steps}, epoch {self.epoch + 1}, {self.shard.seen} of its {self.shard.size} samples seen"
        self.world.print("\n  ".join([f"Resuming from {path}: {place}", *differences]))
