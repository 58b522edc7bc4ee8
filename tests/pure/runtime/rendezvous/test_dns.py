"""Look-ups where name servers may be dead; here they are /etc/hosts' only."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from slowness import LIMIT_S

from cluster_ddp.errors import RendezvousError
from cluster_ddp.runtime.rendezvous import host_setup
from cluster_ddp.slurm.topology import Topology


def attempts() -> int:
    """How often this thread would ask each name server."""
    libc = ctypes.CDLL(None)
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    return int(libc.__res_state()[1])


def test_name_servers_are_asked_again_afterwards() -> None:
    socket.getfqdn("localhost")  # initialises this thread's resolver
    before = attempts()
    with pytest.raises(ValueError), host_setup.without_name_servers():
        assert attempts() == 0
        raise ValueError
    assert attempts() == before > 0


def test_other_threads_ask_them_all_the_while() -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(socket.getfqdn, "localhost").result()
        with host_setup.without_name_servers():
            assert other.submit(attempts).result() > 0


def test_a_look_up_is_timed_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = [], threading.Event()
    monkeypatch.setattr(socket, "getnameinfo", lambda address, flags: asked.append(address[0]) or answer.wait())
    clock = SimpleNamespace(monotonic=lambda: 1000.0)
    monkeypatch.setattr(host_setup, "time", clock)
    lookup = host_setup.ReverseLookup("10.0.0.1")
    assert not lookup.ends_within(0.1)
    clock.monotonic = lambda: 1000.0 + LIMIT_S
    assert not lookup.ends_within(LIMIT_S)  # that time has passed: no more waiting
    answer.set()
    assert lookup.ends_within(2 * LIMIT_S)
    assert asked == ["::ffff:10.0.0.1"]


def test_addresses_are_found_without_the_codec_for_international_names() -> None:
    code = (
        "import sys, time; from cluster_ddp.runtime.rendezvous.host_setup import resolve;"
        "print(resolve('localhost', time.monotonic()), 'encodings.idna' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout in ("127.0.0.1 False\n", "::1 False\n")


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(RendezvousError, match="Looking up no-such-host"):
        host_setup.resolve("no-such-host.invalid", time.monotonic())


def test_ranks_of_one_machine_are_reached_from_there_only() -> None:
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}
    env: dict[str, str] = {}
    host_setup.choose_interface(Topology.from_environ(names), env)
    assert env == {"GLOO_SOCKET_IFNAME": "lo"}
