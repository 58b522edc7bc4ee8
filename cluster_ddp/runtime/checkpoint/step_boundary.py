"""What happens between two steps: a save if one is due, and a stop if the job has to stop.

All ranks do the same after the same step: they agree on it by small exchanges, some of them during the steps.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable

from cluster_ddp.agent import rank_notes
from cluster_ddp.errors import CheckpointError, SpecError, counted
from cluster_ddp.run.names import Env, Record
from cluster_ddp.runtime.checkpoint.exactness.changes_before_loop import ChangesBeforeLoop
from cluster_ddp.runtime.checkpoint.folder import step_of
from cluster_ddp.runtime.checkpoint.save_interval import Interval
from cluster_ddp.runtime.checkpoint.saver import Saver
from cluster_ddp.runtime.checkpoint.stop_agreement import StopAgreement, watch_time_limit
from cluster_ddp.runtime.data.batch_iterator import BatchIterator, being_read
from cluster_ddp.runtime.profiling.step_times import StepTimes
from cluster_ddp.runtime.run_dir import start_log
from cluster_ddp.runtime.stop_signals import StopFlag, Stopped

log = logging.getLogger("cluster_ddp")
_in_loop: weakref.WeakSet[StepBoundary] = weakref.WeakSet()
"""Those of this process whose loop runs."""


class StepBoundary:
    """Counts the steps of a training, and saves or stops between them. All methods are collectives.

    It measures the steps of `parts`.
    """

    def __init__(self, saver: Saver, interval: Interval, stop_flag: StopFlag, parts: Iterable[object]) -> None:
        self.world, self._saver, self._state, self._run_dir = saver.world, saver, saver.state, saver.run_dir
        self._interval, self._stop_flag = interval, stop_flag
        self.total = 0
        """Number of epochs, or without a shard of steps, of the whole training; 0 if unknown."""
        self._keeps_best = False  # the state after an epoch's last batch may become the best one
        self._ended_at = -1  # the number of steps when the last batch of an epoch was last seen
        # Perhaps only the code after the last batch remains.
        self._is_training = any(shard.is_at_end for shard in self._state.shards)
        shards = self._state.shards
        self._began_at = [shard.step for shard in shards] if any(shard.seen for shard in shards) else None
        self._changes = ChangesBeforeLoop(self.world, self._state.parts)
        self._turn = 0  # without a shard: the steps before this turn of the loop
        self._seen_at_step: list[int] = []  # of each shard, at the last step
        self._place_at_step: tuple[int, ...] = ()
        self._trained_on: set[BatchIterator] = set()  # those with a step in this epoch
        self._read_together: set[BatchIterator] = set()  # those that the loop read at the last step
        self._has_told_break = self._has_told_no_step = self._has_told_best = False
        self._optimizer_steps = 0  # before this epoch
        self._stops = False  # once the loop's body has run
        self._thread = threading.get_ident()
        self._is_read_elsewhere = False  # by another thread
        self._steps_at_start = self._state.steps
        self._run_dir.note_steps(self._state.steps)
        watch_time_limit(stop_flag, self.world, os.environ)
        self._exchange, self._evaluation_exchange = StopAgreement(self.world), StopAgreement(self.world)
        self.times = StepTimes(self._state.shards, parts, world_size=self.world.world_size)

    def begin(self, total: int, all_of_it: str) -> None:
        """Begin the loop of the whole training, over so many epochs, or without a shard steps.

        Raises:
            SpecError: there was a loop before, the shard was read, or a part was changed.
        """
        asked = f"Training for {all_of_it}:"
        if self.total:
            found = "this Checkpointer has had its loop."
            raise SpecError(asked, found, "write one loop, over the epochs or steps of the whole training")
        if any(shard.passes for shard in self._state.shards):
            found = "the shard was read before: a resume would have begun there, and trained other samples."
            raise SpecError(asked, found, "read another one before: world.shard(…)")
        self._changes.check(asked)
        self._state.begin_loop()
        self.total = total
        _in_loop.add(self)
        for shard in self._state.shards:
            shard.enter(self)

    def leave(self) -> None:
        """Leave that loop."""
        _in_loop.discard(self)
        self._state.unsaved.leave()
        for shard in self._state.shards:
            shard.leave(self)

    def begin_turn(self, steps: int) -> None:
        """Without a shard: begin a turn of the loop, after so many steps."""
        self._turn = steps

    def before_pass(self, shard: BatchIterator) -> None:
        """Raise SpecError if the epoch's pass was left before its end: a new one would lose its place."""
        if shard.passes and not shard.is_read_whole:
            asked = f"Reading the training's shard again in epoch {self._state.epoch + 1}, after {shard.seen} samples:"
            found = "its place in the epoch would be lost, and a resume would train other samples."
            raise SpecError(asked, found, "evaluate on a shard of its own: world.shard(…)")
        self._is_read_elsewhere = threading.get_ident() != self._thread
        if not self._is_read_elsewhere:
            self._state.begin_pass()
            self._run_dir.note_repeats(False)

    def after_step(self) -> None:
        """Count a step. Save if a save is due, and stop if the job has to."""
        self.between_steps()
        self._check_step()
        shards = self._state.shards
        for shard in [shard for shard in shards if shard.is_accumulated] or shards:
            shard.check_step(told=self.world.is_main)
        self.times.begin()
        self._state.count_step()
        self._seen_at_step = [shard.seen for shard in shards]
        begins_epoch = not self._is_training
        self._is_training = True
        self._run_dir.note_steps(self._state.steps)
        is_first = self._state.steps == self._steps_at_start + 1
        if is_first:
            self._state.reserve()  # now the optimizer also has its state
        if self.world.is_main:
            self._state.unsaved.note_step(self._state.steps, begins_epoch=begins_epoch)
            if begins_epoch:
                self._state.unsaved.look(self._state.steps)
            if is_first:
                self._state.unsaved.tell(self._state.steps)
        self._save_or_stop(epoch_ended=False)
        if self._is_at_end():  # also if the loop ends with a break, or by counting
            self.after_last_batch()
        self.times.end()

    def after_body(self) -> None:
        """Do `between_steps` once the loop asks for its next batch, with the state of then."""
        self._saver.copy_again()
        self.between_steps()

    def between_steps(self) -> None:
        """Stop, or write a copy, if that is due since the last step. All records of the loop's body are there now."""
        if self._stops:
            self._stop()
        self._saver.write_held()

    def after_last_batch(self) -> None:
        """Copy the state after an epoch's last batch, and save it if a save is due."""
        if self.has_trained:
            self.between_steps()
        if not self._is_training or self.has_trained:  # another pass over the same data
            return
        self._ended_at = self._state.steps
        if self._keeps_best or self._stops:  # they need the copy: none is made during a save
            self._saver.wait()
        if not self._saver.has_saved:
            is_due = self._interval.is_due(self._state.steps, self._state.epoch + 1, epoch_ended=True)
            self._saver.save(write=is_due, hold=True)

    def after_epoch(self) -> None:
        """Begin the next epoch. Save if a save is due, and stop if the job has to."""
        self.between_steps()
        self._tell_of_break()
        self._tell_of_own_count()
        self._tell_of_no_step()
        self._next_epoch()
        self._save_or_stop(epoch_ended=True)

    def in_evaluation(self) -> None:
        """Stop if the job is told to, but not between a batch and its step: a resume would skip that batch."""
        if not self.has_trained and self._is_in_batch():
            return
        if self._stops:
            self._stop()
        if self._evaluation_exchange.is_due():
            (stop,) = self._evaluation_exchange.collect(self._stop_flag.is_set())
            if stop:
                self._stop()
            self._evaluation_exchange.begin(self._stop_flag.is_set())

    def before_best(self, name: str) -> None:
        """Copy the state after each epoch's last batch from now on. Say once if the state of now has half a step."""
        self._keeps_best = True
        if self.has_trained or not (self._state.shards and self._is_in_batch()) or self._has_told_best:
            return
        self._has_told_best = True
        if self.world.is_main:
            asked = f"Keeping the best {name!r} in a batch:"
            lost = "A training that begins with that file skips this batch, trained or not."
            found, hint = f"its step is not counted yet. {lost}", "call checkpoint.best after checkpoint.step()"
            log.error("%s\nTraining continues.", CheckpointError(asked, found, hint))

    def end_early(self) -> None:
        """End the training before all its epochs or steps are done; see `end`."""
        self._state.finish()
        if self._is_at_end():
            self._next_epoch()
        self._saver.note_place(is_saved=False)  # a checkpoint of this step does not say that it is the last one
        self.end()

    def end(self) -> None:
        """Save the final state."""
        self._exchange.finish()
        self._evaluation_exchange.finish()
        self._log_steps()
        self.times.close()
        if not self._saver.has_saved and self._interval.unit != "never":
            self._saver.save_now()
        self._saver.wait()
        self._saver.tell_of_non_finite_end()
        self._note_end("COMPLETED", "The training reached its end.", saved=self._saver.is_written)
        self._stop_flag.give_back()
        self.world.ended_runs.add(self._run_dir.path.resolve())

    @property
    def has_trained(self) -> bool:
        """Whether nothing was trained since an epoch's last batch: its copy is what a stop saves."""
        return self._ended_at == self._state.steps

    def _check_step(self) -> None:
        """Raise SpecError if a resume could not find the place of this step."""
        shards = self._state.shards
        if self not in _in_loop and _in_loop:
            hint = "give all parts of a training to one: Checkpointer(world, shard=shard, model=model, critic=critic)"
            raise self._no_place("the loop of another Checkpointer runs.", hint)
        if self not in _in_loop:
            loop = "for epoch in checkpoint.epochs(10): for batch in shard: …"
            hint = f"write {loop if shards else 'for done in checkpoint.until(10_000): …'}"
            raise self._no_place("it is in no loop that a resume could continue.", hint)
        if min((shard.passes for shard in shards), default=1) > 1:
            found = f"this is another pass over the shard in epoch {self._state.epoch + 1}: a resume would repeat it."
            hint = "let each pass be an epoch: for epoch in checkpoint.epochs(10): for batch in shard: …"
            raise self._no_place(found, hint)
        if self._is_read_elsewhere:
            found = "another thread reads the shard, ahead of the training: a resume would leave out what it has read."
            raise self._no_place(found, "loop over the shard itself: its workers read ahead (num_workers=4)")
        are_read = {shard for shard in shards if shard in being_read}
        self._trained_on |= are_read
        before, self._read_together = self._read_together, are_read
        if before - are_read and before & are_read:
            found = "one of the loop's shards has ended and another has not: a resume would have no batch of the first."
            hint = "let both have as many batches: world.shard(…, sampler=lambda seed, epoch: …) may repeat samples"
            raise self._no_place(found, hint)
        if any(shard.passes and shard not in self._trained_on for shard in shards):
            found = (
                "a shard of the Checkpointer was read outside of this loop: a resume would begin at its place there."
            )
            hint = "loop over the shard itself, not a list of it; evaluate on another one: world.shard(…)"
            raise self._no_place(found, hint)
        place = (self._state.epoch, *(shard.seen for shard in shards)) if shards else (self._turn,)
        if place == self._place_at_step:
            hint = (
                "call checkpoint.step() once for each batch, after its last optimizer step, and read none ahead of it"
            )
            raise self._no_place("the step of this batch was counted already.", hint)
        self._place_at_step = place

    def _no_place(self, found: str, hint: str) -> SpecError:
        return SpecError(f"Step {self._state.steps + 1}:", found, hint)

    def _tell_of_break(self) -> None:
        """Say once if the epoch ended with its last step, and not with its last batch: a resume would train the rest.

        If the loop has taken another batch to look whether it ends, a resume takes that, too.
        """
        ends = [shard.is_at_end for shard in self._state.shards]
        seen = [shard.seen for shard in self._state.shards]
        if any(ends) or seen != self._seen_at_step or self._has_told_break:
            return
        self._has_told_break = True
        if self.world.is_main:
            lost = "A resume from this step, such as after a stop in the evaluation, trains the rest of the epoch."
            found = f"the loop over the shard was left after it. {lost}"
            hint = "look before the batch is trained: `if shard.step == 100: break` as the first line of the loop"
            asked = f"Ending epoch {self._state.epoch + 1} at step {self._state.steps}:"
            log.error("%s\nTraining continues.", CheckpointError(asked, found, hint))

    def _tell_of_own_count(self) -> None:
        """Say if the loop of an epoch that a resume began inside was left elsewhere than that of the epoch before."""
        shards = self._state.shards
        left_at = None if any(shard.is_at_end for shard in shards) else [shard.step for shard in shards]
        before = self._state.left_at
        if self._began_at and before != left_at and self.world.is_main:
            asked = f"Ending epoch {self._state.epoch + 1}, which a resume began after batch {self._began_at[0] + 1}:"
            end = f"was left at batch {left_at[0] + 1}" if left_at else "read all batches"
            other = f", that of the epoch before was left at batch {before[0] + 1}" if before else ""
            found = f"its loop {end}{other}. Does the script count batches itself?"
            hint = "a resume does not know of such a count: `if shard.step == 100: break`, not enumerate or islice"
            log.error("%s\nTraining continues.", CheckpointError(asked, found, hint))
        self._state.note_left_at(left_at)
        self._began_at = None

    def _tell_of_no_step(self) -> None:
        """Say once if optimizers made steps in this epoch, and none was counted."""
        made, self._optimizer_steps = self._optimizer_steps, self._state.unsaved.optimizer_steps
        if self._is_training or made == self._optimizer_steps or self._has_told_no_step:
            return
        self._has_told_no_step = True
        if self.world.is_main:
            steps = counted(self._optimizer_steps - made, "step")
            found = f"optimizers made {steps}, and checkpoint.step() was not called."
            lost = "Nothing is saved, and the job can't stop in time."
            asked, hint = f"Ending epoch {self._state.epoch + 1}:", "call checkpoint.step() after optimizer.step()"
            log.error("%s\nTraining continues.", CheckpointError(asked, f"{found} {lost}", hint))

    def _next_epoch(self) -> None:
        self._state.set_epoch(self._state.epoch + 1)
        self._run_dir.note_repeats(False)  # no batch was read
        self._is_training = False
        self._trained_on.clear()
        self._read_together.clear()

    def _is_in_batch(self) -> bool:
        """Whether the loop has a batch, or without a shard a turn, whose step was not counted."""
        shards = self._state.shards
        if not shards:
            return self in _in_loop and self._state.steps == self._turn
        is_read = any(shard in being_read for shard in shards)
        return is_read and [shard.seen for shard in shards] != self._seen_at_step

    def _is_at_end(self) -> bool:
        """Whether the epoch's last batch is done; of several shards, those of all."""
        return bool(self._state.shards) and all(shard.is_at_end for shard in self._state.shards)

    def _save_or_stop(self, *, epoch_ended: bool) -> None:
        """Save or stop after a step or an epoch."""
        steps = self._state.steps
        save = self._interval.is_due(steps, self._state.epoch, epoch_ended=epoch_ended)
        save = save and not (epoch_ended and self._saver.has_saved_step)  # already saved after the last batch
        is_exchange = epoch_ended or self._exchange.is_due()
        if is_exchange:
            stop, minutes_are_over = self._exchange.collect(*self._flags(), own_s=self.times.own_s)
            if stop and not epoch_ended:
                self._stops = True
                return
            if stop:
                self._stop(is_after_epoch=True)
            if self.times.is_due():
                self._log_steps()
            save = save or minutes_are_over
        if save:
            self._saver.save(hold=not epoch_ended)
        if is_exchange:
            # After the save, which restarts the minutes.
            self._exchange.begin(*self._flags(), own_s=self.times.own_s)

    def _flags(self) -> tuple[bool, bool]:
        """Whether to stop; and whether a save every so many minutes is due, by rank 0's clock."""
        self._saver.folder.writer.check()  # such as that another job has taken the run directory
        minutes_are_over = self.world.is_main and self._interval.is_over(self._saver.age_s)
        return self._stop_flag.is_set(), minutes_are_over

    def _stop(self, *, is_after_epoch: bool = False) -> None:
        """Save, print that, and end this process together with all others."""
        self._log_steps()
        steps = self._state.steps
        is_new = steps > self._steps_at_start  # else a resume begins as this start did
        if self.has_trained and not is_after_epoch:
            self._saver.save_copy()
        elif is_new:
            self._saver.save_now()
        reasons = self.world.gather(self._stop_flag.reason())
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        is_between = self._state.epoch and not any(shard.seen for shard in self._state.shards)
        epoch = f"after epoch {self._state.epoch}" if is_between else f"epoch {self._state.epoch + 1}"
        place = f"step {steps} ({epoch})" if self._state.shards else f"step {steps}"
        asked = f"Stopped after {place}: rank {rank}: {reason}."
        last_good = self.world.broadcast(self._saver.folder.last_good)
        saved = -1 if last_good is None else step_of(last_good)
        if is_new and saved < steps and saved <= self._steps_at_start:
            found = f"nothing could be saved since step {self._steps_at_start}: a restart would end here again."
            raise CheckpointError(asked, found, "see the errors above; is the disk full, or a quota used up?")
        rank_notes.stopped(os.environ, self.world.rank)  # launchers may hide the exit status
        self._note_end("STOPPED", f"Stopped in time: {reason}.", saved=saved == steps or not is_new)
        words = f"{asked} Saved." if saved == steps else f"{asked} NOT saved. The last good checkpoint: {last_good}."
        if last_good is None:
            words = f"{asked} Nothing was trained: nothing to save."
        elif Env.RESUME not in os.environ:  # else the job's agent says it in the end, if nothing starts the job again
            words += f" To resume from {last_good}, if the job is not requeued: {self._run_dir.resume_command}"
        self.world.print(words)
        self._stop_flag.ignore()
        self.world.barrier()  # rank 0 has saved: now the first rank to end may end the others
        raise Stopped

    def _note_end(self, state: str, why: str, *, saved: bool) -> None:
        if self.world.is_main:
            start_log.note_end(self._run_dir.path, why, state=state, saved=saved)

    def _log_steps(self) -> None:
        """Log where the time of the steps since the last such record went."""
        if values := self.times.record(self._exchange.own_s_of_ranks):
            restart = {"restart": self.world.topology.restart_count}
            self._run_dir.log(Record.STEPS, {**restart, **self._progress(), **values})

    def _progress(self) -> dict[str, float]:
        """The part of the whole training that is done, if its length is known."""
        if not self.total:
            return {}
        shards = self._state.shards
        sizes = [shard.size or 0 for shard in shards]
        in_epoch = sum(shard.seen for shard in shards) / max(1, sum(sizes)) if all(sizes) else 0.0
        done = self._state.epoch + in_epoch if shards else self._state.steps
        return {"progress": round(min(1.0, done / self.total), 6)}
