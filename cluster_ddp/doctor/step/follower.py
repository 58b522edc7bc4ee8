"""The part of the other ranks: they report, and do what rank 0 says; without rank 0, one of them says so."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cluster_ddp.agent import notes
from cluster_ddp.agent.channel.lines import Message
from cluster_ddp.doctor.finding import Finding
from cluster_ddp.doctor.step import compare, exchange
from cluster_ddp.doctor.step.hub import Hub
from cluster_ddp.doctor.step.place import Place
from cluster_ddp.doctor.step.rank import (
    GRACE_S,
    IMPORT_S,
    LINKS_S,
    TRAINING_S,
    UNREACHED,
    Options,
    Rank,
    ended,
    findings,
    no_way,
)
from cluster_ddp.doctor.step.spoke import Spoke
from cluster_ddp.errors import USAGE_EXIT_STATUS

# How long the others wait with a bad status.
_LAST_S = 1.0


class Follower(Rank):
    """Another rank than 0."""

    def __init__(self, options: Options, env: Mapping[str, str], place: Place, folder: Path | None) -> None:
        super().__init__(options, env, place, folder)
        self._spoke = Spoke(place.topology, self.key, folder, options.wait_s)
        self._hub: Hub | None = None  # in place of rank 0's, if that is not there

    def close(self) -> None:
        """Close connections; remove the folder in place of rank 0."""
        super().close()
        self._spoke.close()
        if self._hub is not None:
            self._hub.close()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)

    def greet(self) -> None:
        """Reach rank 0, and say that this rank is here."""
        self._spoke.start(self.message("here"))

    def run(self) -> int:
        """Report; then do what rank 0 says, until it says the end."""
        self._spoke.send(self.examined())
        works: dict[str, Callable[[Message], Message]] = {
            "network": self.linked,
            "import": lambda told: self.imported(),
            "training": lambda told: self.trained(),
        }
        nodes_s = self.options.wait_s + self.options.check_limit_s
        limits_s = {"nodes": nodes_s, "network": LINKS_S, "import": IMPORT_S, "training": TRAINING_S}
        tier = "nodes"
        while True:
            # Rank 0 does its own part, then waits for all others.
            told = self._spoke.told(2 * limits_s[tier] + GRACE_S)
            if told is None or told["kind"] == "end":
                break
            tier = str(told["kind"])
            self._spoke.send(works[tier](told))
        if told is not None:
            self._spoke.close()
            return self._after_rank_0(int(told["status"]))
        return self._speak_after_rank_0(tier) if self._spoke.is_connected else self._speak_without_rank_0()

    def _speak_after_rank_0(self, tier: str) -> int:
        """Rank 0 was there, and has ended: one rank says so, and nothing else."""
        self._spoke.close()
        if not self._is_speaker(without_folder=self.place.rank == 1):
            return self._after_rank_0(USAGE_EXIT_STATUS)
        assert self.place.topology is not None
        host = next(iter(self.place.topology.nodes), self.place.topology.master_addr)
        return self._speak(tier, [ended(0, host, tier, accuses=self._spoke.was_closed)])

    def _speak_without_rank_0(self) -> int:
        """Nothing shows that rank 0 has started: one rank says so; the others wait for that."""
        if not self._is_speaker(without_folder=True):
            self._spoke.told(GRACE_S, unseen_s=GRACE_S)
            return self._after_rank_0(USAGE_EXIT_STATUS)
        hub = Hub(None, self.key, self.folder)
        hub.put(self.report)
        reports = hub.gather("nodes", self.place.world_size, 1.0)
        here = hub.gather("here", 0, 0.0)
        found = [finding for rank, report in sorted(reports.items()) for finding in findings(rank, report)]
        kinds = set(self._spoke.failures.values())
        if self.place.topology is not None and (0 in here or kinds & UNREACHED):
            failures = {**self.report, "failures": self._spoke.failures}
            found.append(no_way(self.place.rank, failures, self.place.topology.master_addr))
        found += compare.missing(self.place.topology, self.place.world_size, here, self.options.wait_s, self.env)
        self._spoke.close()
        return self._speak("nodes", found)

    def _is_speaker(self, *, without_folder: bool) -> bool:
        """Whether this rank speaks in place of rank 0: the first one that asks; it removes the folder when it ends."""
        if self.folder is None:
            return without_folder
        try:
            return exchange.is_first(self.folder, exchange.SPEAKS)
        except OSError:
            return False

    def _speak(self, tier: str, found: Sequence[Finding]) -> int:
        self._hub = hub = Hub(None, self.key, self.folder)
        self.verdict.add(tier, 0.0, found)
        return self.speak(lambda status: hub.tell("end", status=status))

    def _after_rank_0(self, status: int) -> int:
        """Wait, if the status is bad: srun may end all tasks with TERM after the first, whose error is to be rank 0's.

        That must not become the step's status: srun's is the highest of its tasks', and that of a TERM is 143.
        """
        if status:
            notes.failed(self.env, self.place.rank, "stopped: another rank says what is wrong.", consequence=True)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))
            time.sleep(_LAST_S)
        return status
