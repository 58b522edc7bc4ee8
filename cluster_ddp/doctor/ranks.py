"""The doctor in the tasks of a step: four tiers, each only if the one before is sound.

Rank 0 gathers the reports of a tier, judges them, and tells all ranks whether to continue. The others wait for that,
but never forever: without rank 0, the lowest rank that is there says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.doctor import compare, isolated, links, training
from cluster_ddp.doctor.checks import Site, all_checks
from cluster_ddp.doctor.exchange import Hub, Message, Spoke
from cluster_ddp.doctor.finding import Finding, shown_ranks
from cluster_ddp.doctor.links import Link, Listener
from cluster_ddp.doctor.place import Place, exchange_dir
from cluster_ddp.doctor.verdict import Verdict
from cluster_ddp.errors import USAGE_EXIT_STATUS, ClusterDDPError
from cluster_ddp.runtime.failure import failure_marker, sick_nodes
from cluster_ddp.runtime.rendezvous.secret import RunKey

# How long reports that came by a file may take to come by a connection, too.
_SETTLE_S = 4.0
_LINKS_S = 25.0
_IMPORT_S = 600.0
_TRAINING_S = training.MEETING_S + 60.0
_GRACE_S = 10.0
_STALE_S = 900.0
# How long the others wait with a bad status: srun may end all tasks after the first, and rank 0's is to be that.
_LAST_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is asked of the doctor."""

    quick: bool = False
    """Only the tiers that need no torch."""
    strict: bool = False
    """Whether warnings count for the exit status."""
    as_json: bool = False
    """Print JSON."""
    exclude_file: Path | None = None
    """Where to write the nodes at fault."""
    wait_s: float = 20.0
    """Seconds to wait for ranks that have not started."""
    check_limit_s: float = 20.0
    """Seconds that a group of checks may take."""
    data_dir: Path | None = None
    """Folder of the data."""
    run_dir: Path | None = None
    """The run directory, or where it will be."""


def examine(options: Options, env: Mapping[str, str]) -> int:
    """Examine this rank, together with all others. Rank 0 prints the verdict. Returns the exit status of all."""
    rank = _Rank(options, env)
    try:
        return rank.follow() if rank.hub is None else rank.lead()
    finally:
        rank.close()


class _Rank:
    """One rank's doctor."""

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        self.options, self.env = options, env
        self.place = place = Place.of(env)
        self.key = RunKey.of(place.topology, env) if place.topology is not None else RunKey(b"", place.step)
        is_alone = place.world_size == 1 and place.error is None
        self.folder = None if is_alone else _made(exchange_dir(place, env))
        is_leader = place.rank == 0 and self._leads()
        self.hub = Hub(place.topology, self.key, self.folder) if is_leader else None
        self.spoke = None if is_leader else Spoke(place.topology, self.key, self.folder)
        self.listener = self._listen()
        self.reports: Mapping[int, Message] = {}
        self.report: Message = {}
        self.over = threading.Event()
        self.verdict = Verdict(subject=self._subject())

    def close(self) -> None:
        """Close connections, remove what lies in the folder."""
        if self.listener is not None:
            self.listener.close()
        if self.spoke is not None:
            self.spoke.close()
        if self.hub is not None:
            self.hub.close()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)

    # Rank 0

    def lead(self) -> int:
        """Judge tier after tier; print the verdict."""
        for tier in (self._nodes, self._network, self._imports, self._training):
            is_sound = tier() and self.verdict.add("ranks", 0.0, compare.same_rank(self._hub.twice))
            if not is_sound or (self.options.quick and tier == self._network):
                break
        status = self.verdict.status(strict=self.options.strict)
        if self.verdict.broken_tier:
            first = self.verdict.findings[0]
            error = ClusterDDPError(first.what, first.evidence, first.hint)
            failure_marker.note(self.env, self.place.rank, self.place.host, error)
            failure_marker.note_status(self.env, self.place.rank, self.place.host, status)
            for node, why in self._nodes_at_fault().items():
                sick_nodes.note(self.env, node, f"{why} (cluster-ddp doctor)")
        self.verdict.show(as_json=self.options.as_json, exclude_file=self.options.exclude_file)
        self._tell({"tier": "end", "status": status})  # after that, srun may end this task
        return status

    def _nodes_at_fault(self) -> dict[str, str]:
        topology = self.place.topology
        return {} if topology is None else self.verdict.nodes_at_fault(topology.num_nodes or 1)

    def _nodes(self) -> bool:
        """Tier 1: each node alone."""
        start, waited_s = time.monotonic(), self.options.wait_s
        own = self._report()
        self._hub.put("nodes", 0, own)
        reports, _ = self._hub.gather("nodes", self.place.world_size, waited_s, settle_s=2 * _SETTLE_S)
        self.reports = reports
        found = [finding for rank, report in sorted(reports.items()) for finding in _findings(rank, report)]
        found = [one for one in found if one.check == "topology"] + [one for one in found if one.check != "topology"]
        found += compare.same_rank(self._hub.twice)
        found += compare.missing(self.place.topology, self.place.world_size, reports, waited_s)
        if self._hub.port_error is not None:
            found.append(Finding.of_error("master_port", self._hub.port_error))
        if self.place.topology is not None:
            found += compare.differences(self.place.topology, reports)
            found += self._unreached(reports)
        groups = f"{len(all_checks.ALL)} checks on {len({str(one['host']) for one in reports.values()})} nodes"
        return self.verdict.add("nodes", time.monotonic() - start, found, groups)

    def _unreached(self, reports: Mapping[int, Message]) -> list[Finding]:
        """Which ranks did not reach rank 0's port."""
        assert self.place.topology is not None
        if self._hub.port_error is not None:
            return []
        return [
            _no_way(rank, report, self.place.topology.master_addr)
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
        firsts = [rank for rank, one in sorted(self.reports.items()) if one.get("port")]
        token = self._token()
        plan = {str(rank): self._target(firsts[(index + 1) % len(firsts)]) for index, rank in enumerate(firsts)}
        told = {"tier": "network", "plan": plan, "token": None if token is None else str(token)}
        self._tell(told)
        self._hub.put("network", 0, self._links(told))
        answers, _ = self._hub.gather("network", self.place.world_size, _LINKS_S)
        if token is not None:
            token.unlink(missing_ok=True)
        found_links = [Link(**link) for one in answers.values() for link in one["links"]]
        found = [
            *self._gone("network", answers),
            *links.judge(found_links),
            *_not_shared(answers, self.options.run_dir),
        ]
        return self.verdict.add("network", time.monotonic() - start, found, _slowest(found_links))

    def _target(self, rank: int) -> list[Any]:
        report = self.reports[rank]
        return [report["host"], report["facts"].get("address") or report["host"], report["port"]]

    def _token(self) -> Path | None:
        """A new file in the run directory: all nodes must see it. Its name is new, so no file system remembers it."""
        if self.options.run_dir is None or not self.options.run_dir.is_dir():
            return None
        path = self.options.run_dir / f".doctor-{os.urandom(6).hex()}"
        path.write_text("")
        return path

    def _imports(self) -> bool:
        """Tier 3, begun: torch."""
        start = time.monotonic()
        self._tell({"tier": "import"})
        own = self._import()
        self._hub.put("import", 0, own)
        self._say_whom_it_waits_for("import", "import torch")
        answers, _ = self._hub.gather("import", self.place.world_size, _IMPORT_S)
        self.over.set()
        found = [*self._gone("import", answers), *training.judge_imports(answers)]
        return self.verdict.add("torch", time.monotonic() - start, found)

    def _training(self) -> bool:
        """Tiers 3 and 4: collectives, and a step of DDP."""
        start = time.monotonic()
        self._tell({"tier": "training"})
        self._hub.put("training", 0, self._train())
        answers, _ = self._hub.gather("training", self.place.world_size, _TRAINING_S)
        hosts = {rank: str(one["host"]) for rank, one in answers.items()}
        found = [*self._gone("training", answers), *training.judge(answers, hosts)]
        return self.verdict.add("training", time.monotonic() - start, found, training.shown(list(answers.values())))

    def _gone(self, tier: str, answers: Mapping[int, Message]) -> list[Finding]:
        absent = [rank for rank in self.reports if rank not in answers]
        return [
            Finding(
                check="missing_ranks",
                what=f"Ranks ended or hung in the tier {tier!r}.",
                evidence="no answer",
                hint=f"read that task's output; leave the node out: --exclude={self.reports[rank]['host']}",
                sick_nodes=(str(self.reports[rank]["host"]),),
            ).seen_by(rank, str(self.reports[rank]["host"]))
            for rank in absent
        ]

    def _say_whom_it_waits_for(self, tier: str, what: str) -> None:
        """Say on stderr, after some seconds, which ranks are slow."""

        def say() -> None:
            waited_s = 0.0
            while not self.over.wait(10.0):
                waited_s += 10.0
                here, _ = self._hub.gather(tier, 0, 0.0)
                absent = [rank for rank in range(self.place.world_size) if rank not in here]
                print(f"Waiting for {shown_ranks(absent)} to {what} ({waited_s:.0f} s) …", file=sys.stderr, flush=True)

        threading.Thread(target=say, daemon=True).start()

    @property
    def _hub(self) -> Hub:
        assert self.hub is not None
        return self.hub

    def _tell(self, message: Message) -> None:
        if self.place.world_size > 1:
            self._hub.tell(message)

    # The other ranks

    def follow(self) -> int:
        """Report; then do what rank 0 says, until it says the end."""
        assert self.spoke is not None
        self.spoke.send(self._report(), timeout_s=_SETTLE_S)
        works: dict[str, Callable[[Message], Message]] = {
            "network": self._links,
            "import": lambda told: self._import(),
            "training": lambda told: self._train(),
        }
        limits_s = {"nodes": self.options.wait_s + _SETTLE_S, "network": _LINKS_S, "import": _IMPORT_S}
        tier = "nodes"
        while True:
            grace_s = _GRACE_S if self.spoke.is_connected else 2.0
            told = self.spoke.told(limits_s.get(tier, _TRAINING_S) + grace_s)
            if told is None or told["tier"] == "end":
                break
            tier = str(told["tier"])
            self.spoke.send(works[tier](told), timeout_s=_SETTLE_S)
        if told is not None:
            self.spoke.close()
            time.sleep(_LAST_S if told["status"] else 0.0)
            return int(told["status"])
        return self._speak_without_rank_0()

    def _speak_without_rank_0(self) -> int:
        """Rank 0 does not answer: the lowest rank that is there says so, and the others wait for that."""
        assert self.spoke is not None
        hub = Hub(None, self.key, self.folder)
        hub.put("nodes", self.place.rank, self.report)
        reports, _ = hub.gather("nodes", self.place.world_size, 1.0)
        if min(reports) < self.place.rank:
            self.spoke.told(_GRACE_S)
            return USAGE_EXIT_STATUS
        self.hub = hub
        found = [finding for rank, report in sorted(reports.items()) for finding in _findings(rank, report)]
        if self.place.topology is not None and 0 in reports:
            failures = {**self.report, "failures": self.spoke.failures}
            found.append(_no_way(self.place.rank, failures, self.place.topology.master_addr))
        found += compare.missing(self.place.topology, self.place.world_size, reports, self.options.wait_s)
        self.verdict.add("nodes", self.options.wait_s, found)
        self.spoke.close()
        self.verdict.show(as_json=self.options.as_json, exclude_file=self.options.exclude_file)
        hub.tell({"tier": "end", "status": USAGE_EXIT_STATUS})
        return USAGE_EXIT_STATUS

    # All ranks

    def _report(self) -> Message:
        """Tier 1 of this rank."""
        self.report = message = self._message("nodes", findings=[], facts={}, port=None)
        if self.place.error is not None:
            message["findings"] = [Finding.of_error("topology", self.place.error).to_json()]
        elif self.place.topology is not None:
            site = Site(
                env=self.env,
                topology=self.place.topology,
                host=self.place.host,
                run_dir=self.options.run_dir,
                data_dir=self.options.data_dir,
            )
            limit_s, for_node = self.options.check_limit_s, self.place.is_first_on_node
            found = all_checks.run(site, for_node=for_node, limit_s=limit_s)
            message["findings"] = [one.to_json() for one in found]
            facts = isolated.run({"facts": lambda: [compare.facts(site)]}, limit_s)["facts"]
            message["facts"] = facts[0] if isinstance(facts, list) else {}
            message["port"] = None if self.listener is None else self.listener.port
        message["sent_at"] = time.time()
        return message

    def _links(self, told: Message) -> Message:
        """Tier 2 of this rank."""
        found = []
        if target := told["plan"].get(str(self.place.rank)):
            found.append(links.measure(self.place.host, *target).to_json())
        token = told["token"]
        return self._message("network", links=found, sees=None if token is None else Path(token).exists())

    def _import(self) -> Message:
        seconds, failure = training.import_torch()
        return self._message("import", import_s=seconds, failure=failure)

    def _train(self) -> Message:
        assert self.place.topology is not None
        deadline = threading.Timer(_TRAINING_S + 2 * _GRACE_S, os._exit, (USAGE_EXIT_STATUS,))
        deadline.daemon = True
        deadline.start()  # NCCL may hang in C
        measured = training.measure(self.place.topology, self.key)
        deadline.cancel()
        return self._message("training", **asdict(measured))

    def _message(self, tier: str, **fields: Any) -> Message:
        who = {"rank": self.place.rank, "host": self.place.host, "id": f"{socket.gethostname()}-{os.getpid()}"}
        return {"tier": tier, **who, **fields}

    def _listen(self) -> Listener | None:
        topology = self.place.topology
        is_wanted = topology is not None and topology.num_nodes != 1 and topology.local_rank == 0
        with contextlib.suppress(OSError):
            return Listener() if is_wanted else None
        return None

    def _leads(self) -> bool:
        """Whether this process leads: several may take themselves for rank 0. The first that makes a file does."""
        marker = None if self.folder is None else self.folder / "leads"
        try:
            if marker is not None:
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - marker.stat().st_mtime > _STALE_S:  # of a doctor that was killed
                        marker.unlink()
                marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def _subject(self) -> str:
        nodes = self.place.topology.nodes if self.place.topology is not None else ()
        shown = ", ".join(nodes[:8]) + (" …" if len(nodes) > 8 else "") if nodes else self.place.host
        ranks = f"{self.place.world_size} rank{'s' if self.place.world_size > 1 else ''}"
        step = "" if self.place.step == "-.-" else f" (step {self.place.step})"
        return f"{ranks} on {shown}{step}"


def _made(folder: Path) -> Path | None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return None
    return folder


def _findings(rank: int, report: Message) -> list[Finding]:
    return [Finding.from_json(value).seen_by(rank, str(report["host"])) for value in report["findings"]]


_WAYS = {
    "refused": "nothing listens there, or a firewall rejects it: iptables -L -n on both nodes",
    "filtered": "a firewall drops it: ask your site to open TCP ports between the compute nodes",
    "no route": "the node has no way there: ip route get ADDRESS",
    "no such host": "the name is unknown there: getent hosts NAME",
}


def _no_way(rank: int, report: Message, address: str) -> Finding:
    failures = report.get("failures") or {}
    kinds = list(dict.fromkeys(failures.values()))
    kind = next((one for one in kinds if one != "refused"), kinds[0] if kinds else "no answer")
    return Finding(
        check="way_to_rank_0",
        what=f"Ranks can't connect to rank 0's host, {address}: {kind}.",
        evidence=f"port {', '.join(f'{port}: {why}' for port, why in failures.items()) or 'unknown'}",
        hint=_WAYS.get(kind, "set another MASTER_PORT, or unset it"),
    ).seen_by(rank, str(report["host"]))


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
