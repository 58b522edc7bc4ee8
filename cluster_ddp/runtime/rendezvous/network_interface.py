"""Which network interface leads to the other ranks.

Left alone, gloo takes the address that this host's name resolves to. On many Debian and Ubuntu machines that is
127.0.1.1, where no other node can reach it, and training hangs. The interface of the route to rank 0 is the right one.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import MutableMapping

from cluster_ddp.slurm.topology import Topology

_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


def choose_interface(topology: Topology, env: MutableMapping[str, str]) -> None:
    """Let gloo use the interface that leads to the other ranks, unless GLOO_SOCKET_IFNAME says which.

    Args:
        topology: this rank's place.
        env: such as os.environ; GLOO_SOCKET_IFNAME is set there.
    """
    if topology.world_size == 1 or "GLOO_SOCKET_IFNAME" in env:
        return
    # All ranks on this machine: nobody else is to reach their connections.
    interface = "lo" if topology.num_nodes == 1 else interface_towards(topology.master_addr)
    if interface == "lo" and topology.num_nodes != 1:
        # Rank 0's own name may mean 127.0.1.1 there (Debian): the way to another node is the right one.
        interface = next(filter(None, map(interface_towards, topology.nodes[1:])), None)
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface


def interface_towards(host: str) -> str | None:
    """The name of the interface over which this machine reaches `host`; None if it can't be told (IPv6, no route).

    On `host` itself it is the interface that carries the host's address, such as eth0, unless the name means loopback.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # of a datagram socket: sends nothing, but chooses the route
            address = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if _ipv4_address(name) == address), None)


def _ipv4_address(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:  # an interface without an IPv4 address
        return None
