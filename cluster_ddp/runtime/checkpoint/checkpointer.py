"""Training that can be stopped at any moment and resumes as if nothing had happened. In a script of your own:

checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)
for epoch in checkpoint.epochs(10):
    for images, labels in shard:
        ...
        optimizer.step()
        checkpoint.step()

The first line resumes from the newest checkpoint of the run directory, if there is one. The last line saves in the
background when a save is due, and stops when the job is told to stop (see `stop_signals`). With the same number of
ranks, a resumed training on CPUs has the same bits as one without the stop.

Code after the loop over the shard (an evaluation, the scheduler's step) may be in any order. The state is copied after
the shard's last batch, before this code runs, and a stop in this code writes that copy. So after a stop or a kill, all
that follows the last batch runs again from its beginning, and nothing counts twice. The copy is complete, because this
code may change large parts, such as averaged weights. It costs the wait of one save per epoch, and no extra memory,
since saves use the same memory. If a save is still being written at that moment, no copy is made.
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

# How often rank 0 tells the others that it is still writing, so that they don't time out.
_REPORT_EVERY_S = 2.0


class Checkpointer:
    """Saves and resumes a training. Make it on every rank, in the main thread, after all parts.

    Args:
        world: all ranks.
        shard: the training data. Its place in the epoch and its shuffling are part of the state.
        run_dir: a path or a `RunDir`, with the checkpoints in checkpoints/; default: the run directory of the
            submission, else runs/training-<job id, or date and time>.
        every: how often to save: "1epoch", "500steps", "10min"; "never" saves only when the job is told to stop.
        keep: how many checkpoints to keep; the newest ones stay.
        resume: "auto": from this run directory's newest checkpoint. "never": from the beginning; old checkpoints are
            set aside (but a requeued job resumes from its own). A path: from this checkpoint, or from the newest one of
            another run directory; ignored once this run directory has checkpoints.
        identity: values that must be equal for a checkpoint to fit, such as the dataset's name.
        meters: states that differ between ranks, such as a `Meter`, by name.
        stop_signals: names of the signals to stop at.
        before_save: called on every rank before each save. An exception in it ends the training without that save.
        parts: everything else with a state, by name: model, optimizer, scheduler … Of a DDP model, the module is saved.

    Raises:
        CheckpointError: a checkpoint doesn't fit, can't be found or can't be loaded; or a state can't be saved.
        RunDirError: the run directory can't be written, or another job is using it.
        SpecError: `every` is not an interval, `keep` is below 1, or a signal does not exist.
        DataError: too few samples are left in the epoch for this number of ranks.
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
            raise SpecError(f"Keeping {keep} checkpoints:", "then there is nothing to resume from.", "keep 1 or more")
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
        """Number of steps since the beginning of the training."""
        return self._state.steps

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._state.epoch

    @property
    def _place(self) -> tuple[int, int]:
        return self.epoch, self.steps

    @property
    def last_good(self) -> Path | None:
        """On rank 0: path of the newest checkpoint that is known to be undamaged, None without one. None on others."""
        return self._folder.last_good

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of `count` epochs, from 0. Use it once, on every rank.

        After the last epoch the final state is saved (unless `every` is "never"), and signal handlers are restored.

        Args:
            count: number of epochs of the whole training.

        Raises:
            Stopped, CheckpointError, RunDirError: as `step`.
        """
        if self.epoch >= count:
            self.world.print(f"All {count} epochs are already done: nothing to train.")
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
                self.shard.at_end = None  # it refers to this object and all its memory
        self._exchange.finish()
        self._evaluation_exchange.finish()
        if self._saved != self._place and self._interval.unit != "never":
            self._save_now()
        self._wait()
        self._stop_flag.give_back()

    def step(self) -> None:
        """Save if a save is due, and stop if the job is told to. Call it on every rank after each optimizer step.

        Raises:
            Stopped: the job was told to stop, and can resume. It ends the process with status 75.
            CheckpointError: the job was told to stop, but no checkpoint could be saved since its start.
            RunDirError: another job has taken the run directory.
        """
        self._state.steps, self._is_training = self.steps + 1, True
        if self.steps == self._steps_at_start + 1:
            self._state.reserve()  # now the optimizer also has its state
        self._after(epoch_ended=False)
        if self.shard.seen == self.shard.size:  # also if the loop ends with a break, or by counting
            self._after_training()

    def stop_if_asked(self) -> None:
        """Stop if the job is told to. Call it now and then in a long evaluation, equally often on every rank.

        If it stops after the epoch's last batch, all code after that batch runs again on resume. Between two batches,
        call it after `step`: the state of that moment is saved, and the evaluation does not run again.

        Raises:
            Stopped, CheckpointError: as `step`.
        """
        if self._evaluation_exchange.is_due():
            (stop,) = self._evaluation_exchange.collect(self._stop_flag.is_set())
            if stop:
                self._stop()
            self._evaluation_exchange.begin(self._stop_flag.is_set())

    def _after_training(self) -> None:
        """Copy the state after an epoch's last batch, and save it if a save is due. A collective."""
        if not self._is_training or self._trained == self._place:  # another pass over the same data
            return
        self._trained = self._place
        if self._saved != self._place:
            self._save(write=self._interval.is_due(self.steps, self.epoch + 1, epoch_ended=True))

    def _after(self, *, epoch_ended: bool) -> None:
        """Save or stop after a step or an epoch."""
        save = self._interval.is_due(self.steps, self.epoch, epoch_ended=epoch_ended)
        save = save and not (epoch_ended and self._saved[1] == self.steps)  # already saved after the last batch
        is_exchange = epoch_ended or self._exchange.is_due()
        if is_exchange:
            stop, minutes_are_over = self._exchange.collect(*self._flags())
            if stop:
                self._stop()
            save = save or minutes_are_over
        if save:
            self._save()
        if is_exchange:
            self._exchange.begin(*self._flags())  # after the save, which restarts the minutes

    def _flags(self) -> tuple[bool, bool]:
        """Whether to stop; and whether a save every so many minutes is due, by rank 0's clock."""
        self._folder.writer.check()  # raises where another job has taken the run directory
        minutes_are_over = self.world.is_main and self._interval.is_over(time.monotonic() - self._saved_at_s)
        return self._stop_flag.is_set(), minutes_are_over

    def _stop(self) -> None:
        """Save, print that, and end this process together with all others."""
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
            found = f"nothing could be saved since step {self._steps_at_start}: a restart would end here again."
            raise CheckpointError(asked, found, "see the errors above; is the disk full, or a quota used up?")
        if self.world.is_main:
            write_stop_marker(os.environ)
        is_saved = "Saved" if saved == self.steps else "NOT saved"
        words = f"{asked} {is_saved}. To resume from {last_good}, unless the job is queued again:"
        self.world.print(f"{words} {self.run_dir.resume_command}")
        self._stop_flag.ignore()
        self.world.barrier()  # rank 0 has saved: now the first rank to end may end the others
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
        """Wait until rank 0 has written everything or gives up. A collective without a time limit."""
        while not self.world.broadcast(self._folder.wait(_REPORT_EVERY_S) or self._folder.is_stuck()):
            self._folder.writer.tell_if_slow()

    def _save(self, *, write: bool = True) -> None:
        """Copy the state and write it in the background. A collective.

        While the previous save is still being written, this one is skipped. If the previous one failed, this one is
        always written, since the copy overwrites what could have been tried again.

        Args:
            write: False only copies it.
        """
        self._before_save()
        self.world.synchronize()
        writer = self._folder.writer
        is_busy, has_failed = self.world.broadcast((writer.is_busy(), self._folder.has_failed))
        write = write or has_failed
        self._saved_at_s = time.monotonic() if write else self._saved_at_s
        if is_busy:
            if self.world.is_main and write:
                words = "The checkpoint before step %d is still being written; this one is skipped. (%s)"
                log.warning(words, self.steps, writer.at_work())
            return
        self._saved = self._place if write else self._saved
        ranks = self._state.gather()
        if ranks is None:  # rank 0 writes
            return
        self._copied = None
        try:
            self._copied = self._state.copy(ranks, metrics_bytes=self.run_dir.metrics_bytes)
        except CheckpointError as error:  # a part's state has something new that can't be saved
            log.error("%s\nTraining continues.", error)
            self._folder.note_failure(str(error))
            return
        if write:
            self._folder.save(self.steps, self._copied, first=self.run_dir.sync)

    def _resume(self, resume: str | os.PathLike[str]) -> None:
        """Load the checkpoint to resume from. Rank 0 chooses it for all ranks."""
        with self.run_dir.written():
            found = self.world.broadcast(choose(self.world, self._folder, resume) if self.world.is_main else None)
        if found is None or not found[2]:
            self.run_dir.begin_metrics()
        if found is None:
            return
        path, digest, is_own = found
        see(self.world, path, digest)
        saved = read(path)
        if complaint := self._state.complaint(saved):
            hint = "give this training its own run directory (--run-dir PATH), or start anew here: --resume never"
            raise CheckpointError(f"Resuming from {path}:", f"{complaint}.", hint)
        metrics_bytes, differences = saved["metrics_bytes"], self._state.differences(saved)
        del saved  # frees its memory
        self._state.load(functools.partial(read, path))
        self._is_training = self.shard.seen == self.shard.size  # only the code after the last batch remains
        if is_own:
            self._saved = self._place
            with self.run_dir.written():
                self.run_dir.continue_metrics(metrics_bytes)
        place = f"step {self.steps}, epoch {self.epoch + 1}, {self.shard.seen} of its {self.shard.size} samples seen"
        self.world.print("\n  ".join([f"Resuming from {path}: {place}", *differences]))
