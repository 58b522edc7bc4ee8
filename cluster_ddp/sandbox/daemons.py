"""The daemons of a sandbox: start them, and wait until they are of use."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cluster_ddp.errors import SandboxError, SlurmError
from cluster_ddp.sandbox import accounting, network
from cluster_ddp.sandbox.layout import CONTROLLER, Layout, environment_of, search_path
from cluster_ddp.slurm import commands

START_TIMEOUT_S = 180.0  # for a daemon that hangs: one that ends is noticed at once
_STEP_TIMEOUT_S = 20
SLURMCTLD_PORT = 6817  # slurm.conf(5): the default


class Daemon(NamedTuple):
    """A daemon that was started."""

    name: str
    process: subprocess.Popen[bytes]


def start_all(layout: Layout, *, with_accounting: bool) -> None:
    """Start all, and wait until a step has run on every node and all nodes are idle.

    Raises:
        SandboxError: a daemon has ended, or it takes longer than `START_TIMEOUT_S`.
    """
    daemons = _started(layout, with_accounting)
    wait_until_usable(layout, layout.node_names, daemons)
    if with_accounting and layout.gpus_per_node:
        accounting.limit_gpus(environment_of(layout.name))
    _wait_for(lambda: _all_idle(layout), layout, daemons)


def node_states(env: dict[str, str]) -> dict[str, str]:
    """Node -> its state, as sinfo prints it ("idle", "mixed", "down*" …).

    Raises:
        SlurmError: the controller does not answer.
    """
    command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"]
    return dict(line.split(maxsplit=1) for line in commands.run(command, env=env, timeout_s=15).splitlines())


def _started(layout: Layout, with_accounting: bool) -> list[Daemon]:
    munge = layout.munge_socket.parent
    files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={munge / name}" for option, name in files.items()]
    # --force: munged objects to running as root, but the key and the socket are root's here.
    munged = ["munged", "--force", f"--key-file={munge / 'key'}", *options]
    daemons = [_start(layout, CONTROLLER, [*munged, "--foreground"], "munged")]
    _wait_for(layout.munge_socket.exists, layout, daemons)
    if with_accounting:
        accounting.write(layout)
        daemons.append(_start(layout, CONTROLLER, accounting.database(layout), "mariadbd"))
        _wait_for((layout.folder / "database.socket").exists, layout, daemons)
        daemons.append(_start(layout, CONTROLLER, accounting.slurmdbd(layout), "slurmdbd"))
        _wait_for(lambda: _listens(layout, accounting.SLURMDBD_PORT), layout, daemons)
        accounting.define(layout, environment_of(layout.name))
    return [*daemons, start_controller(layout), *(start_node(layout, node) for node in layout.node_names)]


def start_controller(layout: Layout) -> Daemon:
    """Start slurmctld."""
    return _start(layout, CONTROLLER, ["slurmctld", "-D", "-f", str(layout.folder / "slurmctld.conf")], "slurmctld")


def start_node(layout: Layout, node: str) -> Daemon:
    """Start a node's slurmd."""
    return _start(layout, node, ["slurmd", "-D", "-N", node, "-f", str(layout.slurm_conf)], f"slurmd.{node}")


def _start(layout: Layout, host: str, command: list[str], log: str) -> Daemon:
    env = {key: value for key, value in os.environ.items() if "SLURM" not in key}
    env["PATH"] = search_path(layout.slurm)
    with open(layout.folder / "log" / f"{log}.out", "ab") as output:
        process = subprocess.Popen(
            network.enter(layout, host, command),
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Daemon(log, process)


def wait_until_usable(layout: Layout, nodes: Sequence[str], daemons: Sequence[Daemon]) -> None:
    """Wait until a step has run on each of `nodes`.

    A node that slurmctld calls idle may still refuse a launch with "Communication connection failure" (seen with
    22.05, just after its slurmd was started).

    Raises:
        SandboxError: one of `daemons` has ended, or it takes longer than `START_TIMEOUT_S`.
    """
    _wait_for(lambda: _listens(layout, SLURMCTLD_PORT), layout, daemons)
    _wait_for(lambda: _takes_steps(layout, nodes), layout, daemons)


def wait_until_given_up(layout: Layout, node: str) -> None:
    """Wait until slurmctld calls a node down.

    Raises:
        SandboxError: it takes longer than `START_TIMEOUT_S`.
    """
    env = environment_of(layout.name)
    _wait_for(lambda: node_states(env)[node].startswith("down"), layout, [], f"Waiting until {node} is down")


def _listens(layout: Layout, port: int) -> bool:
    """Whether a daemon on the controller's host accepts connections. Slurm's commands would try for ten seconds."""
    try:
        socket.create_connection((layout.controller_address, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def _takes_steps(layout: Layout, nodes: Sequence[str]) -> bool:
    """Whether a step with one task on each of these nodes succeeds. It needs one free CPU on each."""
    where = (f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", "--ntasks-per-node=1", "--mem=1", "--time=1")
    charged = ("--partition=main", f"--account={accounting.ACCOUNTS[0]}")
    step = ["timeout", str(_STEP_TIMEOUT_S), "srun", f"--immediate={_STEP_TIMEOUT_S // 2}", *where, *charged, "true"]
    with open(layout.folder / "log" / "srun.out", "wb") as output:
        return subprocess.run(step, env=environment_of(layout.name), stdout=output, stderr=output).returncode == 0


def _all_idle(layout: Layout) -> bool:
    try:
        states = node_states(environment_of(layout.name))
    except SlurmError:  # the controller is not listening yet
        return False
    return len(states) == layout.nodes and set(states.values()) == {"idle"}


def _wait_for(
    condition: Callable[[], bool], layout: Layout, daemons: Sequence[Daemon], doing: str = "Starting the sandbox"
) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        dead = [daemon.name for daemon in daemons if daemon.process.poll() is not None]
        if dead or time.monotonic() > deadline:
            complaint = f"{', '.join(dead)} ended" if dead else f"it took longer than {START_TIMEOUT_S:g} s"
            raise SandboxError(
                f"{doing} ({layout.name}):",
                f"{complaint}. The logs end with:\n{_log_ends(layout)}",
                "fix what they report, or check whether a firewall drops bridged packets: iptables -L FORWARD",
            )
        time.sleep(0.1)


def _log_ends(layout: Layout) -> str:
    logs = sorted((layout.folder / "log").iterdir())
    ends = ((log.name, log.read_text(errors="replace").splitlines()[-3:]) for log in logs)
    return "\n".join(f"    {name}: {line}" for name, lines in ends for line in lines)
