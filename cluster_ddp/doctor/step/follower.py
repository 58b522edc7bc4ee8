"""The part of the other ranks: they report, and do what rank 0 says; without rank 0, one of them says so."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence

from cluster_ddp.agent import rank_notes
from cluster_ddp.doctor.findings import Finding
from cluster_ddp.doctor.step import absent_ranks
from cluster_ddp.doctor.step.rank import REPORT_S, SETTLE_LOSSY_S, TIER_S, Identity, Options, Rank
from cluster_ddp.doctor.step.report_channel import ReportClient, ReportServer
from cluster_ddp.doctor.step.report_folder import SPEAKS, ReportFolder
from cluster_ddp.errors import USAGE_EXIT_STATUS

# How much later a message of rank 0 may come.
_GRACE_S = 10.0
# How long the others wait with a bad status.
_LAST_S = 1.0


class Follower(Rank):
    """Another rank than 0."""

    def __init__(self, options: Options, env: Mapping[str, str], identity: Identity, folder: ReportFolder) -> None:
        super().__init__(options, env, identity, folder)
        self._client = ReportClient(identity.topology, self.key, folder, options.wait_s)
        self._server: ReportServer | None = None  # in place of rank 0's, if that is not there

    def close(self) -> None:
        """Close connections; remove the folder in place of rank 0."""
        super().close()
        self._client.close()
        if self._server is not None:
            self._server.close()
            self.folder.remove()

    def greet(self) -> None:
        """Reach rank 0, and say that this rank is here."""
        self._client.start(self.message("here"))

    def run(self) -> int:
        """Report; then do what rank 0 says, until it says the end."""
        self._client.send(self.examined())
        tier = "nodes"
        rank_0_s = self.options.wait_s + self.options.check_limit_s + REPORT_S + SETTLE_LOSSY_S
        while told := self._client.told(rank_0_s + _GRACE_S):
            if told["kind"] == "end":
                self._client.close()
                return self._after_rank_0(int(told["status"]))
            tier = str(told["kind"])
            rank_0_s = 2 * TIER_S[tier]  # it does its own part, then waits for all others
            self._client.send(self.answer(told))
        return self._speak_after_rank_0(tier) if self._client.is_connected else self._speak_without_rank_0()

    def _speak_after_rank_0(self, tier: str) -> int:
        """Rank 0 was there, and has ended: one rank says so, and nothing else."""
        self._client.close()
        if not self._is_speaker(without_folder=self.identity.rank == 1):
            return self._after_rank_0(USAGE_EXIT_STATUS)
        topology = self.identity.topology
        assert topology is not None
        host = next(iter(topology.nodes), topology.master_addr)
        return self._speak(tier, [absent_ranks.ended(0, host, tier, accuses=self._client.was_closed)])

    def _speak_without_rank_0(self) -> int:
        """Nothing shows that rank 0 has started: one rank says so; the others wait for that."""
        if not self._is_speaker(without_folder=True):
            self._client.told(_GRACE_S, unseen_s=_GRACE_S)
            return self._after_rank_0(USAGE_EXIT_STATUS)
        server = ReportServer(None, self.key, self.folder)
        server.put(self.report)
        topology, size, failures = self.identity.topology, self.identity.world_size, self._client.failures
        found = absent_ranks.findings(server.gather("nodes", size, 1.0))
        here = server.gather("here", 0, 0.0)
        if topology is not None and (0 in here or absent_ranks.UNREACHED.intersection(failures.values())):
            report = {**self.report, "failures": failures}
            found.append(absent_ranks.no_way(self.identity.rank, report, topology.master_addr))
        found += absent_ranks.missing(topology, size, here, self.options.wait_s, self.env)
        self._client.close()
        return self._speak("nodes", found)

    def _is_speaker(self, *, without_folder: bool) -> bool:
        """Return whether this rank is the first that wants to speak in place of rank 0. It then removes the folder."""
        return without_folder if self.folder.path is None else self.folder.is_first(SPEAKS, otherwise=False)

    def _speak(self, tier: str, found: Sequence[Finding]) -> int:
        self._server = server = ReportServer(None, self.key, self.folder)
        self.verdict.add(tier, 0.0, found)
        return self.speak(lambda status: server.tell("end", status=status))

    def _after_rank_0(self, status: int) -> int:
        """Wait, if the status is bad: srun may end all tasks with TERM after the first, whose error is to be rank 0's.

        That must not become the step's status: srun's is the highest of its tasks', and that of a TERM is 143.
        """
        if status:
            rank_notes.failed(
                self.env, self.identity.rank, "stopped: another rank says what is wrong.", consequence=True
            )
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))
            time.sleep(_LAST_S)
        return status
