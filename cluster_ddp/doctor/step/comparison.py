"""What the reports of tier 1 show together: missing and doubled ranks, and what differs between ranks and must not."""

from __future__ import annotations

import errno
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cluster_ddp.doctor.findings import Finding, shown_ranks
from cluster_ddp.doctor.step.connecting import NO_ANSWER
from cluster_ddp.runtime.failure import sick_nodes
from cluster_ddp.runtime.rendezvous.arrived_ranks import missing_by_node
from cluster_ddp.slurm import variables
from cluster_ddp.slurm.topology import Topology

_CLOCK_S = 10.0

Reports = Mapping[int, Mapping[str, Any]]
"""Rank -> its report of a tier."""


def findings(reports: Reports) -> list[Finding]:
    """Return what the ranks have found in tier 1, each for itself or for its node."""
    return [Finding.from_json(one) for _, report in sorted(reports.items()) for one in report["findings"]]


def ended(rank: int, host: str, tier: str, *, accuses: bool) -> Finding:
    """Return that a rank was here and does not answer any more; `accuses`: its node may be at fault, not the way."""
    return Finding(
        check="missing_ranks",
        what=f"Ranks ended or hung in the tier {tier!r}.",
        evidence=NO_ANSWER,
        hint=f"read that task's output{f'; leave the node out: --exclude={host}' if accuses else ''}",
        sick_nodes=(host,) if accuses else (),
    ).seen_on(host, rank)


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
    nodes = silent if sick_nodes.may_accuse(hosts, world_size, env) else []
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


def differences(topology: Topology, reports: Reports) -> list[Finding]:
    """Return what differs between ranks and must not."""
    # Where all have reached rank 0 nevertheless, a training will, too: two names of one host.
    are_apart = any(report.get("by") == "file" for report in reports.values())
    return [
        *_unequal(reports, "master_variables", error=are_apart),
        *_same_address(reports),
        *_other_master(topology, reports),
        *_unequal(reports, "versions", error=True),
        *_data(reports),
        *_unequal(reports, "variables", error=False),
        *_same_gpu(reports),
        *_one_cpu(reports),
        *_clock(reports),
    ]


def _known(reports: Reports, name: str) -> dict[int, Any]:
    """Return rank -> what is in its fingerprint under a name, of those that have it."""
    values = {rank: report["fingerprint"].get(name) for rank, report in reports.items()}
    return {rank: value for rank, value in values.items() if value is not None}


def _same_address(reports: Reports) -> list[Finding]:
    """Return which nodes have an address that another one is reached by."""
    nodes = {reports[rank]["host"]: reports[rank]["fingerprint"] for rank in _known(reports, "address")}
    found = []
    for address in dict.fromkeys(one["address"] for one in nodes.values()):
        owners = {host: one["stack"] for host, one in nodes.items() if address in one["addresses"]}
        if len(set(owners.values())) > 1:
            what, hint = "Two nodes have the same address.", "tell your site: ip address, on each of them"
            one = Finding(check="same_address", what=what, evidence=address, hint=hint)
            found += [one.seen_on(host) for host in owners]
    return found


def _other_master(topology: Topology, reports: Reports) -> list[Finding]:
    """Return which nodes look for rank 0 elsewhere. Those that have reached it do not."""
    name = topology.master_addr
    return [
        Finding(
            check="other_master",
            what=f"The name of rank 0's host, {name}, resolves to another machine.",
            evidence=f"{name} is {theirs[0]} there, which is no address of rank 0's host, {reports[0]['host']}",
            hint=f"correct DNS or /etc/hosts there: getent hosts {name}; unset MASTER_ADDR if it is set",
        ).seen_on(reports[rank]["host"])
        for rank, theirs in _known(reports, "master").items()
        if theirs and reports[rank].get("by") != "tcp" and not _is_own(theirs[0])
    ]


def _is_own(address: str) -> bool:
    """Return whether this host has an address. A port can be bound to its own ones only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _unequal(reports: Reports, check: str, *, error: bool) -> list[Finding]:
    """Return which versions or variables of the fingerprints differ between the ranks that have them."""
    known, found = _known(reports, check), []
    for name in sorted({name for one in known.values() for name in one}):
        values = {rank: one.get(name, "unset") for rank, one in known.items()}
        if len(set(values.values())) < 2:
            continue
        if is_version := check == "versions":
            what = f"Nodes run different versions of {name}."
            hint = "give all nodes the same code: one shared folder, or cluster-ddp submit --snapshot"
            if name in ("Python", "torch", "NCCL"):
                shared = "use one environment on a shared file system"
                hint = f"{shared}, or cluster-ddp submit --stage-env; no modules that differ by node"
        else:
            what = f"{name} is not the same on all ranks."
            hint = f"set {name} once in the batch script, before srun; remove it from ~/.bashrc on those nodes"
        for rank, value in values.items():
            evidence, ranks = (f"{name} {value}", ()) if is_version else (f"{name}={value}", (rank,))
            one = Finding(check=check, what=what, evidence=evidence, hint=hint, is_warning=not error)
            found.append(one.seen_on(reports[rank]["host"], *ranks))
    return found


def _data(reports: Reports) -> list[Finding]:
    values = _known(reports, "data")
    if len(set(values.values())) < 2:
        return []
    usual = Counter(values.values()).most_common(1)[0][0]
    return [
        Finding(
            check="data",
            what="The data is not the same on all nodes.",
            evidence=value,
            hint="copy it again to those nodes; or keep it on a file system that all nodes share",
            sick_nodes=() if value == usual else (reports[rank]["host"],),
        ).seen_on(reports[rank]["host"])
        for rank, value in values.items()
    ]


def _same_gpu(reports: Reports) -> list[Finding]:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, gpus in _known(reports, "gpus").items():
        for gpu in gpus:
            users.setdefault((reports[rank]["host"], gpu), []).append(rank)
    hint = "give each task one: --ntasks-per-node equal to --gres=gpu:N; torch.cuda.set_device(local_rank); and "
    hint += "no CUDA_VISIBLE_DEVICES of your own"
    return [
        Finding(
            check="same_gpu",
            what="Two ranks use the same GPU.",
            evidence=f"{shown_ranks(ranks)} on {host}: {gpu}",
            hint=hint,
        )
        for (host, gpu), ranks in users.items()
        if len(ranks) > 1
    ]


def _one_cpu(reports: Reports) -> list[Finding]:
    ranks_of: dict[str, list[int]] = {}
    for rank, report in reports.items():
        ranks_of.setdefault(report["host"], []).append(rank)
    found = []
    for host, ranks in ranks_of.items():
        cpus = {cpu for rank in ranks for cpu in reports[rank]["fingerprint"].get("cpus", ())}
        if cpus and len(cpus) < min(len(ranks), os.cpu_count() or 1):
            what = "The ranks of a node share fewer CPUs than they are."
            evidence = f"{shown_ranks(ranks)} on {host}: CPU {', '.join(map(str, sorted(cpus)))}"
            hint = "ask for CPUs: --cpus-per-task; and say it to srun, too: srun --cpus-per-task=…"
            found.append(Finding(check="one_cpu", what=what, evidence=evidence, hint=hint, is_warning=True))
    return found


def _clock(reports: Reports) -> list[Finding]:
    by_tcp = [report for report in reports.values() if report.get("by") == "tcp"]
    return [
        Finding(
            check="clock",
            what="The clock of a node is wrong, or that of rank 0's.",
            evidence=f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} rank 0's",
            hint="tell your site (chronyc tracking); Slurm's own messages fail from 5 minutes on (munge)",
            is_warning=True,
            sick_nodes=(report["host"],),
        ).seen_on(report["host"])
        for report in by_tcp
        if abs(ahead_s := report["sent_at"] - report["received_at"]) > _CLOCK_S
    ]
