"""Rank 0's part: it gathers the reports of a tier, judges them, and tells the others whether to continue."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.agent.channel import Message
from cluster_ddp.doctor.checks import all_checks
from cluster_ddp.doctor.findings import Finding, shown_ranks
from cluster_ddp.doctor.step import absent_ranks, comparison, judgement
from cluster_ddp.doctor.step.links import Link
from cluster_ddp.doctor.step.rank import REPORT_S, SETTLE_LOSSY_S, SETTLE_S, TIER_S, Identity, Options, Rank
from cluster_ddp.doctor.step.report_channel import ReportServer
from cluster_ddp.doctor.step.report_folder import ReportFolder
from cluster_ddp.runtime.failure import suspects

_SAID_EVERY_S = 10


class Leader(Rank):
    """Rank 0."""

    def __init__(self, options: Options, env: Mapping[str, str], identity: Identity, folder: ReportFolder) -> None:
        super().__init__(options, env, identity, folder)
        self._server = ReportServer(identity.topology, self.key, folder)
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
            if not is_sound or not self.verdict.add("ranks", 0.0, absent_ranks.same_rank(self._server.twice)):
                break
        return self.speak(lambda status: self._server.tell("end", status=status))

    def greet(self) -> None:
        """Be here: another process that has this rank, too, is seen by that."""
        self._server.put(self.message("here"))

    def _nodes(self) -> tuple[list[Finding], str]:
        """Tier 1: each node alone."""
        start, waited_s, topology = time.monotonic(), self.options.wait_s, self.identity.topology
        self._server.put(self.examined())
        here = self._server.gather("here", self.identity.world_size, start + waited_s - time.monotonic())
        self._server.gather("nodes", len(here), self.options.check_limit_s + REPORT_S)
        self._reports = reports = self._server.settle("nodes", SETTLE_S, SETTLE_LOSSY_S)
        found = sorted(absent_ranks.findings(reports), key=lambda one: one.check != "topology")
        found += absent_ranks.same_rank(self._server.twice)
        found += absent_ranks.missing(topology, self.identity.world_size, here, waited_s, self.env)
        found += self._without_answer("nodes", here, reports)
        if self._server.port_error is not None:
            found.append(Finding.of_cause("master_port", self._server.port_error))
        if topology is not None:
            found += comparison.differences(topology, reports)
            if self._server.port_error is None:
                apart = {rank: one for rank, one in sorted(reports.items()) if one.get("by") == "file" and rank}
                found += [absent_ranks.no_way(rank, one, topology.master_addr) for rank, one in apart.items()]
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
        answers = self._answers("network", plan=plan, token=None if token is None else str(token))
        if token is not None:
            token.unlink(missing_ok=True)
        found_links = [Link(**link) for one in answers.values() for link in one["links"]]
        found = [
            *self._without_answer("network", self._reports, answers),
            *judgement.of_links(found_links),
            *absent_ranks.not_shared(answers, self.options.run_dir),
        ]
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
        answers = self._answers("import")
        return [*self._without_answer("import", self._reports, answers), *judgement.of_imports(answers)], ""

    def _training(self) -> tuple[list[Finding], str]:
        """Tiers 3 and 4: collectives, and a step of DDP."""
        answers = self._answers("training")
        found = [*self._without_answer("training", self._reports, answers), *judgement.of_training(answers)]
        return found, judgement.shown_all_reduces(answers)

    def _answers(self, tier: str, **fields: object) -> dict[int, Message]:
        """Let all ranks do a tier. Returns their answers. Says on stderr which ranks are slow to import torch."""
        self._server.tell(tier, **fields)
        self._server.put(self.answer({"kind": tier, **fields}))
        size, waited_s = self.identity.world_size, 0
        if tier != "import":
            return self._server.gather(tier, size, TIER_S[tier])
        while True:
            answers = self._server.gather(tier, size, _SAID_EVERY_S)
            waited_s += _SAID_EVERY_S
            absent = [rank for rank in range(size) if rank not in answers]
            if self._server.closed.issuperset(absent) or waited_s >= TIER_S[tier]:
                return answers
            print(f"Waiting for {shown_ranks(absent)} to import torch ({waited_s} s) …", file=sys.stderr, flush=True)

    def _without_answer(self, tier: str, here: Mapping[int, Message], answers: Mapping[int, Message]) -> list[Finding]:
        """Return the ranks of `here` that have not answered in a tier, and whether that may be their nodes' fault."""
        hosts = {rank: str(one["host"]) for rank, one in here.items()}
        reached = {rank: host for rank, host in hosts.items() if rank in answers or rank in self._server.closed}
        may_accuse = suspects.may_accuse(reached, self.identity.world_size, self.env)
        return [
            absent_ranks.ended(rank, host, tier, accuses=may_accuse or rank in reached)
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
