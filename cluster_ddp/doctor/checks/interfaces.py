"""Whether the network interfaces that variables name are there, and fit."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence

from cluster_ddp.doctor.checks import Site, check
from cluster_ddp.doctor.finding import Finding
from cluster_ddp.runtime.rendezvous.host_network import choose_interface, is_up

_LOOPBACK_S = 2.0
# gloo's transports (GlooDeviceFactory.cpp, torch 2.14); LINUX is another name for TCP. Few builds have the second ones.
_TRANSPORTS, _RARE_TRANSPORTS = ("TCP", "LINUX"), ("TCP_TLS", "UV", "IBVERBS")


def interfaces() -> list[str]:
    """Return the names of this host's interfaces."""
    return [name for _, name in socket.if_nameindex()]


@check(detects="GLOO_SOCKET_IFNAME: an interface that is not there or down, `lo` with several nodes, or a `^`")
def gloo_interface(site: Site) -> Iterator[Finding]:
    """Read GLOO_SOCKET_IFNAME as torch does: names, separated by commas (ProcessGroupGloo.cpp, split)."""
    value = site.env.get("GLOO_SOCKET_IFNAME", "")
    here = interfaces()
    evidence = f"GLOO_SOCKET_IFNAME={value}; interfaces here: {', '.join(here)}"
    usable = [name for name in here if name != "lo" and is_up(name)]
    hint = f"unset GLOO_SOCKET_IFNAME, or export GLOO_SOCKET_IFNAME={usable[0] if usable else 'NAME'}"
    for name in filter(None, value.split(",")):
        if name.startswith(("^", "=")):
            what = f"gloo does not know {name[0]!r} in GLOO_SOCKET_IFNAME; only NCCL does."
        elif name not in here:
            what = f"GLOO_SOCKET_IFNAME names an interface that is not there: {name}."
        elif name == "lo" and site.has_several_nodes:
            what = "GLOO_SOCKET_IFNAME=lo: no other node reaches the loopback interface."
        elif not is_up(name):
            what = f"GLOO_SOCKET_IFNAME names an interface that is down: {name}."
        else:
            continue
        yield Finding(check="gloo_interface", what=what, evidence=evidence, hint=hint)


@check(detects="GLOO_DEVICE_TRANSPORT: a transport that gloo does not have, in this build of torch or in any")
def gloo_transport(site: Site) -> Iterator[Finding]:
    """Read GLOO_DEVICE_TRANSPORT. Whether torch has one of the rare transports, the tier "training" tries."""
    value = site.env.get("GLOO_DEVICE_TRANSPORT", "TCP")
    if value not in (*_TRANSPORTS, *_RARE_TRANSPORTS):
        yield Finding(
            check="gloo_transport",
            what=f"gloo has no transport {value!r}; each build of torch has TCP.",
            evidence=f"GLOO_DEVICE_TRANSPORT={value}",
            hint="unset GLOO_DEVICE_TRANSPORT in the batch script and in your shell's start files",
        )


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
    up = [name for name in interfaces() if is_up(name)]
    if value := site.env.get("NCCL_SOCKET_IFNAME"):
        nccl = _fitting(value, up)
    else:
        others = [name for name in up if not name.startswith(("docker", "lo"))]
        nccl = [name for name in up if name.startswith("ib")] or others[:1]
    return {"gloo": env.get("GLOO_SOCKET_IFNAME", ""), "NCCL": ",".join(nccl)}


@check(detects="a node without any network interface that is up")
def no_network(site: Site) -> Iterator[Finding]:
    """Look for an interface besides loopback."""
    if site.has_several_nodes and not any(name != "lo" and is_up(name) for name in interfaces()):
        yield Finding(
            check="no_network",
            what="A node has no network interface that is up, besides loopback.",
            evidence=f"interfaces: {', '.join(interfaces())}",
            hint=f"leave the node out: --exclude={site.host}; tell your site; in a container, use the host's network",
            sick_nodes=(site.host,),
        )


@check(detects="a node that can't connect to itself: `lo` is down, or a firewall drops it")
def loopback(site: Site) -> Iterator[Finding]:
    """Connect to 127.0.0.1. Ranks of a node meet so, and its own address leads over `lo`, too."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S),
        ):
            return
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EMFILE):
            return  # other checks: free_ports, open_files
        yield Finding(
            check="loopback",
            what="A node can't connect to itself over its loopback interface.",
            evidence=f"127.0.0.1: {error.strerror or error}; lo is {'up' if is_up('lo') else 'down'}",
            hint=f"tell your site (ip link set lo up; iptables -L -n); leave the node out: --exclude={site.host}",
            sick_nodes=(site.host,),
        )
