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

Code after the loop over the shard (an evaluation, the scheduler's step) may be in any order. The state is copied before
it, and a stop in it writes that copy. So after a stop or a kill it runs again from its beginning; nothing counts twice.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from cluster_ddp.errors import SpecError, counted
from cluster_ddp.run.names import Env, File
from cluster_ddp.runtime.checkpoint.folder import CheckpointFolder
from cluster_ddp.runtime.checkpoint.parts import Stateful, as_part
from cluster_ddp.runtime.checkpoint.restore import load_into
from cluster_ddp.runtime.checkpoint.save_interval import Interval
from cluster_ddp.runtime.checkpoint.saver import OnNan, Saver, check_choices
from cluster_ddp.runtime.checkpoint.state import TrainingState
from cluster_ddp.runtime.checkpoint.step_boundary import StepBoundary
from cluster_ddp.runtime.collectives import PerRank
from cluster_ddp.runtime.data.batch_iterator import BatchIterator
from cluster_ddp.runtime.run_dir.run_dir import RunDir
from cluster_ddp.runtime.stop_signals import DEFAULT_SIGNALS, StopFlag
from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")


class Checkpointer:
    """Saves and resumes a training. Make it on every rank, in the main thread, after all parts.

    Args:
        shard: the training data (a `Shard` or a `Stream`), or several. Its place in the epoch and its shuffling are
            part of the state. None for a training that makes its own data: loop over `until` then.
        run_dir: a path or a `RunDir`, with the checkpoints in checkpoints/; default: the run directory of the
            submission, else runs/training-<job id, or date and time>.
        every: how often to save: "1epoch", "500steps", "10min"; "never" saves only when the job is told to stop.
            Default: "1epoch", without a shard "10min".
        keep: how many checkpoints to keep; the newest ones stay.
        resume: "auto": from this run directory's newest checkpoint. "never": from the beginning; old checkpoints are
            set aside (but a requeued job resumes from its own). A path: from this checkpoint, or from the newest one of
            another run directory; ignored once this run directory has checkpoints.
        identity: values that must be equal for a checkpoint to fit, such as the dataset's name.
        meters: states that differ between ranks, such as a `Meter`, by name: with `state_dict()` and
            `load_state_dicts(states)`, which gets this rank's, or after a change of the ranks' number none or several.
        stop_signals: names of the signals to stop at.
        before_save: called on every rank before each save. An exception in it ends the training without that save.
        on_nan: what NaN or Inf in a module's parameters or an optimizer's state does. "continue": such a state is never
            saved, so the last finite checkpoint stays; that is logged once. "stop": it also ends the job, with a
            NonFiniteError on rank 0. "save": it is saved. Entries that began non-finite do not count.
        parts: everything else with a state, by name: model, optimizer, scheduler … Of a DDP model, the module is saved.
            A `types.SimpleNamespace` keeps variables of the script, such as the best loss: numbers, texts, tensors.

    Raises:
        CheckpointError: a checkpoint doesn't fit, can't be found or can't be loaded; or a state can't be saved.
        RunDirError: the run directory can't be written, or another job is using it.
        SpecError: `every` is no interval, or of epochs without a shard; `keep` is below 1; no such signal or `on_nan`;
            a meter or a part without these methods.
        DataError: too few samples are left in the epoch for this number of ranks.
    """

    def __init__(
        self,
        world: World,
        *,
        shard: BatchIterator | Sequence[BatchIterator] | None = None,
        run_dir: RunDir | str | os.PathLike[str] | None = None,
        every: str | None = None,
        keep: int = 3,
        resume: str | os.PathLike[str] = "auto",
        identity: Mapping[str, str | int | float] | None = None,
        meters: Mapping[str, PerRank] | None = None,
        stop_signals: Sequence[str] = DEFAULT_SIGNALS,
        before_save: Callable[[], object] = lambda: None,
        on_nan: OnNan = "continue",
        **parts: Stateful | SimpleNamespace,
    ) -> None:
        self.world = world
        given = () if shard is None else shard
        self._shards = self._taken(given if isinstance(given, list | tuple) else [given])
        self._stop_flag = StopFlag(stop_signals, told=world.is_main)
        interval = Interval.parse(every or ("1epoch" if self._shards else "10min"), has_epochs=bool(self._shards))
        check_choices(keep, on_nan)
        self.run_dir = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir, world)
        self._tell_if_one_has_ended_here()
        if run_dir is None and Env.RUN_DIR not in os.environ:  # nobody has named it
            world.print(f"Run directory: {self.run_dir.path}")
        _check_meters(meters or {})
        parts = {name: as_part(name, part) for name, part in parts.items()}
        self._state = TrainingState(world, self._shards, identity=identity or {}, meters=meters or {}, parts=parts)
        self._folder = CheckpointFolder(self.run_dir.path / File.CHECKPOINTS, keep=keep)
        is_own = load_into(self._state, self._folder, self.run_dir, resume)
        self.run_dir.hold()  # on all ranks: rank 0 has made it
        if not self.steps:
            restored = [*parts, *(meters or {}), *(["the place in the data"] if self._shards else [])]
            world.print(f"A resume restores {', '.join(restored)}, random number generators. All else begins anew.")
        self._saver = Saver(self._state, self._folder, self.run_dir, before_save, on_nan)
        if is_own:
            self._saver.note_place(is_saved=True)
        self._boundary = StepBoundary(self._saver, interval, self._stop_flag, parts.values())

    @property
    def steps(self) -> int:
        """Number of steps since the beginning of the training."""
        return self._state.steps

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._state.epoch

    @property
    def last_good(self) -> Path | None:
        """On rank 0: path of the newest checkpoint that is known to be undamaged, None without one. None on others."""
        return self._folder.last_good

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of `count` epochs, from 0. Use it once, on every rank.

        After the last epoch the final state is saved (unless `every` is "never"), and signal handlers are restored. To
        leave the loop before, call `finish`: after a `break` alone, a resume trains on.

        Raises:
            SpecError: there is no shard; it was read before, or is read again within an epoch; or a second loop.
            Stopped, CheckpointError, RunDirError: as `step`.
        """
        if not self._shards:
            hint = "give shard=world.shard(dataset, …), or loop over checkpoint.until(steps)"
            raise SpecError(f"Training for {counted(count, 'epoch')}:", "without a shard an epoch has no end.", hint)
        all_of_it = counted(count, "epoch")
        self._boundary.begin(count, all_of_it)
        self._tell_if_done(all_of_it, done=self.epoch >= count)
        try:
            while self.epoch < count and not self._is_finished():
                self._state.set_epoch(self.epoch)
                self.run_dir.note_repeats(self._state.begin_epoch())
                yield self.epoch
                if self._is_finished():
                    return
                self._boundary.after_epoch()
        finally:
            self._boundary.leave()
        self._state.restore_rng()  # if all was done already: for what the script does after its loop
        self._boundary.end()

    def until(self, steps: int) -> Iterator[int]:
        """Yield the number of steps done, up to `steps` of the whole training. For a training without a shard.

            for done in checkpoint.until(10_000):
                ...  # forward, backward, optimizer.step(); then checkpoint.step()

        After the last step the final state is saved (unless `every` is "never"), and signal handlers are restored. It
        resumes exactly if the data depend on `done` and the random number generators of torch, Python and NumPy only.

        Raises:
            SpecError: there is a shard; the body did not call `step`; or a second loop.
            Stopped, CheckpointError, RunDirError: as `step`.
        """
        if self._shards:
            hint = "loop over checkpoint.epochs(count), or leave shard= out"
            raise SpecError(f"Training for {counted(steps, 'step')}:", "a training with a shard has epochs.", hint)
        all_of_it = counted(steps, "step")
        self._boundary.begin(steps, all_of_it)
        self._tell_if_done(all_of_it, done=self.steps >= steps)
        self._state.restore_rng()
        try:
            while (done := self.steps) < steps and not self._is_finished():
                self._boundary.begin_turn(done)
                yield done
                if self._is_finished():
                    return
                self._boundary.after_body()
                if self.steps == done:
                    found, hint = "it was not counted.", "call checkpoint.step() in the loop"
                    raise SpecError(f"Step {done + 1} of {steps}:", found, hint)
        finally:
            self._boundary.leave()
        self._boundary.end()

    def finish(self) -> None:
        """End the training before all its epochs or steps are done. Call it on every rank, then leave the loop.

        The state of this moment is saved as the last one (unless `every` is "never"), and signal handlers are restored.
        A training that is resumed from it trains no further. Another run may begin with it (`resume=PATH`).

        Raises:
            CheckpointError, RunDirError: as `step`.
        """
        if not self._state.is_finished:
            self._boundary.end_early()

    def step(self) -> None:
        """Save if a save is due, and stop if the job is told to. Call it on every rank after each optimizer step.

        The state is saved, or the job stops, once the loop asks for its next batch (the next one of `until`): so all of
        the loop's body belongs to this step, also what comes after this call. If the loop is left instead, the state of
        now counts.

        Raises:
            Stopped: the job was told to stop, and can resume. It ends the process with status 75. The loop over the
                shard raises it, too.
            CheckpointError: the job was told to stop, but no checkpoint could be saved since its start.
            RunDirError: another job, or a newer start of this one, has taken the run directory.
            SpecError: outside of the loop over `epochs` or `until`; again for the same batch; the training was
                finished; or other batches of the update follow (`World.accumulate`).
        """
        if self._state.is_finished:
            hint = "leave the loop after checkpoint.finish(), or loop over checkpoint.epochs(…)"
            raise SpecError(f"Step {self.steps + 1}:", f"the training was finished at step {self.steps}.", hint)
        self._boundary.after_step()

    def best(self, name: str, value: float, *, mode: Literal["max", "min"] = "max") -> bool:
        """Keep the state as checkpoints/best-<name>.pt if its value is the best in the run directory; return whether.

        Call it after the evaluation, on every rank. After an epoch's last batch the state of that moment is kept. It is
        written in the background, once the save before it is written. Before an epoch's first batch, where a resume
        inside the epoch runs the code again, that second call keeps nothing. Between batches, call it after `step`.

        Args:
            name: of the value, such as "accuracy": letters, digits, "_" and "-".
            value: of this evaluation, the same on every rank. NaN is never the best.
            mode: whether a larger or a smaller value is better.

        Raises:
            SpecError: another `mode`, or a name with other characters.
        """
        if mode not in ("max", "min") or not re.fullmatch(r"[\w-]+", name, re.ASCII):
            asked = f"Keeping the best {name!r} by mode={mode!r}:"
            raise SpecError(asked, "that is no mode, or no name of a file.", 'best("accuracy", value, mode="max")')
        self._boundary.before_best(name)
        if self.run_dir.repeats:  # with other weights than then
            return False
        return self._saver.save_best(name, float(value), is_max=mode == "max", of_copy=self._boundary.has_trained)

    def stop_if_asked(self) -> None:
        """Stop if the job is told to. Call it now and then in a long evaluation, equally often on every rank.

        If it stops after the epoch's last batch, all code after that batch runs again on resume. Between two batches,
        call it after `step`: the state of that moment is saved, and the evaluation does not run again. Between a batch
        and its `step` it does nothing, and `step` stops.

        Raises:
            Stopped, CheckpointError, RunDirError: as `step`.
        """
        self._boundary.in_evaluation()

    def _taken(self, given: Sequence[object]) -> list[BatchIterator]:
        """Make shards this training's. SpecError: one is none, another training's, or was made for other ranks."""
        world, asked, taken = self.world, "Making a Checkpointer:", list[BatchIterator]()
        for shard in given:
            if not isinstance(shard, BatchIterator):
                found = f"shard= is a {type(shard).__name__}: its place in an epoch can't be saved."
                raise SpecError(asked, found, "shard=world.shard(dataset, batch_size=…), in place of a DataLoader")
            if shard.is_in_loop:
                found = "another Checkpointer's loop is reading this shard."
                raise SpecError(asked, found, "give all parts of a training to one Checkpointer")
            if (shard.rank, shard.world_size) != (world.rank, world.world_size):
                here = f"{world.rank} of {world.world_size}"
                found = f"a shard is for rank {shard.rank} of {shard.world_size}, not {here}."
                raise SpecError(asked, found, "make the shard with this world: world.shard(…)")
            shard.forget_passes()
            taken.append(shard)
        return taken

    def _tell_if_one_has_ended_here(self) -> None:
        if self.run_dir.path.resolve() in self.world.ended_runs and self.world.is_main:
            found = "another training of this script has ended there: this one is taken for the same."
            hint = 'if it is another one, give it a run directory: run_dir=checkpoint.run_dir.path / "fine-tuning"'
            log.error("%s", SpecError(f"Making a Checkpointer in {self.run_dir.path}:", found, hint))

    def _is_finished(self) -> bool:
        return self._state.is_finished

    def _tell_if_done(self, all_of_it: str, *, done: bool) -> None:
        if self._state.is_finished:
            on = f"To train on, begin a new run with it: resume={str(self.last_good)!r}"
            self.world.print(f"checkpoint.finish() ended this training at step {self.steps}: nothing to train. {on}")
        elif done:
            self.world.print(f"All is done already ({all_of_it}): nothing to train.")


def _check_meters(meters: Mapping[str, object]) -> None:
    """Raise SpecError if one can't be saved and loaded."""
    for name, meter in meters.items():
        if not (hasattr(meter, "state_dict") and hasattr(meter, "load_state_dicts")):
            found = f"it is a {type(meter).__name__}, which has no state_dict() and load_state_dicts(states)."
            hint = "give it these, for the states of no, one or several ranks; what is equal on all ranks is a part"
            raise SpecError(f"Saving {name!r} of each rank (meters=):", found, hint)
