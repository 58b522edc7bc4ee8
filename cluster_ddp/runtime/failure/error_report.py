"""One rank's exception, printed once, with its rank and host.

When one rank fails, the collectives of all others fail, too. Their tracebacks would hide the one that matters. So the
first rank to fail writes its name into the store, before its connections close, and the others print one line that
names it. If it failed because it waited too long, it names the ranks that did not answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from cluster_ddp.agent import rank_notes
from cluster_ddp.agent.rank_notes import FailureNote
from cluster_ddp.errors import ClusterDDPError, CommunicatorError
from cluster_ddp.run import failure_kind
from cluster_ddp.run.files import spare_descriptor
from cluster_ddp.run.names import Env, Kind
from cluster_ddp.runtime import process_exit
from cluster_ddp.runtime.console import complain, first_rank_has_said_it
from cluster_ddp.runtime.device.interruptible_wait import DeviceTimeoutError, PeerFailedError
from cluster_ddp.runtime.failure import last_progress
from cluster_ddp.runtime.rendezvous import arrived_ranks
from cluster_ddp.slurm.variables import Variables, node_name

if TYPE_CHECKING:
    import torch.distributed as dist

    from cluster_ddp.runtime.failure.hang_watch import HangWatch
    from cluster_ddp.slurm.topology import Topology

T = TypeVar("T")

_KEY = "first_failure"
_CONNECTION_LOST = "lost its connection to a rank that failed before, or whose node is gone"
_LOST = "lost: "  # in the store, before the name of a rank that has only lost its connection to another
_STORE_IS_GONE = "stopped: rank 0, which serves the ranks' store, is gone."
_LAST_WORDS_S = 5.0  # at most this long rank 0 stays after a failure, until all others have read who failed
# How long a rank that timed out waits for the others that timed out. Those that hang don't report.
_OTHERS_REPORT_S = 3.0
# What gloo says of a collective that timed out, and of the one that follows (such as the exchange of stop flags during
# the steps); and what NCCL's watchdog says.
_TIMEOUT_WORDS = ("timed out waiting", "application timeout caused pair closure", "watchdog")
# How long the store may take to answer: its server may hang.
_STORE_PATIENCE_S = 5.0


class FailureReporter:
    """Prints a rank's failure as "[rank 3 node2] …", once for the whole run."""

    def __init__(self) -> None:
        self.topology: Topology | None = None
        """This rank's place; None until it is known."""
        self.store: dist.Store | None = None
        """The store of the ranks; None before the rendezvous and after the end."""
        self.collective_timeout_s = 0.0
        """Seconds that a rank waits for the others, for the error."""
        self.hangs: HangWatch | None = None
        """Knows where the ranks are; None if nobody watches."""
        self._reported: BaseException | None = None
        self._pid = os.getpid()

    def install(self) -> None:
        """Replace sys.excepthook."""
        self._pid = os.getpid()
        sys.excepthook = self._excepthook

    def note_place(self, topology: Topology, *, collective_timeout_s: float) -> None:
        """Note this rank's place, and how many seconds it waits for the others."""
        self.topology, self.collective_timeout_s = topology, collective_timeout_s

    def note_store(self, store: dist.Store | None) -> None:
        """Note the store of the ranks; None at the end: later failures concern this rank only."""
        self.store = store

    def note_hangs(self, hangs: HangWatch) -> None:
        """Note who knows where the ranks are."""
        self.hangs = hangs

    def report(self, error: BaseException) -> None:
        """Print an exception; or, if another rank failed first, one line that names it.

        Call it before this rank's connections close: other ranks fail then, and must find the name.
        """
        self._reported = error
        own, is_lost = self._name(), _is_lost(error)
        own = f"{_LOST}{own}" if _kind(error) == Kind.PEER else own
        first = own if self.store is None else self._first_failure(own)  # None: the store is gone
        # One rank looks which other one a signal has ended: the first that lost it. Of rank 0, with its store, rank 1.
        is_to_look = is_lost and (first == own or self._rank() == "1")
        if is_to_look and self.hangs is not None and (aborted := self.hangs.aborted(error)):
            self.say(aborted, Kind.SAW_PEERS)
        elif first not in (own, None):
            self._follow(first, error)
        elif _is_timeout(error):
            self.say(self._timed_out(error, store_answers=first is not None), Kind.HANG)
        elif first is None and is_lost:
            self.say(_STORE_IS_GONE, Kind.PEER)
        else:
            self.say(error, _kind(error))

    def somebody_failed(self) -> bool:
        """Return whether a rank has reported a failure, or the store, and so rank 0, is gone."""
        assert self.store is not None
        with contextlib.suppress(Exception):
            return self.store.check([_KEY])
        return True

    def answer(self) -> str:
        """Return which other rank failed, in words. The other ranks then know that this one does not hang."""
        own = f"{_LOST}{self._name()}"
        first = self._first_failure(own)
        return _STORE_IS_GONE if first in (own, None) else _stopped_by(first)

    def say(self, error: BaseException | str, kind: str) -> None:
        """Print to stderr why this rank ends, with rank and host, and note it for the end of the job's log.

        `kind` is one of `Kind`. An error that is not of this package has its traceback.
        """
        self._note(error, kind)
        error = f"error: {error}" if isinstance(error, ClusterDDPError) else error
        words = error if isinstance(error, str) else "".join(traceback.format_exception(error)).rstrip()
        lost = "" if isinstance(error, str) or not _is_lost(error) else f"stopped: it {_CONNECTION_LOST}:\n"
        complain(f"[rank {self._rank()} {node_name(os.environ)}] {lost}{words}")

    def linger(self) -> None:
        """On rank 0, which serves the store: wait until all others have read who failed, at most some seconds."""
        if self.store is not None and self._rank() == "0":
            deadline = time.monotonic() + _LAST_WORDS_S
            while time.monotonic() < deadline and bool(self.ask_store(self._unreported)):
                time.sleep(0.1)

    def end_hang(self, restart_s: float, is_over: Callable[[], bool]) -> None:
        """End this process because ranks don't answer, so that all start again, unless another one has failed first.

        They had to answer within `restart_s` seconds after the warning.
        """
        assert self.hangs is not None
        own = self._name()
        first = own if self.hangs.answers.lost_store else self._first_failure(own, is_over)
        if first == own or (first is None and not is_over()):
            self.hangs.accuse()
            asked = f"Waiting {restart_s:g} s for {self.hangs.silent} to answer:"
            hint = "check that node and that rank's output; if ranks may take longer: --hang-restart-s"
            self.say(ClusterDDPError(asked, f"{self.hangs.words}.", f"{hint} {2 * restart_s:g}"), Kind.HANG)
            process_exit.now(1)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            sys.__excepthook__(kind, error, trace)  # of a worker of multiprocessing, whose threads call it
            return
        if Env.NOTES in os.environ:
            # This process ends. If a rank that its failure stops has ended before it, srun (--kill-on-bad-exit) sends
            # TERM, which would replace the exit status of the first failure by 143. After TERM comes KILL.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        is_early = self.store is None and isinstance(error, ClusterDDPError)
        if error is not self._reported and is_early and first_rank_has_said_it(os.environ):
            self._note(error, _kind(error))
        elif error is not self._reported:
            self.report(error)
        self.linger()

    def ask_store(
        self, question: Callable[[dist.Store], T], *, patience_s: float = _STORE_PATIENCE_S + _OTHERS_REPORT_S
    ) -> T | None:
        """Return what a question put to the ranks' store returns; None if it is gone, or doesn't answer in time."""
        if (store := self.store) is None:
            return None
        answers: list[T] = []

        def ask() -> None:
            with contextlib.suppress(Exception):  # the store is gone with rank 0
                answers.append(question(store))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(patience_s)
        return answers[0] if answers else None

    def _first_failure(self, own: str, is_over: Callable[[], bool] = lambda: False) -> str | None:
        """The name of the rank that failed first: this rank's `own`, if no other has; "" if all `is_over`.

        Whoever has only lost its connection to another gives way to one that failed. This rank has reported then. None
        if the store does not answer.
        """

        def first(store: dist.Store) -> str:
            store.check([_KEY])  # may take seconds, and then a step comes
            if is_over():
                return ""
            name = str(store.compare_set(_KEY, "", own), "utf-8")
            if name.startswith(_LOST) and not own.startswith(_LOST):
                name = str(store.compare_set(_KEY, name, own), "utf-8")
            store.set(f"failed/{self._rank()}", "")  # this rank needs rank 0's store no more
            return name

        return self.ask_store(first)

    def _follow(self, first: str | None, error: BaseException) -> None:
        """Say that another rank failed first. After a timeout, stay until that one has found out who hangs."""
        self.say(_stopped_by(first), Kind.PEER)
        if _is_timeout(error) and self.hangs is not None:
            self.hangs.answer(error)  # the first one waits for it
        if _is_timeout(error) or isinstance(error, PeerFailedError):
            # If this rank ended now, Slurm would wake the rank that hangs, or end those that look for it.
            time.sleep(_OTHERS_REPORT_S + 1.0)

    def _timed_out(self, error: BaseException, *, store_answers: bool) -> ClusterDDPError:
        """The error that says where all ranks are, or else names those that have not reported a timeout as well."""
        verdict = self.hangs.verdict(error) if self.hangs else ""
        hint = (self.hangs.hint if self.hangs else "") or "check that node and that rank's output"
        hanging = "rank 0"
        if store_answers:
            time.sleep(_OTHERS_REPORT_S)
            hanging = self.ask_store(self._unreported) or "some rank"
        return ClusterDDPError(
            f"Waiting {self.collective_timeout_s:g} s for the other ranks:",
            f"{verdict or hanging + ' did not answer: it hangs, was stopped, or its node is gone'}.",
            f"{hint}; if ranks may be this slow: distributed(collective_timeout_s=…) "
            "(of cluster-ddp train: --collective-timeout-s)",
        )

    def _unreported(self, store: dist.Store) -> str:
        """The ranks that have not failed, with their hosts; "" if all have."""
        assert self.topology is not None
        keys = [f"failed/{rank}" for rank in range(self.topology.world_size)]
        ranks = [int(key.rpartition("/")[2]) for key in arrived_ranks.unset(store, keys)]
        return ", ".join(f"rank {rank} on {host}" for rank, host in zip(ranks, arrived_ranks.hosts(store, ranks)))

    def _note(self, error: BaseException | str, kind: str) -> None:
        spare_descriptor()
        micro_batch = last_progress.micro_batch if kind == Kind.GPU_MEMORY else None
        note = FailureNote(_in_short(error), kind, last_progress.steps, micro_batch)
        rank_notes.failed(os.environ, self._rank(), note)

    def _name(self) -> str:
        return f"rank {self._rank()} on {node_name(os.environ)}"

    def _rank(self) -> str:
        if self.topology is not None:
            return str(self.topology.rank)
        names = ("SLURM_PROCID", "RANK") if "TORCHELASTIC_RUN_ID" not in os.environ else ("RANK",)  # the task: torchrun
        return Variables(os.environ).text(*names) or "?"


def _stopped_by(other: str | None) -> str:
    name = (other or "").removeprefix(_LOST)
    if name != other:
        return f"stopped: {name} {_CONNECTION_LOST}."
    return f"stopped: {name} failed (see its error)."


def _in_short(error: BaseException | str) -> str:
    """An error in one line, or not many more."""
    if isinstance(error, ClusterDDPError):
        return f"{error.asked} {error.found}"
    return error if isinstance(error, str) else traceback.format_exception_only(error)[-1]


def _is_timeout(error: BaseException) -> bool:
    """Whether a collective, or our own wait for a GPU, timed out."""
    words = str(error).lower()
    is_said = isinstance(error, RuntimeError) and any(part in words for part in _TIMEOUT_WORDS)
    return isinstance(error, DeviceTimeoutError) or is_said


def _is_lost(error: BaseException) -> bool:
    """Whether the connection to another rank broke: that rank is gone, and may have said why."""
    return _kind(error) == Kind.PEER and not isinstance(error, PeerFailedError)


def _kind(error: BaseException) -> str:
    """The kind of an exception, of ours too."""
    is_of_peer = isinstance(error, (CommunicatorError, PeerFailedError))
    return Kind.PEER if is_of_peer else failure_kind.of_error(error)
