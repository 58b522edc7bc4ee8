"""The part of the other ranks: they report, and do what rank 0 says; without rank 0, the lowest one says so."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster_ddp.doctor.step import compare
from cluster_ddp.doctor.step.exchange import Message
from cluster_ddp.doctor.step.hub import Hub
from cluster_ddp.doctor.step.place import Place
from cluster_ddp.doctor.step.rank import (
    GRACE_S,
    IMPORT_S,
    LINKS_S,
    SETTLE_S,
    TRAINING_S,
    Options,
    Rank,
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
        self._spoke = Spoke(place.topology, self.key, folder)
        self._hub: Hub | None = None  # in place of rank 0's, if that is not there

    def close(self) -> None:
        """Close connections; remove the folder in place of rank 0."""
        super().close()
        self._spoke.close()
        if self._hub is not None:
            self._hub.close()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)

    def run(self) -> int:
        """Report; then do what rank 0 says, until it says the end."""
        self._spoke.send(self.examined(), timeout_s=SETTLE_S)
        works: dict[str, Callable[[Message], Message]] = {
            "network": self.linked,
            "import": lambda told: self.imported(),
            "training": lambda told: self.trained(),
        }
        limits_s = {"nodes": self.options.wait_s + SETTLE_S, "network": LINKS_S, "import": IMPORT_S}
        tier = "nodes"
        while True:
            grace_s = GRACE_S if self._spoke.is_connected else 2.0
            told = self._spoke.told(limits_s.get(tier, TRAINING_S) + grace_s)
            if told is None or told["tier"] == "end":
                break
            tier = str(told["tier"])
            self._spoke.send(works[tier](told), timeout_s=SETTLE_S)
        if told is not None:
            self._spoke.close()
            return _after_rank_0(int(told["status"]))
        return self._speak_without_rank_0()

    def _speak_without_rank_0(self) -> int:
        """Rank 0 does not answer: the lowest rank that is there says so, and the others wait for that."""
        hub = Hub(None, self.key, self.folder)
        hub.put("nodes", self.place.rank, self.report)
        reports, _ = hub.gather("nodes", self.place.world_size, 1.0)
        if min(reports) < self.place.rank:
            self._spoke.told(GRACE_S)
            return USAGE_EXIT_STATUS
        self._hub = hub
        found = [finding for rank, report in sorted(reports.items()) for finding in findings(rank, report)]
        if self.place.topology is not None and 0 in reports:
            failures = {**self.report, "failures": self._spoke.failures}
            found.append(no_way(self.place.rank, failures, self.place.topology.master_addr))
        found += compare.missing(self.place.topology, self.place.world_size, reports, self.options.wait_s)
        self.verdict.add("nodes", self.options.wait_s, found)
        self._spoke.close()
        self.verdict.show(as_json=self.options.as_json, exclude_file=self.options.exclude_file)
        hub.tell({"tier": "end", "status": USAGE_EXIT_STATUS})
        return USAGE_EXIT_STATUS


def _after_rank_0(status: int) -> int:
    """Wait, if the status is bad: srun may end all tasks with TERM after the first, whose error is to be rank 0's.

    That must not become the step's status: srun's is the highest of its tasks', and that of a TERM is 143.
    """
    if status:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))
        time.sleep(_LAST_S)
    return status
