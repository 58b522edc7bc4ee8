"""Say where all ranks are when no step completes. The collective timeout ends a hang, or `--hang-restart-s` before it.

Each rank has a thread, which answers other ranks that ask (`hang_answers`), also before its first step. After that, if
no step, collective of `World` or batch came for the warning time, all ranks write where they are, and the lowest
one that can prints the verdict. One that reaches too few leaves it to others that reach more (`sick_nodes.may_accuse`).

With `--hang-restart-s`, ranks that then still don't answer end the start: the rank that has printed the verdict fails
with it, and the job's agent starts all again. A hang in which all ranks answer is the script's own: nothing ends it.
Nor one of ranks whose stack files can't be seen: only those say that a rank is busy in C code.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.run.names import File
from cluster_ddp.runtime.console import complain
from cluster_ddp.runtime.failure import hang_verdict, last_progress, sick_nodes
from cluster_ddp.runtime.failure.hang_answers import (
    Ask,
    HangAnswers,
    ended,
    files,
    folders,
    leave_out_torchs_warnings,
    run_dir_here,
)
from cluster_ddp.runtime.failure.hang_verdict import Answer
from cluster_ddp.runtime.failure.stacks import StackFile, StderrStacks, WorkerStacks
from cluster_ddp.runtime.run_dir.fenced_writes import atomic_write
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

DEFAULT_WARNING_S = 120.0
STORE_PATIENCE_S = 2.0  # of `ask`
_LONGEST_S = 1.5
# The store's thread on rank 0 needs 19 µs per request: all ranks together may use a fiftieth of its time.
_EVERY_S_PER_RANK = 2e-3
_STUCK_LOOKS = 4  # so many looks after the warning is due, the stacks of a rank that holds Python's lock are written
_ANSWER_S = 1.0  # that a rank may take to answer, or to write its stacks, besides so many looks and two more
_ANSWERING_S = 30.0  # that an answer and the verdict take at most, without the waiting; else the job was suspended
_OTHERS_S = 10.0  # how much later than the rank that prints the verdict others end a start: it may be silent then
_NEVER = float("inf")

_BLIND = """\
warning: --hang-restart-s {:g} ends no start of this job: there is no run directory on {}, or none that all nodes share.
  Only by their files there are ranks that are busy in C code told from those that are stopped or gone.
  Hint: --run-dir PATH, on a shared file system"""


class HangWatch:
    """A thread that watches one rank.

    Args:
        ask: asks the ranks' store, for `STORE_PATIENCE_S` at most: returns None if it does not answer.
        warning_s: seconds without a step until the ranks say where they are.
        timeout_s: seconds that a collective may take.
        restart_s: seconds after the warning until ranks that don't answer end the start.
        end: ends this process, as the first that fails, unless another one has failed, or the hang is over.
    """

    def __init__(
        self,
        topology: Topology,
        ask: Ask,
        *,
        warning_s: float,
        timeout_s: float,
        restart_s: float = _NEVER,
        end: Callable[[Callable[[], bool]], None] = lambda is_over: None,
    ) -> None:
        self._topology = topology
        self.answers = HangAnswers(topology, ask)
        """What is known of the ranks in the present hang."""
        self._warning_s, self._timeout_s, self._restart_s, self._end = warning_s, timeout_s, restart_s, end
        least_s = _EVERY_S_PER_RANK * topology.world_size
        self._every_s = max(0.05, min(_LONGEST_S, warning_s / 10, timeout_s / 10), least_s)
        self._stuck_s = warning_s + _STUCK_LOOKS * self._every_s
        self._patience_s = (_STUCK_LOOKS + 2) * self._every_s + _ANSWER_S  # for the answers; of thousands, a minute
        is_last = topology.rank == topology.world_size - 1  # one on another node than rank 0, if any is
        self._blind_at = time.monotonic() + warning_s if is_last and restart_s < _NEVER else _NEVER
        self._of_stderr = StderrStacks()  # until there is a folder for a file
        self._file: StackFile | None = None
        self._workers = WorkerStacks()
        self._stopped, self._judging = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="hangs", daemon=True)
        self._error: BaseException | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget the hang before."""
        self._given = Answer(rank=self._topology.rank, host="")  # what this rank has answered last
        self._answered_at = -1.0  # the last progress before the present hang; -1 if this rank has answered in none
        self._end_at = _NEVER  # when this rank ends the start
        self.words = self.silent = self.hint = ""
        """The verdict of the present hang, which ranks are silent by it, and what to do; "" if there is none."""
        self._silent_nodes: list[str] = []

    def start(self) -> None:
        """Start the thread. Call it once."""
        leave_out_torchs_warnings()
        last_progress.reset()
        self._open_file()
        self._arm(self._stuck_s + STORE_PATIENCE_S)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and restore faulthandler."""
        self._stopped.set()
        self._thread.join(_ANSWER_S)
        self._workers.close()
        self._of_stderr.close()
        if self._file is not None and not self._thread.is_alive():
            self._file.close()
            self._file = None

    def verdict(self, error: BaseException) -> str:
        """Return where all ranks are, after a collective's error on this one, and `accuse`; "" if that is unknown."""
        self._error = error
        with contextlib.suppress(Exception):  # the failure itself must be reported
            if not self.words or self._here().at != self._given.at:
                self.words = ""  # it would be of before this rank came here
                self._answer()
                self._tell()
        self.accuse()
        return self.words

    def accuse(self) -> None:
        """Note the nodes that do not answer, by the verdict."""
        with contextlib.suppress(Exception):
            for node in self._silent_nodes:
                sick_nodes.note(os.environ, node, "its ranks do not answer")
            if self._file is not None:
                self._file.take_stderr()  # the verdict is the last word: NCCL's watchdog, say, writes C++ frames then

    def answer(self, error: BaseException) -> None:
        """Write for the other ranks where this one was, after a timeout of a collective."""
        self._error = error
        with contextlib.suppress(Exception):
            self._answer()
            if self._file is not None:
                self._file.take_stderr()

    def aborted(self, error: BaseException) -> ClusterDDPError | None:
        """Return the error that names a rank which a signal has ended, if a connection was lost by that; else None."""
        with contextlib.suppress(Exception):
            if ended(files()) and (verdict := self.verdict(error)):
                return ClusterDDPError("Waiting for the other ranks in a collective:", f"{verdict}.", self.hint)
        return None

    def _watch(self) -> None:
        while not self._stopped.wait(min(self._every_s, max(0.0, self._end_at - time.monotonic()))):
            now = time.monotonic()  # a suspension that comes later makes no hang of what is seen now
            if last_progress.note_suspension(self._every_s):
                self.answers.ask_store_again()  # a question that was suspended has timed out
            with contextlib.suppress(Exception):
                self._look(now)
            if self._answered_at >= 0:
                last_progress.note_suspension(2 * self._patience_s + _ANSWERING_S)

    def _look(self, now: float) -> None:
        """Note where this rank is, and answer if that is due: no step came, or another rank asks."""
        self._open_file()
        last_s = last_progress.last_s
        if last_s and now > self._blind_at:
            self._blind_at = _NEVER
            if len(files()) < self._topology.world_size:
                complain(_BLIND.format(self._restart_s, node_name(os.environ)))
        if self._answered_at == last_s:  # nothing new since the answer
            if now >= self._end_at:
                self._end_if_silent()
            return
        if self._answered_at >= 0:
            self.answers.forget()
            self._begin_anew()
        here = self._here()
        if self._topology.rank == 0 and self._file is not None:
            self._file.write(here.text())  # its store would be gone with it
        self._arm(self._stuck_s + STORE_PATIENCE_S)
        must_answer = bool(last_s and now - last_s > self._warning_s) or self.answers.is_asked(here)
        self._arm(_NEVER if must_answer else self._stuck_s)
        if must_answer:
            self._answered_at = last_progress.last_s
            end_at = time.monotonic() + self._restart_s
            self._answer()
            self._tell(end_at)

    def _arm(self, timeout_s: float) -> None:
        """Let the stacks be written in this time, unless this rank looks again before."""
        if self._file is not None:
            self._file.arm(timeout_s)

    def _end_if_silent(self) -> None:
        """End the start if ranks still do not answer. They have had the time to, and no step has come."""
        self._end_at = _NEVER
        self.answers.ask_store_again()  # it may answer now
        with self._judging:
            self._judge(patience_s=0.0)
        if self.silent and not self._is_over():
            self._end(self._is_over)

    def _is_over(self) -> bool:
        """Whether the hang that was answered last is over."""
        return self._stopped.is_set() or self._error is not None or self._answered_at != last_progress.last_s

    def _open_file(self) -> None:
        """Open this rank's file, also anew once the training has made its run directory."""
        where = folders()
        if not where:
            return
        path = where[0] / File.STACK.format(self._topology.rank)
        with contextlib.suppress(OSError):  # such as on a full disk: no training needs this, and others ask the store
            if self._file is None:
                self._file = StackFile(path, self._of_stderr)
            elif self._file.path != path:
                self._file.move(path)
            else:
                return
            self._file.write(self._here().text())

    def _here(self, *, ask_workers: bool = False) -> Answer:
        """Where this rank is now; after an error, where that was raised."""
        return self.answers.here(self._error, self._workers.places() if ask_workers else ())

    def _answer(self) -> None:
        """Write where this rank is, for all others, and ask them for the same."""
        self._given = answer = self._here(ask_workers=True)
        self._open_file()
        if self._file is not None:
            with contextlib.suppress(OSError):  # such as on a full disk: others may ask the store
                self._file.write(answer.text())
                self._file.dump()
                self._file.sync()
        if not self.answers.give(answer) and self._file is not None:
            self._file.write(replace(answer, lost_store=True).text())
            self._file.sync()

    def _tell(self, end_at: float = _NEVER) -> None:
        """Make the verdict. One rank prints it: the lowest that comes so far."""
        turn_s = 0.0 if self._error or self._topology.rank == 0 else self._patience_s + _ANSWER_S
        if self._stopped.wait(turn_s):
            return
        with self._judging:
            if self.words:
                return
            speaks, ends_after_s = self._judge(patience_s=self._patience_s)
            self._end_at = end_at + ends_after_s
            if speaks and self._error is None:  # else its error is said, and is the last word
                words = f"No step was completed for {self._warning_s:g} s: {self.words}."
                if self._end_at < _NEVER:
                    left_s = max(0.0, self._end_at - time.monotonic())
                    words += f" If that lasts, this start ends in {left_s:.0f} s (--hang-restart-s)."
                complain(words)

    def _judge(self, *, patience_s: float) -> tuple[bool, float]:
        """Make the verdict from all answers; one who is to tell it keeps it as a file.

        Returns whether this rank is to tell it, and how much later than `--hang-restart-s` it may end the start.
        """
        here = self._here(ask_workers=True)
        answers = self.answers.collect(here, patience_s=patience_s)
        found = hang_verdict.judge(answers, here, self._topology.world_size, self.answers.have_files)
        if not found.may_accuse and self._file is not None:
            kept = hang_verdict.kept(self._file.path, min(self._warning_s, self._timeout_s))
            if kept not in ("", self.words):
                self.words, self.silent, self.hint, self._silent_nodes = kept, "", "", []  # by a rank that reaches more
                return False, _NEVER
        self.words, self.silent, self._silent_nodes = found.words, found.silent, found.silent_nodes
        self.hint = hang_verdict.hint(answers, run_dir_here())
        speaks = found.is_lowest or self._error is not None
        where = folders()
        if speaks and where:
            with contextlib.suppress(OSError), atomic_write(where[0] / File.HANG) as file:  # such as on a full disk
                file.write(f"{self.words}\n".encode())
        first_s = 0.0 if found.may_accuse and found.is_lowest else _OTHERS_S
        return speaks, first_s if found.may_end else _NEVER
