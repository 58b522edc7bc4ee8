"""What rank 0 says of the links, collectives and steps of DDP that the ranks have measured in tiers 2 to 4."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.doctor.findings import Finding
from cluster_ddp.doctor.step.collective_tests import SIZES
from cluster_ddp.doctor.step.comparison import Reports
from cluster_ddp.doctor.step.connecting import REFUSED, UNREACHED_HINTS
from cluster_ddp.doctor.step.links import LARGE, LARGE_S, LOSSY, SLOW_BYTES_PER_S, NetworkLink

_SLOWER_THAN_OTHERS = 3.0
_STRAGGLER = 1.5
_SLOW_IMPORT_S = 60.0
_REFUSED_HINT = "a firewall rejects it: ask your site to open all TCP ports between the compute nodes (iptables -L -n)"
_LINK_HINTS = {**UNREACHED_HINTS, REFUSED: _REFUSED_HINT}  # our listener is there
# Check in which a rank broke off, in the order of the tiers -> what is wrong, and a hint.
_TRAINING_FAILED = {
    "gloo_transport": (
        "This build of torch lacks the transport that GLOO_DEVICE_TRANSPORT names; each has TCP.",
        "unset GLOO_DEVICE_TRANSPORT in the batch script and in your shell's start files",
    ),
    "rendezvous": (
        "The ranks can't form a process group.",
        "try another interface: export GLOO_SOCKET_IFNAME=… NCCL_SOCKET_IFNAME=…; NCCL says more with NCCL_DEBUG=INFO",
    ),
    "all_reduce": (
        "An all-reduce fails.",
        "NCCL says more with NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1",
    ),
    "gradients": ("A step of DDP fails.", "read the error; try the same on one node"),
}


def of_links(links: Sequence[NetworkLink]) -> list[Finding]:
    """Return what is wrong with the links between nodes."""
    found = []
    if lossy := [link for link in links if link.lost > LOSSY]:
        ways = ", ".join(f"{link} {100 * link.lost:.0f} %" for link in lossy)
        what = "The network loses packets between nodes."
        evidence = f"{ways} of the packets of small messages had to be sent again."
        hint = "tell your site: ip -s link and ethtool -S on those nodes (a cable, a port, a switch)"
        found.append(_of_some("packet_loss", lossy, links, what, evidence, hint))
    for kind in dict.fromkeys(link.failure for link in links if link.failure):
        those = [link for link in links if link.failure == kind]
        found.append(
            Finding(
                check="links",
                what=f"Nodes can't connect to others: {kind}.",
                evidence=f"{', '.join(map(str, those))}, on a port of ip_local_port_range, as gloo and NCCL use",
                hint=_LINK_HINTS.get(kind, "try it on those nodes: nc -l 0 and nc NODE PORT"),
                sick_nodes=_common_node(those, links),
            )
        )
    if large := [link for link in links if link.large_fail]:
        ways = ", ".join(map(str, large))
        what = "Small messages pass between nodes, large ones hang: typical of packets larger than a link's MTU."
        evidence = f"{ways}: 1 byte came back, {LARGE // 1024} KiB did not within {LARGE_S:g} s."
        hint = "compare the MTUs: ip link; try: ping -M do -s 1472 NODE, with jumbo frames -s 8972"
        found.append(_of_some("large_packets", large, links, what, evidence, hint))
    return [*found, *_slow(links)]


def _of_some(
    check: str, those: Sequence[NetworkLink], links: Sequence[NetworkLink], what: str, evidence: str, hint: str
) -> Finding:
    """Return a finding about some links, which blames the node that all of them have."""
    sick = _common_node(those, links)
    omit = f"; leave out the node: --exclude={sick[0]}" if sick else ""
    return Finding(check=check, what=what, evidence=evidence, hint=hint + omit, sick_nodes=sick)


def _slow(links: Sequence[NetworkLink]) -> list[Finding]:
    rates = {link: link.bytes_per_s for link in links if link.bytes_per_s is not None}
    typical = statistics.median(rates.values()) if rates else 0.0
    limit = max(SLOW_BYTES_PER_S, typical / _SLOWER_THAN_OTHERS)
    those = [link for link in rates if (link.at_most_bytes_per_s or 0.0) < limit]
    if not those:
        return []
    ways = ", ".join(f"{link} {shown_rate(rates[link])}" for link in those)
    median = f"; the median of all links is {shown_rate(typical)}" if len(rates) > len(those) else ""
    return [
        Finding(
            check="slow_link",
            what="The network between nodes is slow.",
            evidence=f"{ways}{median}.",
            hint="check which interface is taken: ip route get ADDRESS; name a faster one: export GLOO_SOCKET_IFNAME=… "
            "NCCL_SOCKET_IFNAME=…",
            is_warning=True,
            sick_nodes=_common_node(those, links) if len(rates) > len(those) else (),
        )
    ]


def _common_node(those: Sequence[NetworkLink], links: Sequence[NetworkLink]) -> tuple[str, ...]:
    """Return the node that all of those links have, if other links are sound."""
    sound = {node for link in links if link not in those for node in (link.source, link.target)}
    common = set.intersection(*({link.source, link.target} for link in those))
    at_fault = common - sound if len(common) > 1 or common & sound else common
    return tuple(at_fault) if len(at_fault) == 1 and len(links) > len(those) else ()


def not_shared(answers: Reports, run_dir: Path | None) -> list[Finding]:
    """Return which ranks do not see the file that rank 0 has made in the run directory, by the reports of tier 2."""
    return [
        Finding(
            check="not_shared",
            what="The run directory is not the same folder on all nodes.",
            evidence=f"{run_dir} lacks there the file that rank 0 has just made",
            hint="name a folder on a file system that all nodes share, not /tmp: --runs-dir PATH",
        ).seen_on(answer["host"], rank)
        for rank, answer in sorted(answers.items())
        if answer["sees"] is False
    ]


def of_imports(reports: Reports) -> list[Finding]:
    """Return on which ranks torch can't be imported, or slowly."""
    found = []
    for rank, report in reports.items():
        seconds, failure, host = report["import_s"], report["failure"], report["host"]
        if failure is not None:
            what, hint = "torch can't be imported.", "repair the environment there: python -c 'import torch'"
            one = Finding(check="torch_import", what=what, evidence=failure[:300], hint=hint, sick_nodes=(host,))
            found.append(one.seen_on(host, rank))
        elif seconds > _SLOW_IMPORT_S:
            what = "Importing torch is slow."
            hint = "let the nodes import from their own disks: cluster-ddp submit --stage-env"
            one = Finding(check="torch_import", what=what, evidence=f"{seconds:.0f} s", hint=hint, is_warning=True)
            found.append(one.seen_on(host, rank))
    return found


def of_training(reports: Reports) -> list[Finding]:
    """Return what is wrong with collectives and the step: each report has what `collective_tests.measure` yields."""
    return [*_failures(reports), *_wrong_sums(reports), *_gradients(reports), *_stragglers(reports)]


def _failures(reports: Reports) -> list[Finding]:
    """Return why ranks broke off, of those that did so first."""
    order = list(_TRAINING_FAILED)
    broken = {rank: one for rank, one in reports.items() if one["failure"] is not None}
    first = min((order.index(one["failed_in"]) for one in broken.values()), default=0)
    check, (what, hint) = order[first], _TRAINING_FAILED[order[first]]
    return [
        Finding(check=check, what=what, evidence=one["failure"], hint=hint).seen_on(one["host"], rank)
        for rank, one in broken.items()
        if one["failed_in"] == check
    ]


def _wrong_sums(reports: Reports) -> list[Finding]:
    what = "An all-reduce gives a wrong sum."
    hint = "a network card, a GPU or its driver is broken: leave nodes out one by one, --exclude=NODE; tell your site"
    return [
        Finding(check="all_reduce", what=what, evidence=", ".join(one["wrong"]), hint=hint).seen_on(one["host"], rank)
        for rank, one in reports.items()
        if one.get("wrong")
    ]


def _gradients(reports: Reports) -> list[Finding]:
    values = {rank: tuple(one["gradient"]) for rank, one in reports.items() if "gradient" in one}
    if len(set(values.values())) < 2:
        return []
    usual, are_two = statistics.mode(values.values()), len(values) == 2
    what = "Gradients differ between ranks after a step of DDP."
    hint = "a GPU or a link is broken: leave that node out, --exclude=NODE; the same torch and NCCL everywhere?"
    found = {
        rank: Finding(check="gradients", what=what, evidence=f"their sum is {value[0]:.9g}", hint=hint)
        for rank, value in values.items()
        if value != usual or are_two
    }
    return [one.seen_on(reports[rank]["host"], rank) for rank, one in found.items()]


def _stragglers(reports: Reports) -> list[Finding]:
    times = {rank: one["step_s"] for rank, one in reports.items() if "step_s" in one}
    found = []
    for rank, seconds in times.items():
        others, host = [other for number, other in times.items() if number != rank], reports[rank]["host"]
        if others and seconds > _STRAGGLER * (usual := statistics.median(others)):
            processes = "look for other processes there, and for hot GPUs (nvidia-smi -q -d PERFORMANCE)"
            one = Finding(
                check="straggler",
                what="A rank is slower than the others: all wait for it in each step.",
                evidence=f"{1e3 * seconds:.0f} ms for what takes the others {1e3 * usual:.0f} ms",
                hint=f"{processes}; else leave the node out: --exclude={host}",
                is_warning=True,
                sick_nodes=(host,),
            )
            found.append(one.seen_on(host, rank))
    return found


def shown_slowest(links: Sequence[NetworkLink]) -> str:
    """Return the slowest link in words; "" if none was measured."""
    rates = {link: link.bytes_per_s for link in links if link.bytes_per_s}
    if not rates:
        return ""
    slowest = min(rates, key=rates.__getitem__)
    latency = "" if slowest.latency_s is None else f", {1e3 * slowest.latency_s:.2g} ms there and back"
    return f"slowest link {slowest}: {shown_rate(rates[slowest])}{latency}"


def shown_all_reduces(reports: Reports) -> str:
    """Return the times of the all-reduces in words, of the slowest rank, and the bandwidth of the largest.

    It is what each rank sends, 2 (n - 1) / n of the size: "busbw" of nccl-tests.
    """
    parts, bandwidth, ranks = [], "", len(reports)
    for size in SIZES:
        if times := [one["all_reduce_s"][str(size)] for one in reports.values() if "all_reduce_s" in one]:
            text = f"{size // 1024**2} MiB" if size >= 1024**2 else f"{size // 1024} KiB"
            parts.append(f"{text} {1e3 * max(times):.2g} ms")
            if ranks > 1:
                bandwidth = f" (busbw {shown_rate(2 * (ranks - 1) / ranks * size / max(times))})"
    return f"all-reduce {', '.join(parts)}{bandwidth}" if parts else ""


def shown_rate(bytes_per_s: float) -> str:
    """Return a bandwidth in words."""
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"
