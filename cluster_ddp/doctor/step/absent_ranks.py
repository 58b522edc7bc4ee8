"""Which ranks are missing, doubled or cut off from rank 0, and what those that are here have found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.doctor.checks import all_checks
from cluster_ddp.doctor.findings import Finding, shown_ranks
from cluster_ddp.doctor.step.tcp_connect import FILTERED, NO_ANSWER, NO_NAME, NO_PORT, NO_ROUTE, REFUSED
from cluster_ddp.runtime.failure import suspects
from cluster_ddp.runtime.rendezvous.arrived_ranks import missing_by_node
from cluster_ddp.slurm import variables
from cluster_ddp.slurm.topology import Topology

Reports = Mapping[int, Mapping[str, Any]]
"""Rank -> its report of a tier."""

_OF_NODES = {one.name for one in all_checks.ALL if one.on == "node"}
_UNREACHED_HINTS = {
    FILTERED: "a firewall drops it: ask your site to open TCP ports between the compute nodes",
    NO_ROUTE: "the node has no way there: ip route get ADDRESS",
    NO_PORT: "that node has no port left: ss -tanp",
    NO_NAME: "the name is unknown there: getent hosts NAME",
}
UNREACHED = frozenset(_UNREACHED_HINTS)
"""How a connection fails where a host can't be reached, whether or not a process listens there."""
_HINTS = {**_UNREACHED_HINTS, REFUSED: "nothing listens there, or a firewall rejects it: iptables -L -n on both nodes"}


def findings(reports: Reports) -> list[Finding]:
    """Return what the ranks have found in tier 1, each for itself or for its node."""
    found = []
    for rank, report in sorted(reports.items()):
        for one in map(Finding.from_json, report["findings"]):
            of_node = one.check in _OF_NODES
            found.append(one.seen_on(report["host"]) if of_node else one.seen_by(rank, report["host"]))
    return found


def ended(rank: int, host: str, tier: str, *, accuses: bool) -> Finding:
    """Return that a rank was here and does not answer any more; `accuses`: its node may be at fault, not the way."""
    return Finding(
        check="missing_ranks",
        what=f"Ranks ended or hung in the tier {tier!r}.",
        evidence=NO_ANSWER,
        hint=f"read that task's output{f'; leave the node out: --exclude={host}' if accuses else ''}",
        sick_nodes=(host,) if accuses else (),
    ).seen_by(rank, host)


def no_way(rank: int, report: Mapping[str, Any], address: str) -> Finding:
    """Return that a rank can't connect to rank 0, and how it failed."""
    failures = report.get("failures") or {}
    kinds = [*failures.values(), NO_ANSWER]
    kind = next((one for one in failures.values() if one != REFUSED), kinds[0])
    return Finding(
        check="way_to_rank_0",
        what=f"Ranks can't connect to rank 0's host, {address}: {kind}.",
        evidence=f"port {', '.join(f'{port}: {why}' for port, why in failures.items()) or 'unknown'}",
        hint=_HINTS.get(kind, "set another MASTER_PORT, or unset it"),
    ).seen_by(rank, report["host"])


def missing(
    topology: Topology | None, world_size: int, reports: Reports, waited_s: float, env: Mapping[str, str]
) -> list[Finding]:
    """Return which ranks have not reported."""
    absent = [rank for rank in range(world_size) if rank not in reports]
    if not absent:
        return []
    hosts = {rank: str(report["host"]) for rank, report in reports.items()}
    by_node = [] if topology is None else missing_by_node(topology, hosts)
    silent = [] if topology is None else [node for node in topology.nodes if node not in hosts.values()]
    nodes = silent if suspects.may_accuse(hosts, world_size, env) else []
    who = f"rank {', '.join(by_node)}" if by_node else shown_ranks(absent)
    what = f"{len(absent)} of {world_size} ranks did not report within {waited_s:g} s: {who}."
    hint = "look there for what hangs or is missing (python, module, conda, a file system)"
    if by_node and not silent:
        hint = "other ranks of that node reported: look at this one there (ps, py-spy)"
    hint += "; for a slow start: --wait-s 120" + (f"; leave out: --exclude={','.join(nodes)}" if nodes else "")
    tasks = env.get(variables.WORLD_SIZE[0], "")
    if topology is not None and topology.launcher == "manual" and tasks.isdecimal() and int(tasks) < world_size:
        what = f"WORLD_SIZE={world_size}, but this step has {tasks} tasks: they would wait for ranks that do not exist."
        hint = f"unset WORLD_SIZE; or start as many tasks: srun --ntasks={world_size}"
    evidence = f"{shown_ranks(reports)} reported, from {', '.join(dict.fromkeys(hosts.values()))}"
    return [Finding(check="missing_ranks", what=what, evidence=evidence, hint=hint, sick_nodes=tuple(nodes))]


def same_rank(twice: Mapping[int, Sequence[str]]) -> list[Finding]:
    """Return which ranks several processes claim to be."""
    hint = "set RANK in each task, not in the batch script: srun bash -c 'RANK=$SLURM_PROCID python …'; or leave "
    hint += "it to Slurm's variables"
    return [
        Finding(
            check="same_rank",
            what=f"Several tasks have rank {rank}.",
            evidence=f"they run on {' and '.join(sorted(hosts))}",
            hint=hint,
        )
        for rank, hosts in twice.items()
    ]


def not_shared(answers: Reports, run_dir: Path | None) -> list[Finding]:
    """Return which ranks do not see the file that rank 0 has made in the run directory, by the reports of tier 2."""
    return [
        Finding(
            check="not_shared",
            what="The run directory is not the same folder on all nodes.",
            evidence=f"{run_dir} lacks there the file that rank 0 has just made",
            hint="name a folder on a file system that all nodes share, not /tmp: --runs-dir PATH",
        ).seen_by(rank, answer["host"])
        for rank, answer in sorted(answers.items())
        if answer["sees"] is False
    ]
