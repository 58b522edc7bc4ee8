"""Whether the names of the hosts lead to the right addresses, and the interfaces that variables name are there."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Iterator, Sequence

from cluster_ddp.doctor.checks.check_types import Site, node_check
from cluster_ddp.doctor.findings import Finding
from cluster_ddp.runtime.rendezvous.host_setup import choose_interface, interface_towards, is_up

_SLOW_S, _LOOPBACK_S = 2.0, 2.0
# gloo's transports (GlooDeviceFactory.cpp, torch 2.14); LINUX is another name for TCP. Few builds have the last three.
_TRANSPORTS = ("TCP", "LINUX", "TCP_TLS", "UV", "IBVERBS")


def addresses_of(name: str) -> list[str]:
    """Return the addresses of a name, in the order in which programs try them.

    Raises:
        OSError: the name is unknown, or no name server answers.
    """
    found = socket.getaddrinfo(name.encode(), None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found))


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


@node_check
def master_address(site: Site) -> Iterator[Finding]:
    """Detect a master address that is unknown, leads to this node itself, or can't be routed."""
    if not site.has_several_nodes:
        return
    name, start = site.topology.master_addr, time.monotonic()
    try:
        first = ipaddress.ip_address(addresses_of(name)[0])
    except OSError as error:
        hint = f"unset MASTER_ADDR, and the step's first node is used; else try on that node: getent hosts {name}"
        what, evidence = f"The name of rank 0's host is unknown: {name}.", f"no address: {error.strerror or error}"
        yield _wrong_address(site, what, evidence, hint)
        return
    took_s = time.monotonic() - start
    is_own = site.topology.node_rank == 0 and name.partition(".")[0] == socket.gethostname().partition(".")[0]
    if first.is_loopback and not is_own:
        hint = f"correct /etc/hosts on {site.host}: getent hosts {name}"
        if "MASTER_ADDR" in site.env:
            hint = "unset MASTER_ADDR in the batch script and in your shell's start files"
        what = "The address of rank 0's host is loopback: it leads each node to itself."
        yield _wrong_address(site, what, "" if name == str(first) else f"it is {first}", hint)
    elif first.is_link_local:
        what = "The address of rank 0's host is link-local: no other network reaches it."
        hint = f"export MASTER_ADDR=<another address of {name}>: getent ahosts {name}; or correct DNS"
        yield _wrong_address(site, what, f"it is {first}", hint)
    elif took_s > _SLOW_S:
        what, evidence = "Looking up rank 0's host is slow.", f"getaddrinfo took {took_s:.1f} s"
        hint = "check the first nameserver in /etc/resolv.conf of that node, or put the nodes into /etc/hosts"
        yield _wrong_address(site, what, evidence, hint, is_warning=True)


def _wrong_address(site: Site, what: str, evidence: str, hint: str, *, is_warning: bool = False) -> Finding:
    is_set = "MASTER_ADDR" in site.env
    said = ("MASTER_ADDR=" if is_set else "the step's first node, ") + site.topology.master_addr
    return Finding(
        what=what,
        evidence=f"{said}; {evidence}" if evidence else said,
        hint=hint,
        is_warning=is_warning,
        sick_nodes=() if is_set else (site.host,),
    )


@node_check
def own_name(site: Site) -> Iterator[Finding]:
    """Detect a host name that means loopback there, which gloo would take (Debian's 127.0.1.1).

    gloo listens on the address of this host's own name unless an interface is named.
    """
    name = socket.gethostname()
    if not site.has_several_nodes or "GLOO_SOCKET_IFNAME" in site.env:
        return
    try:
        first = ipaddress.ip_address(addresses_of(name)[0])
        if not first.is_loopback:
            return
        evidence = f"{name} is {first}"
    except OSError:
        evidence = f"{name} is unknown"
    others = [node for node in site.topology.nodes if node not in (name, site.host)]
    interface = next(filter(None, map(interface_towards, others)), None) or "eth0"
    yield Finding(
        what="A node's own name does not resolve to an address that other nodes reach; gloo would listen there.",
        evidence=evidence,
        hint=f"export GLOO_SOCKET_IFNAME={interface} (scripts that call cluster_ddp.distributed choose it themselves)",
        is_warning=True,
    )


@node_check
def no_network(site: Site) -> Iterator[Finding]:
    """Detect a node without any network interface that is up."""
    here = _interfaces()
    if site.has_several_nodes and not any(name != "lo" and is_up(name) for name in here):
        yield Finding(
            what="A node has no network interface that is up, besides loopback.",
            evidence=f"interfaces: {', '.join(here)}",
            hint=f"leave the node out: --exclude={site.host}; tell your site; in a container, use the host's network",
            sick_nodes=(site.host,),
        )


@node_check
def loopback(site: Site) -> Iterator[Finding]:
    """Detect a node that can't connect to itself: `lo` is down, or a firewall drops it.

    Ranks of a node meet so, and its own address leads over `lo`, too.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S).close()
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EMFILE):
            return  # other checks: free_ports, open_files
        yield Finding(
            what="A node can't connect to itself over its loopback interface.",
            evidence=f"127.0.0.1: {error.strerror or error}; lo is {'up' if is_up('lo') else 'down'}",
            hint=f"tell your site (ip link set lo up; iptables -L -n); leave the node out: --exclude={site.host}",
            sick_nodes=(site.host,),
        )


@node_check
def gloo_interface(site: Site) -> Iterator[Finding]:
    """Detect GLOO_SOCKET_IFNAME: an interface that is not there or down, `lo` with several nodes, or a `^`.

    torch splits its value at commas (ProcessGroupGloo.cpp, split).
    """
    value = site.env.get("GLOO_SOCKET_IFNAME", "")
    here = _interfaces()
    usable = next((name for name in here if name != "lo" and is_up(name)), "NAME")
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
        evidence = f"GLOO_SOCKET_IFNAME={value}; interfaces here: {', '.join(here)}"
        hint = f"unset GLOO_SOCKET_IFNAME, or export GLOO_SOCKET_IFNAME={usable}"
        yield Finding(what=what, evidence=evidence, hint=hint)


@node_check
def gloo_transport(site: Site) -> Iterator[Finding]:
    """Detect GLOO_DEVICE_TRANSPORT: a transport that gloo does not have, in this build of torch or in any.

    Whether this build of torch has it, the tier "training" tries.
    """
    value = site.env.get("GLOO_DEVICE_TRANSPORT", "TCP")
    if value not in _TRANSPORTS:
        yield Finding(
            what=f"gloo has no transport {value!r}; each build of torch has TCP.",
            evidence=f"GLOO_DEVICE_TRANSPORT={value}",
            hint="unset GLOO_DEVICE_TRANSPORT in the batch script and in your shell's start files",
        )


@node_check
def nccl_interface(site: Site) -> Iterator[Finding]:
    """Detect NCCL_SOCKET_IFNAME: no interface fits it."""
    value = site.env.get("NCCL_SOCKET_IFNAME", "")
    if not value:
        return
    here = _interfaces()
    fits = _fitting(value, here)
    if fits and not (site.has_several_nodes and fits == ["lo"]):
        return
    usable = next((name for name in here if name != "lo"), "NAME")
    yield Finding(
        what=f"NCCL_SOCKET_IFNAME={value} fits no interface that other nodes reach.",
        evidence=f"interfaces here: {', '.join(here)}",
        hint=f"unset NCCL_SOCKET_IFNAME, or export NCCL_SOCKET_IFNAME={usable}",
    )


def _fitting(value: str, here: Sequence[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME means: prefixes; `=` for whole names, `^` for all others."""
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    is_exact, names = rest.startswith("="), [name for name in rest.removeprefix("=").split(",") if name]
    return [
        name for name in here if any(name == one if is_exact else name.startswith(one) for one in names) != excludes
    ]


def taken_interfaces(site: Site) -> dict[str, str]:
    """Return the interfaces that gloo and NCCL will take; "" if unknown.

    gloo: what a variable names, else the one that `cluster_ddp.distributed` chooses. NCCL, without a variable: those
    whose names begin with "ib", else the first that is neither docker's nor loopback (NCCL 2.27, ncclFindInterfaces).
    """
    env = {**site.env}
    choose_interface(site.topology, env)
    up = [name for name in _interfaces() if is_up(name)]
    if value := site.env.get("NCCL_SOCKET_IFNAME"):
        nccl = _fitting(value, up)
    else:
        others = [name for name in up if not name.startswith(("docker", "lo"))]
        nccl = [name for name in up if name.startswith("ib")] or others[:1]
    return {"gloo": env.get("GLOO_SOCKET_IFNAME", ""), "NCCL": ",".join(nccl)}
