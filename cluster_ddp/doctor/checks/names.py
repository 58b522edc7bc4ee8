"""Whether the names of the hosts lead to the right addresses."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

from cluster_ddp.doctor.checks import Site, check
from cluster_ddp.doctor.finding import Finding
from cluster_ddp.runtime.rendezvous.host_network import interface_towards

_SLOW_S = 2.0


def addresses_of(name: str) -> list[str]:
    """Return the addresses of a name, in the order in which programs try them.

    Raises:
        OSError: the name is unknown, or no name server answers.
    """
    found = socket.getaddrinfo(name.encode(), None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found))


@check(detects="a master address that is unknown, leads to this node itself, or can't be routed")
def master_address(site: Site) -> Iterator[Finding]:
    """Look up MASTER_ADDR as the ranks do."""
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
        yield replace(_wrong_address(site, what, evidence, hint), is_warning=True)


def _wrong_address(site: Site, what: str, evidence: str, hint: str) -> Finding:
    is_set = "MASTER_ADDR" in site.env
    said = (
        f"MASTER_ADDR={site.topology.master_addr}" if is_set else f"the step's first node, {site.topology.master_addr}"
    )
    return Finding(
        check="master_address",
        what=what,
        evidence=f"{said}; {evidence}" if evidence else said,
        hint=hint,
        sick_nodes=() if is_set else (site.host,),
    )


@check(detects="a host name that means loopback there, which gloo would take (Debian's 127.0.1.1)")
def own_name(site: Site) -> Iterator[Finding]:
    """Look up this host's own name: gloo listens on its address unless an interface is named."""
    name = socket.gethostname()
    if not site.has_several_nodes or "GLOO_SOCKET_IFNAME" in site.env:
        return
    try:
        first = ipaddress.ip_address(addresses_of(name)[0])
    except OSError:
        evidence = f"{name} is unknown"
    else:
        if not first.is_loopback:
            return
        evidence = f"{name} is {first}"
    others = [node for node in site.topology.nodes if node not in (name, site.host)]
    interface = next(filter(None, map(interface_towards, others)), None) or "eth0"
    yield Finding(
        check="own_name",
        what="A node's own name does not resolve to an address that other nodes reach; gloo would listen there.",
        evidence=evidence,
        hint=f"export GLOO_SOCKET_IFNAME={interface} (scripts that call cluster_ddp.distributed choose it themselves)",
        is_warning=True,
    )
