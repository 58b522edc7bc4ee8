"""A small disk of its own for a test's files, which can be full or stand still without harm to the machine's."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster_ddp.errors import SandboxError

_FILLER = ".filler"


@contextmanager
def mounted(folder: Path, *, size_mb: int) -> Iterator[None]:
    """An ext4 file system on `folder`, in a file beside it; mount it before `cluster.up`, so that the nodes see it.

    Raises:
        SandboxError: this machine has no loop devices or no ext4.
    """
    image = folder.parent / f"{folder.name}.img"
    folder.mkdir(exist_ok=True)
    try:
        with open(image, "wb") as file:
            file.truncate(size_mb << 20)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        _run("mount", "-o", "loop", str(image), str(folder))
        try:
            yield
        finally:
            _run("umount", "--lazy", str(folder))
    finally:
        image.unlink()


def fill(folder: Path) -> int:
    """Take all that is left of a file system. Returns how many bytes that was."""
    with open(folder / _FILLER, "ab", buffering=0) as file:
        start, before = file.tell(), -1
        while file.tell() > before:
            before = file.tell()
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            os.fsync(file.fileno())  # ext4 then gives back what it had reserved for its own books
        return file.tell() - start


@contextmanager
def kept_full(folder: Path) -> Iterator[None]:
    """Fill a file system, and again whenever room is given back; empty it at the end."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.02):
            fill(folder)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        empty(folder)


def empty(folder: Path) -> None:
    """Give back what `fill` has taken."""
    (folder / _FILLER).unlink(missing_ok=True)


def block(folder: Path, *, for_s: float) -> None:
    """Whatever writes to a file system waits for some seconds (fsfreeze), as on an NFS server that does not answer.

    Raises:
        SandboxError: the kernel refuses.
    """
    _run("fsfreeze", "--freeze", str(folder))
    try:
        time.sleep(for_s)
    finally:
        _run("fsfreeze", "--unfreeze", str(folder))


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        found = "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}."
    except OSError as error:
        found = f"{command[0]}: {error.strerror}."
    if found:
        asked = f"Making a disk with: {' '.join(command)}"
        raise SandboxError(asked, found, "it needs root, loop devices and ext4; containers often have none")
