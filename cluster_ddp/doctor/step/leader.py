"""Rank 0's part: it gathers the reports of a tier, judges them, and tells the others whether to continue."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster_ddp.agent.channel.lines import Message
from cluster_ddp.doctor.checks import all_checks
from cluster_ddp.doctor.finding import Finding, shown_ranks
from cluster_ddp.doctor.step import compare, links, training
from cluster_ddp.doctor.step.hub import Hub
from cluster_ddp.doctor.step.links import Link
from cluster_ddp.doctor.step.place import Place
from cluster_ddp.doctor.step.rank import (
    IMPORT_S,
    LINKS_S,
    REPORT_S,
    SETTLE_S,
    TRAINING_S,
    Options,
    Rank,
    ended,
    findings,
    no_way,
)
from cluster_ddp.runtime.failure import sick_nodes


class Leader(Rank):
    """Rank 0."""

    def __init__(self, options: Options, env: Mapping[str, str], place: Place, folder: Path | None) -> None:
        super().__init__(options, env, place, folder)
        self._hub = Hub(place.topology, self.key, folder)
        self._reports: Mapping[int, Message] = {}
        self._imported = threading.Event()

    def close(self) -> None:
        """Close connections, remove the folder."""
        super().close()
        self._hub.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self) -> int:
        """Judge tier after tier; print the verdict."""
        for tier in (self._nodes, self._network, self._imports, self._training):
            is_sound = tier() and self.verdict.add("ranks", 0.0, compare.same_rank(self._hub.twice))
            if not is_sound or (self.options.quick and tier == self._network):
                break
        return self.speak(lambda status: self._hub.tell("end", status=status))

    def greet(self) -> None:
        """Be here: another process that has this rank, too, is seen by that."""
        self._hub.put(self.message("here"))

    def _nodes(self) -> bool:
        """Tier 1: each node alone."""
        start, waited_s = time.monotonic(), self.options.wait_s
        self._hub.put(self.examined())
        here = self._hub.gather("here", self.place.world_size, start + waited_s - time.monotonic())
        self._hub.gather("nodes", len(here), self.options.check_limit_s + REPORT_S)
        self._reports = reports = self._hub.settle("nodes", SETTLE_S)
        found = [finding for rank, report in sorted(reports.items()) for finding in findings(rank, report)]
        found = [one for one in found if one.check == "topology"] + [one for one in found if one.check != "topology"]
        found += compare.same_rank(self._hub.twice)
        found += compare.missing(self.place.topology, self.place.world_size, here, waited_s, self.env)
        found += self._gone("nodes", here, reports)
        if self._hub.port_error is not None:
            found.append(Finding.of_cause("master_port", self._hub.port_error))
        if self.place.topology is not None:
            found += compare.differences(self.place.topology, reports)
            found += self._unreached(reports)
        return self.verdict.add("nodes", time.monotonic() - start, found, _measured(reports))

    def _unreached(self, reports: Mapping[int, Message]) -> list[Finding]:
        """Which ranks did not reach rank 0's port."""
        assert self.place.topology is not None
        if self._hub.port_error is not None:
            return []
        return [
            no_way(rank, report, self.place.topology.master_addr)
            for rank, report in sorted(reports.items())
            if report.get("by") == "file" and rank != 0
        ]

    def _network(self) -> bool:
        """Tier 2: the nodes in pairs, and whether they see the same run directory."""
        topology = self.place.topology
        assert topology is not None
        if topology.num_nodes == 1 or self.place.world_size == 1:
            return True
        start = time.monotonic()
        firsts = [rank for rank, one in sorted(self._reports.items()) if one.get("port")]
        token = self._token()
        plan = {str(rank): self._target(firsts[(index + 1) % len(firsts)]) for index, rank in enumerate(firsts)}
        told: Message = {"plan": plan, "token": None if token is None else str(token)}
        self._hub.tell("network", **told)
        self._hub.put(self.linked(told))
        answers = self._hub.gather("network", self.place.world_size, LINKS_S)
        if token is not None:
            token.unlink(missing_ok=True)
        found_links = [Link(**link) for one in answers.values() for link in one["links"]]
        found = [
            *self._gone("network", self._reports, answers),
            *links.judge(found_links),
            *_not_shared(answers, self.options.run_dir),
        ]
        return self.verdict.add("network", time.monotonic() - start, found, _slowest(found_links))

    def _target(self, rank: int) -> list[Any]:
        report = self._reports[rank]
        return [report["host"], report["facts"].get("address") or report["host"], report["port"]]

    def _token(self) -> Path | None:
        """A new file in the run directory: all nodes must see it. Its name is new, so no file system remembers it."""
        if self.options.run_dir is None or not self.options.run_dir.is_dir():
            return None
        path = self.options.run_dir / f".doctor-{os.urandom(6).hex()}"
        with contextlib.suppress(OSError):
            path.write_text("")
        return path if path.exists() else None

    def _imports(self) -> bool:
        """Tier 3, begun: torch."""
        start = time.monotonic()
        self._hub.tell("import")
        self._hub.put(self.imported())
        self._say_whom_it_waits_for("import", "import torch")
        answers = self._hub.gather("import", self.place.world_size, IMPORT_S)
        self._imported.set()
        found = [*self._gone("import", self._reports, answers), *training.judge_imports(answers)]
        return self.verdict.add("torch", time.monotonic() - start, found)

    def _training(self) -> bool:
        """Tiers 3 and 4: collectives, and a step of DDP."""
        start = time.monotonic()
        self._hub.tell("training")
        self._hub.put(self.trained())
        answers = self._hub.gather("training", self.place.world_size, TRAINING_S)
        hosts = {rank: str(one["host"]) for rank, one in answers.items()}
        found = [*self._gone("training", self._reports, answers), *training.judge(answers, hosts)]
        return self.verdict.add("training", time.monotonic() - start, found, training.shown(list(answers.values())))

    def _gone(self, tier: str, here: Mapping[int, Message], answers: Mapping[int, Message]) -> list[Finding]:
        """The ranks of `here` that have not answered in a tier, and whether that may be their nodes' fault."""
        hosts = {rank: str(one["host"]) for rank, one in here.items()}
        reached = {rank: host for rank, host in hosts.items() if rank in answers or rank in self._hub.closed}
        may_accuse = sick_nodes.may_accuse(reached, self.place.world_size, self.env)
        return [
            ended(rank, host, tier, accuses=may_accuse or rank in reached)
            for rank, host in hosts.items()
            if rank not in answers
        ]

    def _say_whom_it_waits_for(self, tier: str, what: str) -> None:
        """Say on stderr, after some seconds, which ranks are slow."""

        def say() -> None:
            waited_s = 0.0
            while not self._imported.wait(10.0):
                waited_s += 10.0
                here = self._hub.gather(tier, 0, 0.0)
                absent = [rank for rank in range(self.place.world_size) if rank not in here]
                print(f"Waiting for {shown_ranks(absent)} to {what} ({waited_s:.0f} s) …", file=sys.stderr, flush=True)

        threading.Thread(target=say, daemon=True).start()


def _measured(reports: Mapping[int, Message]) -> str:
    """How much was checked, and the interfaces that gloo and NCCL will take, by the number of nodes."""
    words = f"{len(all_checks.ALL)} checks on {len({str(one['host']) for one in reports.values()})} nodes"
    for library in ("gloo", "NCCL"):
        taken = [one["facts"]["interfaces"][library] for one in reports.values() if "interfaces" in one["facts"]]
        if names := " or ".join(dict.fromkeys(filter(None, taken))):
            words += f", {library} on {names}"
    return words


def _not_shared(answers: Mapping[int, Message], run_dir: Path | None) -> list[Finding]:
    return [
        Finding(
            check="not_shared",
            what="The run directory is not the same folder on all nodes.",
            evidence=f"{run_dir} lacks there the file that rank 0 has just made",
            hint="name a folder on a file system that all nodes share, not /tmp: --runs-dir PATH",
        ).seen_by(rank, str(answer["host"]))
        for rank, answer in sorted(answers.items())
        if answer["sees"] is False
    ]


def _slowest(found: list[Link]) -> str:
    rates = [(link.bytes_per_s, link) for link in found if link.bytes_per_s]
    if not rates:
        return ""
    rate, link = min(rates, key=lambda pair: pair[0])
    latency = "" if link.latency_s is None else f", {1e3 * link.latency_s:.2g} ms there and back"
    return f"slowest link {link.source} -> {link.target}: {links.shown_rate(rate)}{latency}"
