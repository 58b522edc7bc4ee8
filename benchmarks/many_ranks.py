"""Many ranks on one machine, in a network of their own whose name servers are dead or answer.

The ranks are forked from one process that has imported torch, so that a thousand of them fit. A rank shares its memory
with all others until it writes to it. The kernel's copies would then take most of the time. So each rank does
everything once before it reports that it is ready.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

HOST = "node1"
_ADDRESS, _NAME_SERVER = "10.213.255.1", "10.213.255.250"

NameServers = Literal["dead", "working"]


def enter_own_network(name_servers: NameServers) -> None:
    """Set up the network that `in_own_network` has made: an interface, /etc/hosts with `HOST` alone, a name server.

    A dead name server is an address that takes packets and sends none. A working one answers at once that it knows no
    such name.
    """
    for command in (
        "link set lo up",
        "link add hole type veth peer name nowhere",
        "link set nowhere up",
        f"addr add {_ADDRESS}/24 dev hole",
        "link set hole up",
        f"neigh replace {_NAME_SERVER} lladdr 02:00:00:00:00:09 dev hole",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("hosts", "resolv.conf"):
            Path(folder, name).touch()
            subprocess.run(["mount", "--bind", f"{folder}/{name}", f"/etc/{name}"], check=True)
    Path("/etc/resolv.conf").write_text(f"nameserver {_NAME_SERVER}\n")
    _write_hosts(both_ways=False)
    if name_servers == "working":
        subprocess.run(["ip", "addr", "add", f"{_NAME_SERVER}/32", "dev", "lo"], check=True)
        _serve_names()


def _write_hosts(*, both_ways: bool) -> None:
    """Write /etc/hosts. With `both_ways`, reverse look-ups find their names in it too, and ask no name server."""
    hosts = {"127.0.0.1": "localhost", _ADDRESS: HOST}
    lines = [f"{address} {host}\n" for address, host in hosts.items()]
    lines += [f"::ffff:{address} {host}\n" for address, host in hosts.items() if both_ways]
    Path("/etc/hosts").write_text("".join(lines))


def in_own_network(command: list[str]) -> list[str]:
    """The command line that runs `command` in a new network, where it may call `enter_own_network`. Needs root."""
    return ["unshare", "--net", "--mount", *command]


def _serve_names() -> None:
    """Answer every question with "no such name" (RFC 1035, 4.1.1), in a process that ends with this one."""
    parent = os.getpid()
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((_NAME_SERVER, 53))
    server.settimeout(1.0)
    if os.fork():
        return
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            question, asker = server.recvfrom(512)
            server.sendto(question[:2] + b"\x85\x83" + question[4:6] + bytes(6) + question[12:], asker)
    os._exit(0)


def start_all(
    ranks: int, meet: Callable[[int], object], *, rehearse: Callable[[int], object] | None = None, limit_s: int = 120
) -> list[float]:
    """Fork ranks, start all at once when all are ready, and time each.

    Args:
        ranks: how many.
        meet: what each does, given its rank. What it returns is kept until all ranks have finished.
        rehearse: the same for another run, done before.
        limit_s: seconds after which the ranks are killed.

    Returns:
        Seconds from the common start to the end of `meet` for each rank, in the order in which they finished.

    Raises RuntimeError: not all ranks finished.
    """
    (ready, say_ready), (go, let_go), (through, say_through), (leave, let_leave) = (os.pipe() for _ in range(4))
    _write_hosts(both_ways=True)  # after a failed look-up, torch looks up nothing more in that process

    def be(rank: int) -> None:
        os.close(let_go)
        os.close(let_leave)
        kept = rehearse(rank) if rehearse else None
        os.write(say_ready, b".")
        os.read(go, 1)
        _meet_and_stay(rank, meet, say_through, leave, kept)

    pids = _forked(ranks, be)
    killer = threading.Timer(limit_s, _kill, [pids])
    killer.start()
    os.close(say_through)
    _read(ready, ranks)
    _write_hosts(both_ways=False)
    start = time.monotonic()
    os.close(let_go)
    ends = _read(through, 8 * ranks)
    killer.cancel()
    os.close(let_leave)
    _wait_for(pids, (ready, say_ready, go, through, leave))
    return _seconds(start, ends, ranks)


def _forked(ranks: int, be: Callable[[int], None]) -> list[int]:
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page that it shares with this process
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            be(rank)
        pids.append(pid)
    return pids


def _wait_for(pids: Sequence[int], descriptors: Sequence[int]) -> None:
    for pid in pids:
        os.waitpid(pid, 0)
    for descriptor in descriptors:
        os.close(descriptor)


def _seconds(start: float, ends: bytes, ranks: int) -> list[float]:
    if len(ends) < 8 * ranks:
        raise RuntimeError(f"{len(ends) // 8} of {ranks} ranks came through")
    return [end - start for (end,) in struct.iter_unpack("d", ends)]


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _meet_and_stay(
    rank: int, meet: Callable[[int], object], say_through: int, leave: int, *until_the_end: object
) -> None:
    """In a rank: call `meet`, report the time, and stay, so that no rank's end costs the others time."""
    status = 1
    try:
        until_the_end += (meet(rank),)
        os.write(say_through, struct.pack("d", time.monotonic()))
        os.close(say_through)
        os.read(leave, 1)
        status = 0
    finally:
        os._exit(status)


def _read(pipe: int, size: int) -> bytes:
    """Read `size` bytes, or fewer if all writers have ended."""
    data = b""
    while len(data) < size and (more := os.read(pipe, size - len(data))):
        data += more
    return data
