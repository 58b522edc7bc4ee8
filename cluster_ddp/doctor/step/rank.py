"""What each rank does for the doctor, whether it leads or follows."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.agent import notes
from cluster_ddp.agent.channel.lines import Message
from cluster_ddp.agent.secret import Key
from cluster_ddp.doctor import isolated
from cluster_ddp.doctor.checks import Site, all_checks, limits
from cluster_ddp.doctor.finding import Finding
from cluster_ddp.doctor.step import links, training
from cluster_ddp.doctor.step.exchange import NO_PORT, REFUSED
from cluster_ddp.doctor.step.facts import facts
from cluster_ddp.doctor.step.links import Listener
from cluster_ddp.doctor.step.place import Place
from cluster_ddp.doctor.verdict import Verdict
from cluster_ddp.runtime.failure import sick_nodes
from cluster_ddp.runtime.rendezvous.port_discovery import run_key

SETTLE_S = 4.0
"""Seconds that rank 0 listens until a rank that can't connect has surely failed."""
REPORT_S = 5.0
"""Seconds that a report may take, besides the limit of the checks."""
LINKS_S = 25.0
"""Seconds for tier 2."""
IMPORT_S = 600.0
"""Seconds to import torch."""
TRAINING_S = training.MEETING_S + 60.0
"""Seconds for tiers 3 and 4."""
GRACE_S = 10.0
"""Seconds that a message of rank 0 may come later."""


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
    """Seconds that a group of checks may take, before it is killed."""
    data_dir: Path | None = None
    """Folder of the data."""
    run_dir: Path | None = None
    """The run directory, or where it will be."""


class Rank:
    """One rank's doctor.

    Args:
        options: what is asked.
        env: this process's environment.
        place: this rank.
        folder: for what can't be sent; None if there is none.
    """

    def __init__(self, options: Options, env: Mapping[str, str], place: Place, folder: Path | None) -> None:
        self.options, self.env, self.place, self.folder = options, env, place, folder
        self.key = run_key(place.topology, env) if place.topology is not None else Key(b"", place.step)
        self.report: Message = {}
        """The report of tier 1."""
        self.verdict = Verdict(subject=self._subject(), num_nodes=self._num_nodes())
        self._listener = self._listen()

    def run(self) -> int:
        """Do this rank's part. Returns the exit status."""
        raise NotImplementedError

    def close(self) -> None:
        """Close connections."""
        if self._listener is not None:
            self._listener.close()

    def examined(self) -> Message:
        """Return the report of tier 1: this node alone."""
        self.report = message = self.message("nodes", findings=[], facts={}, port=None)
        limit_s = self.options.check_limit_s
        running = isolated.start(self._checks())
        self.greet()  # threads begin after the forks
        answers = running.answers(limit_s)
        if self.place.error is not None:
            message["findings"] = [Finding.of_cause("topology", self.place.error).to_json()]
        elif self.place.topology is not None:
            compared = answers.pop("facts", isolated.Answer([]))
            found = all_checks.findings(answers, self.place.host, limit_s)
            found += all_checks.broken_off("facts", compared, self.place.host, limit_s)
            message["findings"] = [one.to_json() for one in found]
            message["facts"] = dict(compared.items)
            message["port"] = None if self._listener is None else self._listener.port
        return message

    def greet(self) -> None:
        """Say that this rank is here, before it is examined."""

    def _checks(self) -> dict[str, isolated.Task]:
        if self.place.topology is None:
            return {}
        site = Site(
            env=self.env,
            topology=self.place.topology,
            host=self.place.host,
            run_dir=self.options.run_dir,
            data_dir=self.options.data_dir,
        )
        tasks = all_checks.tasks(site, for_node=self.place.is_first_on_node)
        return tasks if limits.are_too_low_for_checks() else {**tasks, "facts": lambda: facts(site)}

    def linked(self, told: Message) -> Message:
        """Return the report of tier 2: the link that rank 0 asks for, and whether its token is seen."""
        found = []
        if target := told["plan"].get(str(self.place.rank)):
            found.append(links.measure(self.place.host, *target).to_json())
        token = told["token"]
        return self.message("network", links=found, sees=None if token is None else Path(token).exists())

    def imported(self) -> Message:
        """Return how the import of torch went."""
        seconds, failure = training.import_torch()
        return self.message("import", import_s=seconds, failure=failure)

    def trained(self) -> Message:
        """Return the report of tiers 3 and 4. A child measures: it may hang in NCCL, or be aborted by its watchdog."""
        topology = self.place.topology
        assert topology is not None
        answer = isolated.run({"training": lambda: training.measure(topology, self.key)}, TRAINING_S)["training"]
        if answer.items:
            return self.message("training", **answer.items[0])
        failure = answer.failure or f"it did not come back within {TRAINING_S:g} s"
        return self.message(
            "training", **asdict(training.Measured(failure=failure, failed_in=answer.doing or "rendezvous"))
        )

    def speak(self, tell: Callable[[int], None]) -> int:
        """Print the verdict, tell the others the exit status, then write the nodes at fault. Returns the status.

        Args:
            tell: tells it. After that, srun may end this task.
        """
        status = self.verdict.status(strict=self.options.strict)
        if self.verdict.broken_tier:
            first = self.verdict.findings[0]
            notes.failed(self.env, self.place.rank, f"{first.what} {first.evidence}")
            for node, why in self.verdict.nodes_at_fault().items():
                sick_nodes.note(self.env, node, f"{why} (cluster-ddp doctor)")
        self.verdict.show(as_json=self.options.as_json)
        tell(status)
        self.verdict.write_nodes(self.options.exclude_file)
        return status

    def message(self, tier: str, **fields: Any) -> Message:
        """Return a message about a tier, with who sends it."""
        who = {"rank": self.place.rank, "host": self.place.host, "id": f"{socket.gethostname()}-{os.getpid()}"}
        return {"kind": tier, **who, **fields}

    def _listen(self) -> Listener | None:
        topology = self.place.topology
        is_wanted = topology is not None and topology.num_nodes != 1 and topology.local_rank == 0
        with contextlib.suppress(OSError):
            return Listener() if is_wanted else None
        return None

    def _num_nodes(self) -> int:
        return (self.place.topology.num_nodes or 1) if self.place.topology is not None else 0

    def _subject(self) -> str:
        nodes = self.place.topology.nodes if self.place.topology is not None else ()
        shown = ", ".join(nodes[:8]) + (" …" if len(nodes) > 8 else "") if nodes else self.place.host
        ranks = f"{self.place.world_size} rank{'s' if self.place.world_size > 1 else ''}"
        step = "" if self.place.step == "-.-" else f" (step {self.place.step})"
        return f"{ranks} on {shown}{step}"


def findings(rank: int, report: Message) -> list[Finding]:
    """Return what a rank has found in tier 1: for itself, or for its node."""
    host = str(report["host"])
    found = [Finding.from_json(value) for value in report["findings"]]
    return [one.seen_on(host) if one.check in _OF_NODES else one.seen_by(rank, host) for one in found]


def ended(rank: int, host: str, tier: str, *, accuses: bool) -> Finding:
    """Return that a rank was here and does not answer any more.

    Args:
        rank: the rank.
        host: its node.
        tier: in which tier.
        accuses: whether its node may be at fault, and not the way to it.
    """
    return Finding(
        check="missing_ranks",
        what=f"Ranks ended or hung in the tier {tier!r}.",
        evidence="no answer",
        hint=f"read that task's output{f'; leave the node out: --exclude={host}' if accuses else ''}",
        sick_nodes=(host,) if accuses else (),
    ).seen_by(rank, host)


_OF_NODES = {one.name for one in all_checks.ALL if one.on == "node"}


_WAYS = {
    REFUSED: "nothing listens there, or a firewall rejects it: iptables -L -n on both nodes",
    "filtered": "a firewall drops it: ask your site to open TCP ports between the compute nodes",
    "no route": "the node has no way there: ip route get ADDRESS",
    NO_PORT: "that node has no port left: ss -tanp",
    "no such host": "the name is unknown there: getent hosts NAME",
}

UNREACHED = _WAYS.keys() - {REFUSED}
"""How a connection fails where a host can't be reached, whether or not a process listens there."""


def no_way(rank: int, report: Message, address: str) -> Finding:
    """Return that a rank can't connect to rank 0, and how it failed."""
    failures = report.get("failures") or {}
    kinds = list(dict.fromkeys(failures.values()))
    kind = next((one for one in kinds if one != REFUSED), kinds[0] if kinds else "no answer")
    return Finding(
        check="way_to_rank_0",
        what=f"Ranks can't connect to rank 0's host, {address}: {kind}.",
        evidence=f"port {', '.join(f'{port}: {why}' for port, why in failures.items()) or 'unknown'}",
        hint=_WAYS.get(kind, "set another MASTER_PORT, or unset it"),
    ).seen_by(rank, str(report["host"]))
