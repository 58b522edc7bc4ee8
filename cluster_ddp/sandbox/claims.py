"""Which sandboxes exist, and the name and the subnet that a new one takes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster_ddp.errors import SandboxError
from cluster_ddp.sandbox import network
from cluster_ddp.sandbox.layout import STATE_ROOT, Layout


def exists(name: str) -> bool:
    """Whether any trace of a sandbox exists."""
    return (STATE_ROOT / name).exists() or bool(network.namespaces(name) or network.interfaces(name))


def names() -> list[str]:
    """The names of this machine's sandboxes, crashed ones included."""
    return sorted(path.name for path in STATE_ROOT.glob("*") if path.is_dir())


@contextmanager
def lock() -> Iterator[None]:
    """One `up` or `down` at a time on a machine. The last sandbox's `down` removes the folder of all sandboxes."""
    descriptor = _locked_state_root()
    try:
        yield
    finally:
        if not any(STATE_ROOT.iterdir()):
            STATE_ROOT.rmdir()
        os.close(descriptor)


def _locked_state_root() -> int:
    """The descriptor of the folder of all sandboxes, locked. If the holder before removed it, it is made again."""
    while True:
        STATE_ROOT.mkdir(mode=0o755, exist_ok=True)
        descriptor = os.open(STATE_ROOT, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if STATE_ROOT.exists() and os.path.samestat(os.fstat(descriptor), STATE_ROOT.stat()):
            return descriptor
        os.close(descriptor)


@contextmanager
def claimed(layout: Layout) -> Iterator[Layout]:
    """The layout with a free index. Its folder is made, and the index is written into it. Holds the lock.

    Raises:
        SandboxError: a sandbox of that name exists, or no subnet is free.
    """
    with lock():
        if exists(layout.name):
            raise SandboxError(
                f"Starting the sandbox {layout.name!r}:",
                "a sandbox of that name exists already.",
                f"use it (cluster-ddp sandbox status --name {layout.name}), remove it "
                f"(… down --name {layout.name}), or start another (… up --name OTHER)",
            )
        taken = {_index(name) for name in names()}
        free = (
            candidate
            for candidate in (_with_index(layout, index) for index in range(256))
            if candidate.index not in taken and network.subnet_is_free(candidate)
        )
        ours = next(free, None)
        if ours is None:
            raise SandboxError(
                f"Starting the sandbox {layout.name!r}:",
                "every subnet 10.213.0.0/24 to 10.213.255.0/24 is in use on this machine.",
                f"remove a sandbox: cluster-ddp sandbox down --name NAME   (their names: ls {STATE_ROOT})",
            )
        ours.folder.mkdir(mode=0o755)
        _index_file(layout.name).write_text(f"{ours.index}\n")
        yield ours


def _with_index(layout: Layout, index: int) -> Layout:
    return Layout(name=layout.name, index=index, nodes=layout.nodes, gpus_per_node=layout.gpus_per_node)


def _index_file(name: str) -> Path:
    return STATE_ROOT / name / "index"


def _index(name: str) -> int | None:
    try:
        return int(_index_file(name).read_text())
    except (OSError, ValueError):
        return None
