"""One rank of the doctor: which one it is, and what it does, whether it leads or follows."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.agent import rank_notes
from cluster_ddp.agent.channel import Key, Message
from cluster_ddp.agent.rank_notes import FailureNote
from cluster_ddp.doctor.checks import all_checks
from cluster_ddp.doctor.checks.check_types import Site
from cluster_ddp.doctor.findings import Finding, Verdict
from cluster_ddp.doctor.step import collective_tests, links
from cluster_ddp.doctor.step.fingerprint import fingerprint
from cluster_ddp.doctor.step.report_folder import ReportFolder
from cluster_ddp.errors import ClusterDDPError, SpecError
from cluster_ddp.run.names import Env
from cluster_ddp.runtime.failure import sick_nodes
from cluster_ddp.runtime.rendezvous.port_discovery import run_key
from cluster_ddp.slurm import variables
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import Variables

TIER_S = {"network": 25.0, "import": 600.0, "training": collective_tests.MEETING_S + 60.0}
"""Tier that rank 0 asks for -> seconds that a rank may take for it."""
REPORT_S = 5.0
"""How long a report of tier 1 may take, besides the limit of the checks."""
SETTLE_S = 4.0
"""How long rank 0 listens until a rank that can't connect has surely failed, unless packets get lost."""
SETTLE_LOSSY_S = 120.0
"""How long after tier 1 it waits for that where packets get lost. Each of the eight ports may take 3 s in a try from
before rank 0 listened, and the next try may take 11 s; on busy cores, longer. Until then, all that a rank knows is that
rank 0's host has refused: nothing listened yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """What is asked of the doctor: an option of its command line for each field.

    Raises:
        SpecError: a number of seconds is not above 0.
    """

    quick: bool = False
    """Leave out what needs torch: collectives and a step of DDP."""
    strict: bool = False
    """Exit with status 1 if there are warnings."""
    json: bool = False
    """Print one line of JSON."""
    exclude_file: Path | None = None
    """Write the nodes at fault to a file, for sbatch --exclude=./FILE."""
    wait_s: float = 20.0
    """Seconds to wait for ranks that have not started."""
    check_limit_s: float = 20.0
    """Seconds that a group of checks may take."""
    data_dir: Path | None = None
    """Folder of the data, to be looked for on each node."""
    run_dir: Path | None = None
    """Folder of the results, to be written on each node."""

    def __post_init__(self) -> None:
        for option, value in (("--wait-s", self.wait_s), ("--check-limit-s", self.check_limit_s)):
            if not 0 < value < 1e6:
                found = "it is a number of seconds above 0."
                raise SpecError(f"Examining with {option} {value:g}:", found, f"{option} 20")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIdentity:
    """A rank, its host and its step, as far as the environment says it: it speaks also where a training can't start."""

    rank: int
    """The rank; 0 if nothing says it."""
    world_size: int
    """Number of ranks; 1 if nothing says it."""
    host: str
    """Name of this host."""
    step: str
    """Job and step, such as "12.0", and the starts before; equal on all ranks of a step, different for two steps."""
    topology: Topology | None = None
    """All of it; None if the environment contradicts itself."""
    error: ClusterDDPError | None = None
    """Why there is no topology."""

    @staticmethod
    def of(env: Mapping[str, str]) -> RankIdentity:
        """Return the identity that an environment describes, such as os.environ."""
        v = Variables(env)
        host = variables.node_name(env)
        step = f"{v.text(*variables.JOB_ID) or '-'}.{v.text(*variables.STEP_ID) or '-'}"
        if restarts := v.text(*variables.RESTART_COUNT):  # a job that starts again has the same numbers
            step += f".{restarts}"
        try:
            topology = Topology.from_environ(env)
        except ClusterDDPError as error:
            rank = size = None
            if v.step_id() is not None:  # else in the batch shell, where nobody else comes
                rank = _known(lambda: v.integer(*variables.RANK))
                size = _known(lambda: v.integer(*variables.WORLD_SIZE)) or _known(lambda: sum(v.tasks_per_node()))
            return RankIdentity(rank=rank or 0, world_size=size or 1, host=host, step=step, error=error)
        return RankIdentity(rank=topology.rank, world_size=topology.world_size, host=host, step=step, topology=topology)

    def report_folder(self, env: Mapping[str, str]) -> ReportFolder:
        """Return the folder of the reports: in the run directory, or else in the working folder; none for one rank."""
        if self.world_size == 1 and self.error is None:
            return ReportFolder(None)
        parent = Path(env.get(Env.RUN_DIR) or Path.cwd())
        return ReportFolder(parent / f".doctor-{re.sub(r'[^0-9A-Za-z.]', '_', self.step)}")


def _known(read: Callable[[], int | None]) -> int | None:
    with contextlib.suppress(ClusterDDPError):
        return read()
    return None


class Rank:
    """One rank's doctor, which begins to check its node; its folder is for what can't be sent."""

    def __init__(
        self, options: DoctorOptions, env: Mapping[str, str], identity: RankIdentity, folder: ReportFolder
    ) -> None:
        self.options, self.env, self.identity, self.folder = options, env, identity, folder
        topology = identity.topology
        self.key = run_key(topology, env) if topology is not None else Key(b"", identity.step)
        self.report: Message = {}
        """The report of tier 1."""
        num_nodes = (topology.num_nodes or 1) if topology is not None else 0
        self.verdict = Verdict(subject=_subject(identity), num_nodes=num_nodes)
        self._running = all_checks.Running(self._checks())  # threads begin after the forks
        self._listener: links.Listener | None = None
        if topology is not None and topology.num_nodes != 1 and topology.local_rank == 0:
            with contextlib.suppress(OSError):
                self._listener = links.Listener()

    def close(self) -> None:
        """Close connections."""
        if self._listener is not None:
            self._listener.close()

    def examined(self) -> Message:
        """Return the report of tier 1: this node alone."""
        identity, limit_s = self.identity, self.options.check_limit_s
        results = self._running.results(limit_s)
        own = [] if identity.error is None else [Finding.of_error("topology", identity.error)]
        for group, result in results.items():
            own += all_checks.broken_off(group, result, identity.host, limit_s)
        facts = dict(results.pop("facts", all_checks.CheckResult([])).items)
        found = [one.seen_on(identity.host, identity.rank) for one in own]
        found += [Finding.from_json(value) for result in results.values() for value in result.items]
        self.report = self.message(
            "nodes",
            findings=[asdict(one) for one in all_checks.in_order(found)],
            fingerprint=facts,
            port=None if self._listener is None else self._listener.port,
        )
        return self.report

    def _checks(self) -> dict[str, all_checks.CheckTask]:
        topology, options = self.identity.topology, self.options
        if topology is None:
            return {}
        site = Site(
            env=self.env,
            topology=topology,
            host=self.identity.host,
            run_dir=options.run_dir,
            data_dir=options.data_dir,
        )
        return all_checks.tasks(site, for_node=topology.local_rank == 0, facts=lambda: fingerprint(site))

    def answer(self, told: Message) -> Message:
        """Do what rank 0 asks for in a later tier. Returns the report."""
        tier = str(told["kind"])
        work = {"network": self._measure_link, "import": self._import_torch, "training": self._train}[tier]
        return self.message(tier, **work(told))

    def _measure_link(self, told: Message) -> dict[str, Any]:
        """Measure the link that rank 0 asks for, and look whether its new file is seen here."""
        target, token = told["plan"].get(str(self.identity.rank)), told["token"]
        found = [asdict(links.measure(self.identity.host, *target))] if target else []
        return {"links": found, "sees": None if token is None else Path(token).exists()}

    def _import_torch(self, told: Message) -> dict[str, Any]:
        seconds, failure = collective_tests.import_torch()
        return {"import_s": seconds, "failure": failure}

    def _train(self, told: Message) -> dict[str, Any]:
        """Measure in a child: it may hang in NCCL, or be aborted by its watchdog."""
        topology, limit_s = self.identity.topology, TIER_S["training"]
        assert topology is not None
        running = all_checks.Running({"training": lambda: collective_tests.measure(topology, self.key)})
        result = running.results(limit_s)["training"]
        late = f"it did not come back within {limit_s:g} s" if result.is_late else None
        failure = late if result.failure is None else " ".join(result.failure.split())[:300]
        measured = {name: value for item in result.items for name, value in item.items()}
        return {"failure": failure, "failed_in": result.doing or "rendezvous", **measured}

    def speak(self, tell: Callable[[int], None]) -> int:
        """Print the verdict, tell the others the exit status, then write the nodes at fault. Returns the status.

        After `tell`, srun may end this task.
        """
        status = self.verdict.status(strict=self.options.strict)
        if self.verdict.broken_tier:
            first = self.verdict.findings[0]
            rank_notes.failed(self.env, self.identity.rank, FailureNote(f"{first.what} {first.evidence}"))
            for node, why in self.verdict.nodes_at_fault().items():
                sick_nodes.note(self.env, node, f"{why} (cluster-ddp doctor)")
        self.verdict.show(as_json=self.options.json)
        tell(status)
        self.verdict.write_nodes(self.options.exclude_file)
        return status

    def message(self, tier: str, **fields: Any) -> Message:
        """Return a message about a tier, with who sends it."""
        process = f"{socket.gethostname()}-{os.getpid()}"
        return {"kind": tier, "rank": self.identity.rank, "host": self.identity.host, "id": process, **fields}


def _subject(identity: RankIdentity) -> str:
    nodes = identity.topology.nodes if identity.topology is not None else ()
    shown = ", ".join(nodes[:8]) + (" …" if len(nodes) > 8 else "") if nodes else identity.host
    ranks = f"{identity.world_size} rank{'s' if identity.world_size > 1 else ''}"
    step = "" if identity.step == "-.-" else f" (step {identity.step})"
    return f"{ranks} on {shown}{step}"
