"""How the ranks of one run find each other, and nobody else's.

Rank 0 serves a TCPStore on any free port. On the first of the topology's candidate ports that it can bind it runs a
beacon, which tells whoever connects the run's key and the store's port. The others ask the candidates in turn until one
answers with their own key. So a candidate that somebody else holds costs a fraction of a second, whether that is
another job of ours, a web server, or a socket that accepts and stays silent (on which a TCPStore client waits for ever,
whatever its timeout: seen with torch 2.15). The key carries job, array task, step and restart count, so that a requeued
job never meets its own ghost.

Then every rank writes its host name into the store; rank 0 waits for all of them and writes the verdict.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from cluster_ddp.errors import RendezvousError
from cluster_ddp.runtime.failure import arrival
from cluster_ddp.slurm.environment import Topology

DEFAULT_TIMEOUT_S = 300.0
_BACKLOG = 4096
_FIRST_PATIENCE_S, _LAST_PATIENCE_S = 0.25, 5.0
# A follower waits this much longer than rank 0, whose verdict names the missing ranks.
_VERDICT_GRACE_S = 5.0
_LOOKUP_PATIENCE_S = 0.3
_UNKNOWN_NAME_PATIENCE_S = 10.0
_PROCEED = "proceed"


def meet(topology: Topology, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dist.Store:
    """Wait until all ranks of the run are there; returns a store that only they share.

    Args:
        topology: this process's place.
        timeout_s: seconds to wait for the others.

    Raises:
        RendezvousError: ranks are missing (it names them), rank 0 can't be found, or no candidate port is free.
    """
    if topology.world_size == 1:
        return dist.HashStore()
    deadline = time.monotonic() + timeout_s
    address = _resolve(topology, deadline)
    if topology.launcher_store:
        port = topology.master_port
        return _gather(topology, _connect(address, port, timeout_s), timeout_s, deadline)
    if topology.rank != 0:
        port = _find_store(topology, address, timeout_s, deadline)
        return _gather(topology, _connect(address, port, timeout_s), timeout_s, deadline)
    with contextlib.closing(_bind_first_free(topology)) as listener:
        store = _serve_store(timeout_s)
        beacon = threading.Thread(target=_answer, args=(listener, topology.key, store.port), daemon=True)
        beacon.start()
        try:
            return _gather(topology, store, timeout_s, deadline)
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake its accept(), which holds the port
            beacon.join()


def _gather(topology: Topology, tcp_store: dist.TCPStore, timeout_s: float, deadline: float) -> dist.Store:
    """Note our arrival, and wait for the verdict of rank 0 on everybody's."""
    store = dist.PrefixStore(topology.key, tcp_store)
    if store.add(f"claim/{topology.rank}", 1) > 1:
        raise RendezvousError(
            f"Joining the run at {topology.master_addr} as rank {topology.rank}:",
            f"another process is rank {topology.rank} there already.",
            "is a second run using the same MASTER_ADDR and MASTER_PORT, or does every task have the same RANK?",
        )
    store.set(arrival(topology.rank), socket.gethostname())
    if topology.rank == 0:
        error = _missing(topology, store, timeout_s, deadline)
        store.set("verdict", _PROCEED if error is None else error.found)
        if error is not None:
            time.sleep(1.0)  # the others read the verdict from this process
            raise error
        return store
    try:
        remaining_s = max(0.0, deadline - time.monotonic()) + _VERDICT_GRACE_S
        store.wait(["verdict"], timedelta(seconds=remaining_s))
        verdict = store.get("verdict").decode()
    except dist.DistError as error:
        found = f"rank 0 on {topology.master_addr} was met, and then gave no word."
        raise _timeout_error(topology, timeout_s, found) from error
    if verdict != _PROCEED:
        raise _timeout_error(topology, timeout_s, verdict)
    return store


def _missing(topology: Topology, store: dist.Store, timeout_s: float, deadline: float) -> RendezvousError | None:
    ranks = range(topology.world_size)
    try:
        remaining_s = max(0.01, deadline - time.monotonic())
        store.wait([arrival(rank) for rank in ranks], timedelta(seconds=remaining_s))
        return None
    except dist.DistError:
        hosts = {r: store.get(arrival(r)).decode() for r in ranks if store.check([arrival(r)])}
    if len(hosts) == topology.world_size:  # the last came just now
        return None
    absent = ", ".join(missing_by_node(topology, hosts))
    found = f"{len(hosts)} of {topology.world_size} ranks arrived; missing: rank {absent}."
    return _timeout_error(topology, timeout_s, found)


def missing_by_node(topology: Topology, arrived: dict[int, str]) -> list[str]:
    """The ranks that have not arrived, with their nodes where those are certain: ["6", "7 (node4)"].

    They are certain where only one node lacks ranks, or where those that arrived stand as block distribution would have
    them.

    Args:
        topology: of any rank.
        arrived: rank -> name of its host.
    """
    absent = [rank for rank in range(topology.world_size) if rank not in arrived]
    places = [n for n, count in zip(topology.nodes, topology.tasks_per_node) for _ in range(count)]
    if len(places) != topology.world_size:
        return [str(rank) for rank in absent]
    here = Counter(host.split(".")[0] for host in arrived.values())
    short = [node for node, count in zip(topology.nodes, topology.tasks_per_node) if here[node.split(".")[0]] < count]
    if len(short) == 1:
        home = dict.fromkeys(absent, short[0])
    elif all(host.split(".")[0] == places[rank].split(".")[0] for rank, host in arrived.items()):
        home = {rank: places[rank] for rank in absent}
    else:
        return [*map(str, absent[:-1]), f"{absent[-1]} (on {', '.join(short)})"]
    last_of_node = {node: rank for rank, node in home.items()}
    return [f"{rank} ({home[rank]})" if last_of_node[home[rank]] == rank else str(rank) for rank in absent]


def _timeout_error(topology: Topology, timeout_s: float, found: str) -> RendezvousError:
    return RendezvousError(
        f"Waiting {timeout_s:g} s for {topology.world_size} ranks to meet on {topology.master_addr}:",
        found,
        "look at those nodes' output for why their tasks did not start; "
        "a slow start needs more: --rendezvous-timeout-s",
    )


def _find_store(topology: Topology, address: str, timeout_s: float, deadline: float) -> int:
    """Ask the candidate ports in turn until our own beacon answers; the store's port."""
    patience_s = _FIRST_PATIENCE_S
    while True:
        answers = {}
        for port in topology.port_candidates:
            answers[port] = _ask(address, port, min(patience_s, max(0.1, deadline - time.monotonic())))
            key, _, store_port = answers[port].rpartition(" ")
            if key == topology.key and store_port.isdigit():
                return int(store_port)
        if time.monotonic() > deadline:
            tried = ", ".join(f"{port}: {answer or 'silence'}" for port, answer in answers.items())
            found = f"rank {topology.rank} did not find rank 0 on {topology.master_addr} ({tried[:400]})."
            raise _timeout_error(topology, timeout_s, found)
        time.sleep(min(0.05 + patience_s / 10, max(0.0, deadline - time.monotonic()) + 0.01))
        patience_s = min(1.5 * patience_s, _LAST_PATIENCE_S)


def _ask(address: str, port: int, patience_s: float) -> str:
    """What the holder of a port says first, in at most `patience_s` seconds; "" for silence."""
    try:
        with socket.create_connection((address, port), timeout=patience_s) as connection:
            return connection.recv(512).decode(errors="replace").strip()
    except TimeoutError:
        return ""
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _answer(listener: socket.socket, key: str, store_port: int) -> None:
    """The beacon: tell whoever connects our key and the store's port, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # shut down: everybody has met
            return
        with connection, contextlib.suppress(OSError):
            connection.sendall(f"{key} {store_port}\n".encode())


def _bind_first_free(topology: Topology) -> socket.socket:
    for port in topology.port_candidates:
        with contextlib.suppress(OSError):
            return _listen(port)
    ports = ", ".join(map(str, topology.port_candidates))
    host = socket.gethostname()
    if len(topology.port_candidates) == 1:
        found = f"port {ports} on {host} is in use by another program (MASTER_PORT was preset, so no other is tried)."
        hint = f"unset MASTER_PORT, and a free one is found; who holds it: ss -ltnp 'sport = :{ports}' on {host}"
    else:
        found = f"ports {ports} on {host} are all in use."
        hint = f"who holds them: ss -ltnp on {host}"
    raise RendezvousError(f"Serving the rendezvous of {topology.world_size} ranks:", found, hint)


def _listen(port: int) -> socket.socket:
    """A socket that listens on a port of all interfaces, of IPv4 and, where the host has it, IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _resolve(topology: Topology, deadline: float) -> str:
    """The numeric address of master_addr: the store then needs no look-up of its own."""
    start = time.monotonic()
    while True:
        try:
            found = socket.getaddrinfo(topology.master_addr, None, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except socket.gaierror as error:
            # A server that does not answer may yet; one that knows no such name is asked again for a short while only.
            give_up = deadline if error.errno == socket.EAI_AGAIN else min(deadline, start + _UNKNOWN_NAME_PATIENCE_S)
            if time.monotonic() + 1.0 > give_up:
                raise RendezvousError(
                    f"Looking up {topology.master_addr}, the host of rank 0:",
                    f"{error.strerror or error} (asked on {socket.gethostname()}).",
                    "is MASTER_ADDR right? Try: getent hosts " + topology.master_addr,
                ) from error
            time.sleep(1.0)


def _connect(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    return _tcp_store(address, port, timeout_s, is_master=False)


def _serve_store(timeout_s: float) -> dist.TCPStore:
    return _tcp_store("127.0.0.1", 0, timeout_s, is_master=True)


def _tcp_store(address: str, port: int, timeout_s: float, *, is_master: bool) -> dist.TCPStore:
    """A TCPStore that does not wait for name servers.

    For its log it looks up the name of an address. Where no server answers, that takes 10 s (seen, torch 2.15): there,
    the store is made in a thread of its own, which asks no servers.
    """
    timeout = timedelta(seconds=timeout_s)

    def make() -> dist.TCPStore:
        return dist.TCPStore(address, port, is_master=is_master, timeout=timeout, wait_for_workers=False)

    if _reverse_lookup_is_quick(address):
        return make()
    with ThreadPoolExecutor(1, initializer=_ask_no_name_servers) as thread:
        return thread.submit(make).result()


def _ask_no_name_servers() -> None:
    """Let this thread's look-ups end with /etc/hosts: no attempts at name servers.

    glibc keeps a resolver state for each thread, whose first two fields are the time-out and the number of attempts
    (resolver(3), struct __res_state). RES_OPTIONS would do for a whole process only, and only before its first look-up.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library
        libc.__res_init()
        libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
        libc.__res_state()[1] = 0


def _reverse_lookup_is_quick(address: str) -> bool:
    """Whether a look-up of the address's name, in the form that a TCPStore's dual-stack socket has it, ends soon."""
    mapped = address if ":" in address else f"::ffff:{address}"

    def look_up() -> None:
        with contextlib.suppress(OSError):
            socket.getnameinfo((mapped, 0), socket.NI_NAMEREQD)

    lookup = threading.Thread(target=look_up, daemon=True)
    lookup.start()
    lookup.join(_LOOKUP_PATIENCE_S)
    return not lookup.is_alive()
