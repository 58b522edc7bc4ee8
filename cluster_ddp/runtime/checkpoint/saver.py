"""Saves the state of a training: copied to host memory between two steps, written in the background."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

from cluster_ddp.errors import CheckpointError, SpecError, first_of, nearest
from cluster_ddp.runtime import non_finite
from cluster_ddp.runtime.checkpoint.folder import CheckpointFolder, step_of
from cluster_ddp.runtime.checkpoint.sharded.sharded_save import ShardedSave
from cluster_ddp.runtime.checkpoint.state import TrainingState
from cluster_ddp.runtime.run_dir import background_writer, start_log
from cluster_ddp.runtime.run_dir.run_dir import RunDir

log = logging.getLogger("cluster_ddp")

# How often rank 0 tells the others that it is still writing, so that they don't time out.
_REPORT_EVERY_S = 2.0

Place = tuple[int, int]
"""Where the training is: the epoch, and the number of steps."""

OnNan = Literal["continue", "stop", "save"]
"""What a non-finite state does: it is left out, it ends the job, or it is saved as any other."""


def check_choices(keep: int, on_nan: str) -> None:
    """Check how many checkpoints are kept, and what a non-finite state does, before any is written.

    Raises:
        SpecError: `keep` is below 1, or there is no such choice.
    """
    if keep < 1:
        raise SpecError(f"Keeping {keep} checkpoints:", "then there is nothing to resume from.", "keep 1 or more")
    if on_nan not in (legal := get_args(OnNan)):
        found = f"there is no such choice.{nearest(str(on_nan), legal)}"
        raise SpecError(f"Saving with on_nan={on_nan!r}:", found, f"on_nan= takes {', '.join(legal)}")


class Saver:
    """Saves a training. Rank 0 writes, of a sharded state all ranks; all methods are collectives.

    The metrics of `run_dir` are written before each checkpoint, which has their size. `before_save` is called on every
    rank before each save.
    """

    def __init__(
        self,
        state: TrainingState,
        folder: CheckpointFolder,
        run_dir: RunDir,
        before_save: Callable[[], object],
        on_nan: OnNan,
    ) -> None:
        self._has_told_best = False
        self.world, self.state, self.folder = state.world, state, folder
        self.run_dir, self._before_save, self._on_nan = run_dir, before_save, on_nan
        self._has_told = False
        self._saved: Place = (-1, -1)  # the place of the last save that began
        self._slow: Place | None = None  # that of the one which was last said to be slow
        self._saved_at_s = time.monotonic()
        self._copied: dict[str, Any] | None = None
        self._held: Literal["", "copy", "write"] = ""  # what is to be done with the copy once the loop's body has run
        self._writers: list[int] = []  # of the copy, if it is sharded: the ranks with a part of it
        self._token, self._writes = "", 0  # of the copy, and how often one was written: their files' names have both
        background_writer.expect(folder)

    @property
    def place(self) -> Place:
        """Where the training is."""
        return self.state.epoch, self.state.steps

    @property
    def has_saved(self) -> bool:
        """Whether the last save that began is of this place."""
        return self._saved == self.place

    @property
    def has_saved_step(self) -> bool:
        """Whether it is of this step, perhaps before the epoch's end."""
        return self._saved[1] == self.state.steps

    def note_place(self, *, is_saved: bool) -> None:
        """Note whether a checkpoint has this place, with all that there is to say of it."""
        self._saved = self.place if is_saved else (-1, -1)

    @property
    def is_written(self) -> bool:
        """On rank 0: whether a checkpoint on disk has all steps."""
        last_good = self.folder.last_good
        return last_good is not None and step_of(last_good) == self.state.steps

    @property
    def age_s(self) -> float:
        """Seconds since the last save, or since the start."""
        return time.monotonic() - self._saved_at_s

    def save(self, *, write: bool = True, hold: bool = False) -> None:
        """Copy the state and write it in the background, or only copy it; with `hold`, write it by `write_held`.

        While the previous save is still being written, this one is skipped. If the previous one failed, this one is
        always written, since the copy overwrites what could have been tried again.
        """
        self.write_held()
        self._before_save()
        self.world.synchronize()
        writer = self.folder.writer
        is_busy, has_failed = self._of_writers(writer.is_busy(), bool(self.folder.failure))
        write = write or has_failed
        self._saved_at_s = time.monotonic() if write else self._saved_at_s
        if is_busy:
            if self.world.is_main and write and self._slow != self._saved:
                self._slow = self._saved
                words = "The checkpoint before step %d is still being written; this one is skipped. (%s)"
                log.warning(words, self.state.steps, writer.at_work())
            return
        self._saved = self.place if write else self._saved
        self._copy()
        self._held = "write" if write else "copy"
        if not hold:
            self.write_held()

    def copy_again(self) -> None:
        """Copy the state anew, if a copy is held: the loop's body may have changed it since, such as by an average."""
        if self._held:
            self._before_save()
            self.world.synchronize()
            self._copy()

    def write_held(self) -> None:
        """Let the copy have the records that were logged since it was made, and begin to write it if that is due."""
        held, self._held = self._held, ""
        if held and self._copied is not None and self.world.is_main:
            self._copied |= self._so_far()
        if held == "write":
            self._write_copy()

    def save_now(self) -> None:
        """Save, and wait until all is written."""
        self.wait()
        self.save()
        self.wait()

    def save_copy(self) -> None:
        """Save the state as it was copied at this step, and wait until it is written."""
        self.wait()
        if self.world.broadcast(self._has_copy() and not self.is_written):
            self._write_copy()
        self.wait()

    def save_best(self, name: str, value: float, *, is_max: bool, of_copy: bool) -> bool:
        """Write the state, as it was copied at this step or anew, in the background if its value is the best so far.

        Returns whether it is.
        """
        of_ranks = self.world.gather_to_main(value)
        if of_ranks is not None and len(set(map(repr, of_ranks))) > 1 and not self._has_told_best:
            self._has_told_best = True
            found = f"best({name!r}, …) has another value on each rank, such as {of_ranks[0]:g}; rank 0's counts."
            hint = "give it the mean over all ranks: world.mean(total, count)"
            log.error("%s\nTraining continues.", CheckpointError("Keeping the best:", found, hint))
        before = self.folder.best(name) if self.world.is_main else None
        is_best = value == value if before is None else value > before if is_max else value < before
        is_again = self.world.is_main and self.folder.is_best_again(name, value, self.state.steps)
        is_best, is_again = self.world.broadcast((is_best, is_again))
        if is_again or not is_best:
            return bool(is_again)
        self.wait()
        if any(self._of_writers(bool(self.folder.failure))):  # this one's success would hide that
            self._saved = (-1, -1)
        if not (of_copy and self.world.broadcast(self._has_copy())):
            if any(self._of_writers(self.folder.writer.is_busy())):  # it was given up, but still reads the copy
                return False
            self._before_save()
            self.world.synchronize()
            self._copy()
        self._write_copy(best=(name, value))
        return True

    def wait(self) -> None:
        """Wait until all that write have written everything or give up, without a time limit."""
        self.write_held()
        while any(self._of_writers(not self.folder.writer.wait(_REPORT_EVERY_S) and not self.folder.writer.is_stuck())):
            self.folder.writer.tell_if_slow()

    def _of_writers(self, *flags: bool) -> list[bool]:
        """For each flag whether a rank that writes has it."""
        if not self.state.is_sharded:
            return self.world.broadcast(list(flags))
        return [any(of_ranks) for of_ranks in zip(*self.world.gather(flags))]

    def _write_copy(self, best: tuple[str, float] | None = None) -> None:
        """Begin to write the copy as this step's checkpoint or as the best one, if there is a copy."""
        if self._copied is None:
            return
        sharded = None
        if self.state.is_sharded:
            self._writes += 1
            token = f"{self._token}-{self._writes}"  # what a rank told of another try is not taken for this one's
            sharded = ShardedSave(
                self.world, self.state.host_copy.local_pieces, self._writers, token, self._tell_non_finite
            )
        first = functools.partial(self._is_left_out, sharded)
        self.folder.save(self.state.steps, self._copied, first=first, sharded=sharded, best=best)

    def _is_left_out(self, sharded: ShardedSave | None) -> bool:
        """Before the copy is written, in the background: whether it is non-finite, and left out. Else sync records."""
        assert self._copied is not None
        found = [] if self._on_nan == "save" else self.state.non_finite(self._copied)
        if not found:
            self.run_dir.sync()
        elif sharded is not None and not self.world.is_main:
            sharded.leave_out(found)
        else:
            self._tell_non_finite(found)
        return bool(found)

    def _tell_non_finite(self, found: list[str]) -> None:
        """Log once that the copied state is non-finite and left out, or end the job."""
        assert self._copied is not None
        step = self._copied["position"]["steps"]
        hint = (
            "check the data, or take a lower learning rate in a new run directory; FiniteCheck, in the script, names "
            "the rank and step where it begins"
        )
        words = f"NaN or Inf in {first_of(found)}"
        error = non_finite.not_saved(f"Training, step {step}:", words, self.folder.last_good, hint)
        if self._on_nan == "stop":
            raise error
        if not self._has_told:
            self._has_told = True
            on = "Training continues, and saves nothing while that lasts"
            log.error('%s\n%s; Checkpointer(on_nan="stop") would end the job.', error, on)
            start_log.note_non_finite(self.run_dir.path, step, words)

    def tell_of_non_finite_end(self) -> None:
        """On rank 0: say at the end of a training that its last state is non-finite, and which one was saved last."""
        if self.world.is_main and self._has_told and not self.is_written:
            good = self.folder.last_good
            last = "none was saved" if good is None else f"the last finite one is of step {step_of(good)}: {good}"
            log.error("The training ends with NaN or Inf at step %d, which is not saved; %s", self.state.steps, last)

    def _so_far(self) -> dict[str, Any]:
        """What the checkpoint has of other files: the length of metrics.jsonl, and the best values."""
        return {
            "metrics_bytes": self.run_dir.metrics_bytes if self.world.is_main else 0,
            "bests": {**self.folder.bests},
        }

    def _has_copy(self) -> bool:
        return self._copied is not None and self._copied["position"]["steps"] == self.state.steps

    def _copy(self) -> None:
        """Copy the state on the ranks that write. If it can't be saved, that is logged, and there is no copy."""
        ranks = self.state.gather()
        if ranks is None and not self.state.is_sharded:  # rank 0 writes
            return
        self._copied = None
        try:
            copied = self.state.copy(ranks, **self._so_far())
            error = ""
        except CheckpointError as raised:  # a part's state has something new that can't be saved
            copied, error = None, str(raised)
        if self.state.is_sharded:
            error = self._agreed_on(error)
        if not error:
            self._copied = copied
        elif self.world.is_main:
            log.error("%s\nTraining continues.", error)
            self.folder.note_failure(error)

    def _agreed_on(self, error: str) -> str:
        """Return why a rank could not copy its part, if one could not. Notes which ranks have pieces to write."""
        ranks = self.world.gather((error, bool(self.state.host_copy.local_pieces.pieces), os.urandom(4).hex()))
        self._writers = [rank for rank, (_, has_pieces, _) in enumerate(ranks) if has_pieces]
        self._token = ranks[0][2]
        return next(filter(None, (one for one, _, _ in ranks)), "")
