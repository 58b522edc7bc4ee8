"""Writes files of the run directory, unless a newer start of the job has taken it: all of `runtime` writes with these.

A file is opened first and checked then: see `agent.job.restart.fence` for why this order leaves no gap.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cluster_ddp import files
from cluster_ddp.agent.job.restart import fence


def check() -> None:
    """Check that no newer start of the job has taken the run directory.

    Raises:
        RunDirError: one has.
        OSError: the run directory can't be read.
    """
    fence.refuse_older(os.environ)


def open_own(path: Path, flags: int, *, shared: bool | None = None) -> int:
    """Open a file for writing; see `files.open_own`.

    Raises:
        RunDirError, OSError: as `check`, or it can't be opened.
    """
    check()  # so that no empty file is made
    descriptor = files.open_own(path, flags & ~os.O_TRUNC, shared=shared)
    try:
        check()
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write a file whole or not at all; see `files.atomic_write`.

    Raises:
        RunDirError, OSError: as `check`, or it can't be written.
    """
    with files.atomic_write(path) as file:
        yield file
        check()
