"""What rank 0 and the others do, tier by tier.

Rank 0 gathers the reports of a tier, judges them, and tells the others whether to continue. The others report, and do
what rank 0 says; without rank 0, one of them says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster_ddp.agent import rank_notes
from cluster_ddp.agent.channel import Message
from cluster_ddp.agent.rank_notes import FailureNote
from cluster_ddp.doctor.checks import all_checks
from cluster_ddp.doctor.findings import Finding, shown_ranks
from cluster_ddp.doctor.step import comparison, connecting, judgement
from cluster_ddp.doctor.step.links import NetworkLink
from cluster_ddp.doctor.step.rank import REPORT_S, SETTLE_LOSSY_S, SETTLE_S, TIER_S, DoctorOptions, Rank, RankIdentity
from cluster_ddp.doctor.step.report_channel import ReportClient, ReportServer
from cluster_ddp.doctor.step.report_folder import SPEAKS, ReportFolder
from cluster_ddp.errors import USAGE_EXIT_STATUS
from cluster_ddp.run.names import Kind
from cluster_ddp.runtime.failure import sick_nodes

_SAID_EVERY_S = 10
# How much later a message of rank 0 may come.
_GRACE_S = 10.0
# How long the others wait with a bad status.
_LAST_S = 1.0


class Leader(Rank):
    """Rank 0."""

    def __init__(
        self, options: DoctorOptions, env: Mapping[str, str], identity: RankIdentity, folder: ReportFolder
    ) -> None:
        super().__init__(options, env, identity, folder)
        self._server = ReportServer(identity.topology, self.key, folder)
        self._server.put(self.message("here"))  # another process that has this rank, too, is seen by that
        self._reports: Mapping[int, Message] = {}

    def close(self) -> None:
        """Close connections, remove the folder."""
        super().close()
        self._server.close()
        self.folder.remove()

    def run(self) -> int:
        """Judge tier after tier; print the verdict."""
        topology = self.identity.topology
        tiers = {"nodes": self._nodes, "network": self._network, "torch": self._imports, "training": self._training}
        for name in list(tiers)[: 2 if self.options.quick else None]:
            if name == "network" and topology is not None and 1 in (topology.num_nodes, topology.world_size):
                continue
            start = time.monotonic()
            found, measured = tiers[name]()
            is_sound = self.verdict.add(name, time.monotonic() - start, found, measured)
            if not is_sound or not self.verdict.add("ranks", 0.0, comparison.same_rank(self._server.twice)):
                break
        return self.speak(lambda status: self._server.tell("end", status=status))

    def _nodes(self) -> tuple[list[Finding], str]:
        """Tier 1: each node alone."""
        start, waited_s, topology = time.monotonic(), self.options.wait_s, self.identity.topology
        self._server.put(self.examined())
        here = self._server.gather("here", self.identity.world_size, start + waited_s - time.monotonic())
        self._server.gather("nodes", len(here), self.options.check_limit_s + REPORT_S)
        self._reports = reports = self._server.settle("nodes", SETTLE_S, SETTLE_LOSSY_S)
        found = sorted(comparison.findings(reports), key=lambda one: one.check != "topology")
        found += comparison.same_rank(self._server.twice)
        found += comparison.missing(topology, self.identity.world_size, here, waited_s, self.env)
        found += self._without_answer("nodes", here, reports)
        if self._server.port_error is not None:
            found.append(Finding.of_error("master_port", self._server.port_error))
        if topology is not None:
            found += comparison.differences(topology, reports)
            if self._server.port_error is None:
                apart = {rank: one for rank, one in sorted(reports.items()) if one.get("by") == "file" and rank}
                found += [connecting.no_way(rank, one, topology.master_addr) for rank, one in apart.items()]
        return found, _measured(reports)

    def _network(self) -> tuple[list[Finding], str]:
        """Tier 2: the nodes in pairs, and whether they see the same run directory."""
        firsts = [(rank, one) for rank, one in sorted(self._reports.items()) if one.get("port")]
        nexts = [one for _, one in firsts[1:] + firsts[:1]]
        plan = {
            str(rank): [one["host"], one["fingerprint"].get("address") or one["host"], one["port"]]
            for (rank, _), one in zip(firsts, nexts)
        }
        token = self._token()
        answers, silent = self._answers("network", plan=plan, token=None if token is None else str(token))
        if token is not None:
            token.unlink(missing_ok=True)
        found_links = [NetworkLink(**link) for one in answers.values() for link in one["links"]]
        found = judgement.of_links(found_links) + judgement.not_shared(answers, self.options.run_dir)
        if any(one.check == "packet_loss" for one in found):  # an answer may be lost, too
            found += self._without_answer("network", self._reports, answers, is_lossy=True)
        else:
            found = silent + found
        return found, judgement.shown_slowest(found_links)

    def _token(self) -> Path | None:
        """Make a file in the run directory: all nodes must see it. Its name is new, so no file system remembers it."""
        if self.options.run_dir is None or not self.options.run_dir.is_dir():
            return None
        path = self.options.run_dir / f".doctor-{os.urandom(6).hex()}"
        with contextlib.suppress(OSError):
            path.write_text("")
        return path if path.exists() else None

    def _imports(self) -> tuple[list[Finding], str]:
        """Tier 3, begun: torch."""
        answers, found = self._answers("import")
        return found + judgement.of_imports(answers), ""

    def _training(self) -> tuple[list[Finding], str]:
        """Tiers 3 and 4: collectives, and a step of DDP."""
        answers, found = self._answers("training")
        return found + judgement.of_training(answers), judgement.shown_all_reduces(answers)

    def _answers(self, tier: str, **fields: object) -> tuple[dict[int, Message], list[Finding]]:
        """Let all ranks do a tier. Returns their answers, and findings of those that did not answer.

        Says on stderr which ranks are slow to import torch.
        """
        self._server.tell(tier, **fields)
        self._server.put(self.answer({"kind": tier, **fields}))
        size, step_s = self.identity.world_size, _SAID_EVERY_S if tier == "import" else TIER_S[tier]
        answers, waited_s = self._server.gather(tier, size, step_s), step_s
        while waited_s < TIER_S[tier] and (absent := {*range(size)} - answers.keys() - self._server.closed):
            print(f"Waiting for {shown_ranks(absent)} to import torch ({waited_s} s) …", file=sys.stderr, flush=True)
            answers, waited_s = self._server.gather(tier, size, step_s), waited_s + step_s
        return answers, self._without_answer(tier, self._reports, answers)

    def _without_answer(
        self, tier: str, here: Mapping[int, Message], answers: Mapping[int, Message], *, is_lossy: bool = False
    ) -> list[Finding]:
        """Return the ranks of `here` that have not answered in a tier, and whether that may be their nodes' fault.

        Where the network `is_lossy`, it is not.
        """
        hosts = {rank: str(one["host"]) for rank, one in here.items()}
        reached = {rank: host for rank, host in hosts.items() if rank in answers or rank in self._server.closed}
        may_accuse = sick_nodes.may_accuse(reached, self.identity.world_size, self.env)
        return [
            comparison.ended(rank, host, tier, accuses=not is_lossy and (may_accuse or rank in reached))
            for rank, host in hosts.items()
            if rank not in answers
        ]


def _measured(reports: Mapping[int, Message]) -> str:
    """Return how much was checked, and the interfaces that gloo and NCCL will take, by the number of nodes."""
    words = f"{len(all_checks.ALL)} checks on {len({str(one['host']) for one in reports.values()})} nodes"
    taken = [one["fingerprint"].get("interfaces", {}) for one in reports.values()]
    for library in ("gloo", "NCCL"):
        if names := " or ".join(dict.fromkeys(one[library] for one in taken if one.get(library))):
            words += f", {library} on {names}"
    return words


class Follower(Rank):
    """Another rank than 0."""

    def __init__(
        self, options: DoctorOptions, env: Mapping[str, str], identity: RankIdentity, folder: ReportFolder
    ) -> None:
        super().__init__(options, env, identity, folder)
        self._client = ReportClient(identity.topology, self.key, folder, options.wait_s)
        self._client.start(self.message("here"))
        self._server: ReportServer | None = None  # in place of rank 0's, if that is not there

    def close(self) -> None:
        """Close connections; remove the folder in place of rank 0."""
        super().close()
        self._client.close()
        if self._server is not None:
            self._server.close()
            self.folder.remove()

    def run(self) -> int:
        """Report; then do what rank 0 says, until it says the end."""
        self._client.send(self.examined())
        tier = "nodes"
        rank_0_s = self.options.wait_s + self.options.check_limit_s + REPORT_S + SETTLE_LOSSY_S
        while told := self._client.told(rank_0_s + _GRACE_S):
            if told["kind"] == "end":
                return self._after_rank_0(int(told["status"]))
            tier = str(told["kind"])
            rank_0_s = 2 * TIER_S[tier]  # it does its own part, then waits for all others
            self._client.send(self.answer(told))
        return self._speak_after_rank_0(tier) if self._client.is_connected else self._speak_without_rank_0()

    def _speak_after_rank_0(self, tier: str) -> int:
        """Rank 0 was there, and has ended: one rank says so, and nothing else."""
        if not self._is_speaker(without_folder=self.identity.rank == 1):
            return self._after_rank_0(USAGE_EXIT_STATUS)
        self._client.close()
        topology = self.identity.topology
        assert topology is not None
        host = next(iter(topology.nodes), topology.master_addr)
        return self._speak(tier, [comparison.ended(0, host, tier, accuses=self._client.was_closed)])

    def _speak_without_rank_0(self) -> int:
        """Nothing shows that rank 0 has started: one rank says so; the others wait for that."""
        if not self._is_speaker(without_folder=True):
            self._client.told(_GRACE_S, unseen_s=_GRACE_S)
            return self._after_rank_0(USAGE_EXIT_STATUS)
        server = ReportServer(None, self.key, self.folder)
        server.put(self.report)
        topology, size, failures = self.identity.topology, self.identity.world_size, self._client.failures
        found = comparison.findings(server.gather("nodes", size, 1.0))
        here = server.gather("here", 0, 0.0)
        if topology is not None and (0 in here or connecting.UNREACHED_HINTS.keys() & failures.values()):
            report = {**self.report, "failures": failures}
            found.append(connecting.no_way(self.identity.rank, report, topology.master_addr))
        found += comparison.missing(topology, size, here, self.options.wait_s, self.env)
        self._client.close()
        return self._speak("nodes", found)

    def _is_speaker(self, *, without_folder: bool) -> bool:
        """Return whether this rank is the first that wants to speak in place of rank 0. It then removes the folder."""
        return self.folder.is_first(SPEAKS, otherwise=False) if self.folder.is_there else without_folder

    def _speak(self, tier: str, found: Sequence[Finding]) -> int:
        self._server = server = ReportServer(None, self.key, self.folder)
        self.verdict.add(tier, 0.0, found)
        return self.speak(lambda status: server.tell("end", status=status))

    def _after_rank_0(self, status: int) -> int:
        """Wait, if the status is bad: srun may end all tasks with TERM after the first, whose error is to be rank 0's.

        That must not become the step's status: srun's is the highest of its tasks', and that of a TERM is 143. So rank
        0 ends only once this connection is closed.
        """
        if status:
            words = "stopped: another rank says what is wrong."
            rank_notes.failed(self.env, self.identity.rank, FailureNote(words, Kind.PEER))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a handler of Python's would be gone as Python ends
            self._client.close()
            time.sleep(_LAST_S)
        return status
