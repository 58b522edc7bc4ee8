"""The network interface that leads to the other ranks.

By default, gloo uses the address of this host's name. On many Debian and Ubuntu machines that is 127.0.1.1, which no
other node can reach, and training hangs. The interface of the route to rank 0 is the right one.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import MutableMapping

from cluster_ddp.slurm.topology import Topology

_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913  # netdevice(7): the IPv4 address of an interface, and its flags
_IFF_UP = 1


def choose_interface(topology: Topology, env: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to the other ranks, unless it is set.

    Args:
        topology: this rank's place.
        env: the environment to change, such as os.environ.
    """
    if topology.world_size == 1 or "GLOO_SOCKET_IFNAME" in env:
        return
    # All ranks are on this machine: no other machine must reach their connections.
    interface = "lo" if topology.num_nodes == 1 else interface_towards(topology.master_addr)
    if interface == "lo" and topology.num_nodes != 1:
        # On rank 0, its own name may mean 127.0.1.1 (Debian): use the route to another node.
        interface = next(filter(None, map(interface_towards, topology.nodes[1:])), None)
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface


def interface_towards(host: str) -> str | None:
    """Return the interface over which this machine reaches `host`; None if unknown (IPv6, no route).

    On `host` itself it is the interface with the host's address, such as eth0, unless the name means loopback.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # for a datagram socket this sends nothing, but chooses the route
            address = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if ipv4_address(name) == address), None)


def ipv4_address(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None without one."""
    answer = _asked(interface, _SIOCGIFADDR)
    return None if answer is None else socket.inet_ntoa(answer[20:24])


def is_up(interface: str) -> bool:
    """Return whether an interface is up; True if that can't be read.

    /sys/class/net may be that of another network namespace.
    """
    answer = _asked(interface, _SIOCGIFFLAGS)
    return answer is None or bool(struct.unpack_from("=H", answer, 16)[0] & _IFF_UP)


def _asked(interface: str, what: int) -> bytes | None:
    """The kernel's answer to a question about an interface; None without one, as for an address that it lacks."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return fcntl.ioctl(probe.fileno(), what, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
