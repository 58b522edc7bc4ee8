"""Start a sandbox, remove it, and show its state.

`python -m cluster_ddp.sandbox.cluster NAME PROCESS` removes one once the process that wants it has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cluster_ddp.errors import SandboxError
from cluster_ddp.sandbox import accounting, daemons, network, prerequisites, slurm_conf
from cluster_ddp.sandbox.layout import STATE_ROOT, Layout, check_name, environment_of

_REAPER = "cluster_ddp.sandbox.cluster"


def up(
    name: str,
    *,
    nodes: int,
    gpus_per_node: int,
    slurm: Path | None = None,
    with_accounting: bool = False,
    stays: bool = False,
) -> Layout:
    """Start a sandbox and wait until a step has run on every node and all nodes are idle. Returns its layout.

    Args:
        name: its name.
        nodes: compute nodes, 1–64.
        gpus_per_node: dummy GPUs per node, 0–16.
        slurm: the prefix of its Slurm; None for the PATH's.
        with_accounting: whether it has accounts and limits.
        stays: whether it stays when this process ends.

    Raises:
        SandboxError: this machine can't run one, a name or size is not allowed, a sandbox of that name exists, or this
            one did not start; then nothing of it is left.
    """
    prerequisites.require(slurm)
    if with_accounting:
        accounting.require(slurm)
    with _lock():
        layout = _with_free_index(Layout(name=name, index=0, nodes=nodes, gpus_per_node=gpus_per_node))
        try:
            if not stays:
                keep(name)
            slurm_conf.write(layout, slurm, with_accounting=with_accounting)
            network.build(layout)
            daemons.start_all(layout, with_accounting=with_accounting)
        except BaseException:
            _remove(name)
            raise
    return layout


def keep(name: str) -> None:
    """Let a sandbox end with this process, however that ends. A reaper sees to that; `down` ends it.

    It is in a session of its own: what interrupts or kills this process does not reach it.
    """
    command = [sys.executable, "-m", _REAPER, name, str(os.getpid())]
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
    with _lock():
        existed = _exists(name)
        _remove(name)
    return existed


def environment(name: str) -> dict[str, str]:
    """The environment for commands on the sandbox's login node (this machine itself).

    Raises:
        SandboxError: no sandbox of that name is up, or the name is not allowed.
    """
    check_name(name)
    if not (STATE_ROOT / name / "slurm.conf").exists():
        others = ", ".join(sorted(path.name for path in STATE_ROOT.glob("*") if path.is_dir())) or "none"
        found = f"it is not up; sandboxes on this machine: {others}."  # crashed ones included
        raise SandboxError(f"Using the sandbox {name!r}:", found, f"cluster-ddp sandbox up --name {name}")
    return environment_of(name)


def _exists(name: str) -> bool:
    """Whether any trace of a sandbox exists."""
    return (STATE_ROOT / name).exists() or bool(network.namespaces(name) or network.interfaces(name))


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One `up` or `down` at a time on a machine. The last sandbox's `down` removes the folder of all sandboxes."""
    while True:  # if the holder before removed the folder, it is made again
        STATE_ROOT.mkdir(mode=0o755, exist_ok=True)
        descriptor = os.open(STATE_ROOT, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if STATE_ROOT.exists() and os.path.samestat(os.fstat(descriptor), STATE_ROOT.stat()):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        if not any(STATE_ROOT.iterdir()):
            STATE_ROOT.rmdir()
        os.close(descriptor)


def _with_free_index(layout: Layout) -> Layout:
    """The layout with an index that no other sandbox has, noted in its folder, which is made. Needs the lock.

    Raises:
        SandboxError: a sandbox of that name exists, or no subnet is free.
    """
    asked = f"Starting the sandbox {layout.name!r}:"
    if _exists(layout.name):
        hint = (
            f"use it (cluster-ddp sandbox status --name {layout.name}), remove it "
            f"(… down --name {layout.name}), or start another (… up --name OTHER)"
        )
        raise SandboxError(asked, "a sandbox of that name exists already.", hint)
    taken = {path.read_text().strip() for path in STATE_ROOT.glob("*/index")}
    for index in range(256):
        ours = dataclasses.replace(layout, index=index)
        if str(index) not in taken and network.subnet_is_free(ours):
            ours.folder.mkdir(mode=0o755)
            (ours.folder / "index").write_text(f"{index}\n")
            return ours
    raise SandboxError(
        asked,
        "every subnet 10.213.0.0/24 to 10.213.255.0/24 is in use on this machine.",
        f"remove a sandbox: cluster-ddp sandbox down --name NAME   (their names: ls {STATE_ROOT})",
    )


def _remove(name: str) -> None:
    """Remove every part of a sandbox that exists. No step needs the others to succeed."""
    network.end_processes(name)
    network.remove(name)
    shutil.rmtree(STATE_ROOT / name, ignore_errors=True)
    while others := _reapers(name) - {os.getpid()}:  # last: if this process is killed before, they go on
        for process in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _reapers(name: str) -> set[int]:
    """The processes that are to remove a sandbox of this name."""
    words = f"\0{_REAPER}\0{name}\0".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found |= {int(path.parent.name)} if words in path.read_bytes() else set()
    return found


def _reap(name: str, process: int) -> None:
    """Wait for the end of a process, in whatever way it comes (pidfd_open(2)), then remove a sandbox."""
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(process)
        if os.getppid() == process:  # else it has ended already, and its id may be another's
            with selectors.DefaultSelector() as selector:
                selector.register(ended, selectors.EVENT_READ)
                selector.select()
    down(name)


if __name__ == "__main__":
    _reap(sys.argv[1], int(sys.argv[2]))
