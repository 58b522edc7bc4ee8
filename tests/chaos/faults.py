"""Faults in a sandbox, made for real: nodes that go silent, a controller that dies, ranks that are killed or held.

What is started here lives in the sandbox's namespaces, so `cluster.down` finds it. Processes are found by namespace and
ended by their id: other sandboxes, and a Slurm of the machine's own, are not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cluster_ddp import processes
from cluster_ddp.errors import SandboxError
from cluster_ddp.run.names import Env
from cluster_ddp.sandbox import daemons, network
from cluster_ddp.sandbox.layout import CONTROLLER, Layout

_CLONE_NEWNET = 0x40000000  # sched.h; os.setns is there from Python 3.12 on


class Rank(NamedTuple):
    """A rank's process, as the machine sees it."""

    rank: int
    """SLURM_PROCID."""
    node: str
    """The host that it lives on."""
    pid: int
    """Its process id on this machine."""


def lose_node(layout: Layout, node: str) -> None:
    """A node dies as at a power cut: its link goes down first, then slurmd, its step daemons and all tasks get SIGKILL.

    The bridge's end of the link is taken down, so that not even the kernel's farewell (FIN, RST) leaves the node: the
    others see silence. Files that its processes held locked are free, as they are some time after a client's death on a
    network file system.
    """
    network.ip("link", "set", layout.link(node), "down")
    while pids := processes_on(layout, node):
        send(pids, signal.SIGKILL)
        time.sleep(0.05)


def bring_back_node(layout: Layout, node: str) -> None:
    """A lost node starts again: its link comes up, and a new slurmd, which knows nothing of its former tasks.

    Returns when a step has run there.

    Raises:
        SandboxError: no step runs there.
    """
    network.ip("link", "set", layout.link(node), "up")
    daemons.wait_until_usable(layout, [node], [daemons.start_node(layout, node)])


def cut_node(layout: Layout, node: str, *, for_s: float | None = None) -> None:
    """A node's link is down for a while; its slurmd and its tasks live on. Returns when a step has run there.

    Some time after SlurmdTimeout (20 s) slurmctld gives the node up: it ends or requeues the node's jobs, and ends the
    tasks that it finds there when the link is up again.

    Args:
        layout: of the sandbox.
        node: its name.
        for_s: seconds; None: until slurmctld has given the node up.

    Raises:
        SandboxError: slurmctld does not give it up, or no step runs there any more.
    """
    network.ip("link", "set", layout.link(node), "down")
    try:
        if for_s is None:
            daemons.wait_until_given_up(layout, node)
        else:
            time.sleep(for_s)
    finally:
        network.ip("link", "set", layout.link(node), "up")
    daemons.wait_until_usable(layout, [node], [])


def restart_controller(layout: Layout, *, after_s: float) -> None:
    """slurmctld gets SIGKILL and, `after_s` seconds later, is started again; returns when steps run on all nodes.

    Raises:
        SandboxError: there is none, or no step runs under the new one.
    """
    lose_controller(layout)
    time.sleep(after_s)
    bring_back_controller(layout)


def let_controller_save() -> None:
    """Wait until slurmctld has saved what it knows now: 5 s after a change at the latest, and no event tells it."""
    time.sleep(6)


def lose_controller(layout: Layout) -> None:
    """slurmctld gets SIGKILL.

    It saves its state some seconds after a change (up to 5 s with Slurm 22.05): what is younger may be forgotten.

    Raises:
        SandboxError: there is none.
    """
    # Debian's program is slurmctld-wlm; its helper slurmscriptd is the same program and ends with it.
    pids = [pid for pid in processes_on(layout, CONTROLLER) if processes.program(pid).startswith("slurmctld")]
    if not pids:
        raise SandboxError(
            f"Starting the controller of the sandbox {layout.name!r} again:",
            "it is not running.",
            f"cluster-ddp sandbox down --name {layout.name}",
        )
    send(pids, signal.SIGKILL)


def bring_back_controller(layout: Layout) -> None:
    """slurmctld starts again; returns when steps run on all nodes.

    Raises:
        SandboxError: no step runs under it.
    """
    daemons.wait_until_usable(layout, layout.node_names, [daemons.start_controller(layout)])


def ranks(layout: Layout, job_id: int) -> list[Rank]:
    """The processes of a job's ranks that run Python by now, in the order of ranks.

    Known by the environment that they were started with: the agents of tasks, which are Python, too, have no folder for
    notes. Ranks that were forked, or have waited for a restart (`runtime.fork`), are known by their process's name.
    """
    wanted = {"SLURM_JOB_ID": str(job_id)}
    found = []
    for node in layout.node_names:
        for pid in processes_on(layout, node):
            environment = processes.environment(pid)
            if not wanted.items() <= environment.items() or not processes.program(pid).startswith("python"):
                continue
            rank = _named_rank(pid) or (environment.get("SLURM_PROCID", "") if Env.NOTES in environment else "")
            if rank.isdigit():
                found.append(Rank(int(rank), node, pid))
    return sorted(found)


def processes_of_job(layout: Layout, node: str, job_id: int) -> list[int]:
    """The processes of a job's tasks on a node, with those that they started."""
    mark = ("SLURM_JOB_ID", str(job_id))
    return [pid for pid in processes_on(layout, node) if mark in processes.environment(pid).items()]


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes; those that have ended by now are left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def hold(pid: int, *, for_s: float) -> None:
    """A process stands still for some seconds (SIGSTOP, SIGCONT), as on a node that is swapping."""
    send([pid], signal.SIGSTOP)
    try:
        time.sleep(for_s)
    finally:
        send([pid], signal.SIGCONT)


@contextmanager
def squatted_port(layout: Layout, host: str, port: int) -> Iterator[None]:
    """Somebody else holds a TCP port of a host: listening, so connections succeed, and silent for ever.

    The socket is made by a thread that has gone into the host's network for it: there is no process to be left behind.

    Raises:
        OSError: somebody holds it already.
    """
    with _socket_in(network.NAMESPACE_ROOT / layout.namespace(host)) as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # former connections may linger on the port
        thief.bind(("", port))
        thief.listen()
        yield


def processes_on(layout: Layout, host: str) -> list[int]:
    """The ids of all processes that live on a host of the sandbox."""
    return network.processes_in([network.NAMESPACE_ROOT / layout.namespace(host)])


def _named_rank(pid: int) -> str | None:
    """The rank of a process that was forked, or has waited to become one; something else for others of these programs.

    None for all other programs.
    """
    try:
        is_named = b"cluster_ddp.runtime.fork" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return processes.name(pid).removeprefix("rank-") if is_named else None
    except OSError:
        return "gone"


def _socket_in(namespace: Path) -> socket.socket:
    """A TCP socket of another network namespace: a socket stays in the one that it was made in."""
    made: list[socket.socket | OSError] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            with open(namespace) as there:
                if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns to {namespace}")
            made.append(socket.socket())
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)  # it ends there: the other threads stay where they are
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, OSError):
        raise result
    return result
