"""Start a sandbox, remove it, and show its state."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.errors import SandboxError, SlurmError
from cluster_ddp.sandbox import accounting, claims, config, network, prerequisites
from cluster_ddp.sandbox.layout import CONTROLLER, SLURM, STATE_ROOT, Layout, check_name, search_path
from cluster_ddp.slurm import commands

START_TIMEOUT_S = 180.0  # for a daemon that hangs: one that ends is noticed at once
_STEP_TIMEOUT_S = 20
_KEEPER = "cluster_ddp.sandbox.keeper"
SLURMCTLD_PORT = 6817  # slurm.conf(5): the default


class Daemon(NamedTuple):
    """A daemon that `up` has started."""

    name: str
    process: subprocess.Popen[bytes]


def up(
    name: str,
    *,
    nodes: int,
    gpus_per_node: int,
    slurm: Path | None = None,
    with_accounting: bool = False,
    stays: bool = False,
) -> Layout:
    """Start a sandbox and wait until a step has run on every node and all nodes are idle.

    Args:
        name: of the sandbox.
        nodes: compute nodes, 1–64.
        gpus_per_node: dummy GPUs per node, 0–16.
        slurm: the prefix of its Slurm; None for the PATH's.
        with_accounting: whether it has accounts and limits (see `accounting`).
        stays: whether it stays when this process ends.

    Returns:
        Its names, addresses and paths. SLURM_CONF must point at `slurm_conf`.

    Raises:
        SandboxError: this machine can't run one, the name or a size is not allowed, a sandbox of that name exists, or
            this one did not start; then nothing of it is left.
    """
    prerequisites.require(slurm)
    if with_accounting:
        accounting.require(slurm)
    layout = Layout(name=name, index=0, nodes=nodes, gpus_per_node=gpus_per_node)
    with claims.claimed(layout) as layout:
        try:
            if not stays:
                keep(name)
            _set_up(layout, slurm, with_accounting)
        except BaseException:
            _remove(name)
            raise
    return layout


def keep(name: str) -> None:
    """Let a sandbox end with this process, however that ends. A keeper sees to that; `down` ends it."""
    command = [sys.executable, "-m", _KEEPER, name, str(os.getpid())]
    quiet = subprocess.DEVNULL
    subprocess.Popen(command, cwd="/", stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def down(name: str) -> bool:
    """Stop a sandbox and remove every trace of it, even if it crashed or never started.

    Returns:
        Whether there was anything to remove.

    Raises:
        SandboxError: not root, or the name is not allowed.
    """
    check_name(name)
    prerequisites.require_root()
    with claims.lock():
        existed = claims.exists(name)
        _remove(name)
    return existed


def environment(name: str) -> dict[str, str]:
    """The environment for commands on the sandbox's login node (this machine itself).

    Raises:
        SandboxError: no sandbox of that name is up, or the name is not allowed.
    """
    check_name(name)
    slurm_conf = STATE_ROOT / name / "slurm.conf"
    if not slurm_conf.exists():
        others = ", ".join(claims.names()) or "none"
        raise SandboxError(
            f"Using the sandbox {name!r}:",
            f"it is not up; sandboxes on this machine: {others}.",
            f"cluster-ddp sandbox up --name {name}",
        )
    outer = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    return {**outer, "SLURM_CONF": str(slurm_conf), "PATH": search_path(STATE_ROOT / name / SLURM)}


def node_states(name: str) -> dict[str, str]:
    """Node -> its state, as sinfo prints it ("idle", "mixed", "down*" …).

    Raises:
        SandboxError: no sandbox of that name is up.
        SlurmError: its controller does not answer.
    """
    arguments = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"]
    lines = commands.run(arguments, env=environment(name), timeout_s=15).splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def _set_up(layout: Layout, slurm: Path | None, with_accounting: bool) -> None:
    config.write(layout, slurm, with_accounting=with_accounting)
    network.build(layout)
    daemons = _start_daemons(layout, with_accounting)
    wait_until_usable(layout, layout.node_names, daemons)
    if with_accounting and layout.gpus_per_node:
        accounting.limit_gpus(environment(layout.name))
    _wait_for(lambda: _all_idle(layout), layout, daemons)


def _start_daemons(layout: Layout, with_accounting: bool) -> list[Daemon]:
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
        accounting.define(layout, environment(layout.name))
    return [*daemons, start_controller(layout), *(start_node(layout, node) for node in layout.node_names)]


def start_controller(layout: Layout) -> Daemon:
    """Start slurmctld."""
    return _start(layout, CONTROLLER, ["slurmctld", "-D", "-f", str(layout.slurmctld_conf)], "slurmctld")


def start_node(layout: Layout, node: str) -> Daemon:
    """Start a node's slurmd."""
    return _start(layout, node, ["slurmd", "-D", "-N", node, "-f", str(layout.slurm_conf)], f"slurmd.{node}")


def _start(layout: Layout, host: str, command: list[str], log: str) -> Daemon:
    environment = {key: value for key, value in os.environ.items() if "SLURM" not in key}
    environment["PATH"] = search_path(layout.slurm)
    with open(layout.folder / "log" / f"{log}.out", "ab") as output:
        process = subprocess.Popen(
            network.enter(layout, host, command),
            env=environment,
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

    Args:
        layout: of the sandbox.
        nodes: their names.
        daemons: those whose end is an error.

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
    _wait_for(lambda: node_states(layout.name)[node].startswith("down"), layout, [], f"Waiting until {node} is down")


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
        return subprocess.run(step, env=environment(layout.name), stdout=output, stderr=output).returncode == 0


def _all_idle(layout: Layout) -> bool:
    try:
        states = node_states(layout.name)
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


def _remove(name: str) -> None:
    """Remove every part of a sandbox that exists. No step needs the others to succeed."""
    network.end_processes(name)
    network.remove(name)
    shutil.rmtree(STATE_ROOT / name, ignore_errors=True)
    while others := _keepers(name) - {os.getpid()}:  # last: if this process is killed before, they go on
        for process in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _keepers(name: str) -> set[int]:
    """The processes that keep a sandbox of this name."""
    words = f"\0{_KEEPER}\0{name}\0".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found |= {int(path.parent.name)} if words in path.read_bytes() else set()
    return found
