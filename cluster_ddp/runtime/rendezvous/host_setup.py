"""What the rendezvous needs of this host: addresses by name, the interface to the other ranks, ports, open files.

For its log, a TCPStore looks up the names of its peers' addresses, one after the other. If no name server answers, the
first look-up takes 10 s (seen with torch 2.15; after a failed one, that process looks up no more).

By default, gloo uses the address of this host's name. On many Debian and Ubuntu machines that is 127.0.1.1, which no
other node can reach, and training hangs. The interface of the route to rank 0 is the right one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping

from cluster_ddp.agent import channel_server
from cluster_ddp.errors import RendezvousError
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import Variables, node_name

log = logging.getLogger("cluster_ddp")

LOOPBACK = "127.0.0.1"

_UNKNOWN_NAME_PATIENCE_S = 10.0
_BACKLOG = 4096
_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913  # netdevice(7): the IPv4 address of an interface, and its flags
_IFF_UP = 1
_ENOUGH_FILES = 65_536


def resolve(host: str, deadline: float) -> str:
    """Return the numeric address of a host, by its name or address.

    At the deadline, by time.monotonic(), it gives up on servers that don't answer; on an unknown name after 10 s.

    Raises:
        RendezvousError: the name is unknown, or no name server answered.
    """
    start = time.monotonic()
    while True:
        try:
            # As bytes: Python would encode a str with the codec for international names, whose import takes 3 ms.
            found = socket.getaddrinfo(host.encode(), None, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except socket.gaierror as error:
            # A server that does not answer may answer later; an unknown name is tried again for a short time only.
            give_up = deadline if error.errno == socket.EAI_AGAIN else min(deadline, start + _UNKNOWN_NAME_PATIENCE_S)
            if time.monotonic() + 1.0 > give_up:
                raise RendezvousError(
                    f"Looking up {host}, the host of rank 0:",
                    f"{error.strerror or error} (asked on {node_name(os.environ)}).",
                    f"check MASTER_ADDR; try: getent hosts {host}",
                ) from error
            time.sleep(1.0)


class ReverseLookup:
    """Looks up the name of a numeric address (IPv4 or IPv6) in a thread, to measure how long that takes."""

    def __init__(self, address: str) -> None:
        # In the form that the address of a peer has on a TCPStore's dual-stack socket.
        self._address = address if ":" in address else f"::ffff:{address}"
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        with contextlib.suppress(OSError):
            socket.getnameinfo((self._address, 0), socket.NI_NAMEREQD)

    def ends_within(self, patience_s: float) -> bool:
        """Return whether it ends within this many seconds of its start; wait that long if necessary."""
        self._thread.join(max(0.0, self._start + patience_s - time.monotonic()))
        return not self._thread.is_alive()


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """During the body, look-ups of this thread, but of no other, use only /etc/hosts.

    glibc keeps a resolver state for each thread. Its first two fields are the timeout and the number of attempts
    (resolver(3), struct __res_state). RES_OPTIONS would apply to the whole process, and only before its first look-up.
    Has no effect with another C library.
    """
    libc = ctypes.CDLL(None)
    try:
        libc.__res_init()
        libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
        state = libc.__res_state()
    except AttributeError:  # another C library
        yield
        return
    attempts, state[1] = state[1], 0
    try:
        yield
    finally:
        state[1] = attempts


def choose_interface(topology: Topology, env: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME in an environment to the interface that leads to the other ranks, unless it is set."""
    if topology.world_size == 1 or "GLOO_SOCKET_IFNAME" in env:
        return
    # All ranks are on this machine: no other machine must reach their connections.
    interface = "lo" if topology.num_nodes == 1 else interface_towards(topology.master_addr)
    if interface == "lo" and topology.num_nodes != 1:
        # On rank 0, its own name may mean 127.0.1.1 (Debian): use the route to another node.
        interface = next(filter(None, map(interface_towards, topology.nodes[1:])), None)
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface


def warn_of_other_groups(topology: Topology, env: Mapping[str, str]) -> None:
    """Say on rank 0 that a heterogeneous job has nodes that this step does not use: srun alone starts group 0."""
    v = Variables(env)
    groups = v.integer("SLURM_HET_SIZE") or 1
    nodes = sum(v.integer(f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}") or 0 for group in range(groups))
    if topology.rank == 0 and groups > 1 and (topology.num_nodes or nodes) < nodes:
        log.warning(
            "This heterogeneous job has %d groups with %d nodes, and this training runs on %d of them. "
            "Hint: on all: srun --het-group=0-%d python …",
            *(groups, nodes, topology.num_nodes, groups - 1),
        )


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


def raise_open_files_limit() -> None:
    """Raise the soft limit on open files (often 1,024) to 65,536, or to the hard limit: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(_ENOUGH_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind_first_free(topology: Topology) -> socket.socket:
    """Return a socket that listens on the first candidate port that is free here.

    Raises:
        RendezvousError: no candidate port is free.
    """
    for port in topology.port_candidates:
        with contextlib.suppress(OSError):
            return listen(topology, port)
    ports = ", ".join(map(str, topology.port_candidates))
    host = node_name(os.environ)
    if len(topology.port_candidates) == 1:
        found = f"port {ports} on {host} is in use by another program (MASTER_PORT was preset, so no other is tried)."
        hint = f"unset MASTER_PORT, and a free port is chosen; find the program: ss -ltnp 'sport = :{ports}' on {host}"
    else:
        found = f"ports {ports} on {host} are all in use."
        hint = f"find the programs: ss -ltnp on {host}"
    raise RendezvousError(f"Serving the rendezvous of {topology.world_size} ranks:", found, hint)


def listen(topology: Topology, port: int) -> socket.socket:
    """Return a socket that listens on a port: on loopback if the run has one node, else on all interfaces.

    With port 0 the system chooses a free one. Raises OSError if the port is taken.
    """
    if topology.num_nodes == 1:
        return socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
    return channel_server.listener(port)
