"""Whether the network interfaces that variables name are there, and fit."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster_ddp.doctor.checks import Site, check
from cluster_ddp.doctor.finding import Finding
from cluster_ddp.runtime.rendezvous.network_interface import choose_interface

_NET = Path("/sys/class/net")


def interfaces() -> list[str]:
    """Return the names of this host's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _is_up(name: str) -> bool:
    try:
        return int((_NET / name / "flags").read_text(), 16) & 1 == 1
    except (OSError, ValueError):
        return True  # unknown


@check(detects="GLOO_SOCKET_IFNAME: an interface that is not there or down, `lo` with several nodes, or a `^`")
def gloo_interface(site: Site) -> Iterator[Finding]:
    """Read GLOO_SOCKET_IFNAME as torch does: names, separated by commas (ProcessGroupGloo.cpp, split)."""
    value = site.env.get("GLOO_SOCKET_IFNAME", "")
    here = interfaces()
    evidence = f"GLOO_SOCKET_IFNAME={value}; interfaces here: {', '.join(here)}"
    usable = [name for name in here if name != "lo" and _is_up(name)]
    hint = f"unset GLOO_SOCKET_IFNAME, or export GLOO_SOCKET_IFNAME={usable[0] if usable else 'NAME'}"
    for name in filter(None, value.split(",")):
        if name.startswith(("^", "=")):
            what = f"gloo does not know {name[0]!r} in GLOO_SOCKET_IFNAME; only NCCL does."
        elif name not in here:
            what = f"GLOO_SOCKET_IFNAME names an interface that is not there: {name}."
        elif name == "lo" and site.has_several_nodes:
            what = "GLOO_SOCKET_IFNAME=lo: no other node reaches the loopback interface."
        elif not _is_up(name):
            what = f"GLOO_SOCKET_IFNAME names an interface that is down: {name}."
        else:
            continue
        yield Finding(check="gloo_interface", what=what, evidence=evidence, hint=hint)


@check(detects="NCCL_SOCKET_IFNAME: no interface fits it")
def nccl_interface(site: Site) -> Iterator[Finding]:
    """Read NCCL_SOCKET_IFNAME as NCCL documents it: prefixes; `=` for whole names, `^` for all others."""
    value = site.env.get("NCCL_SOCKET_IFNAME", "")
    if not value:
        return
    here = interfaces()
    fits = _fitting(value, here)
    if fits and not (site.has_several_nodes and fits == ["lo"]):
        return
    usable = [name for name in here if name != "lo"]
    yield Finding(
        check="nccl_interface",
        what=f"NCCL_SOCKET_IFNAME={value} fits no interface that other nodes reach.",
        evidence=f"interfaces here: {', '.join(here)}",
        hint=f"unset NCCL_SOCKET_IFNAME, or export NCCL_SOCKET_IFNAME={usable[0] if usable else 'NAME'}",
    )


def _fitting(value: str, here: Sequence[str]) -> list[str]:
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    is_exact, names = rest.startswith("="), rest.removeprefix("=").split(",")
    return [
        name
        for name in here
        if any(name == one if is_exact else name.startswith(one) for one in names if one) != excludes
    ]


def taken(site: Site) -> dict[str, str]:
    """Return the interfaces that gloo and NCCL will take; "" if unknown.

    gloo: what a variable names, else the one that `cluster_ddp.distributed` chooses. NCCL, without a variable: those
    whose names begin with "ib", else the first that is neither docker's nor loopback (NCCL 2.27, ncclFindInterfaces).
    """
    env = {**site.env}
    choose_interface(site.topology, env)
    up = [name for name in interfaces() if _is_up(name)]
    if value := site.env.get("NCCL_SOCKET_IFNAME"):
        nccl = _fitting(value, up)
    else:
        others = [name for name in up if not name.startswith(("docker", "lo"))]
        nccl = [name for name in up if name.startswith("ib")] or others[:1]
    return {"gloo": env.get("GLOO_SOCKET_IFNAME", ""), "NCCL": ",".join(nccl)}


@check(detects="a node without any network interface that is up")
def no_network(site: Site) -> Iterator[Finding]:
    """Look for an interface besides loopback."""
    if site.has_several_nodes and not any(name != "lo" and _is_up(name) for name in interfaces()):
        yield Finding(
            check="no_network",
            what="A node has no network interface that is up, besides loopback.",
            evidence=f"interfaces: {', '.join(interfaces())}",
            hint=f"leave the node out: --exclude={site.host}; tell your site; in a container, use the host's network",
            sick_nodes=(site.host,),
        )
