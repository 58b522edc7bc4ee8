"""A running training whose disk is full. It can't say so itself: its logs are on that disk."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

from cluster_ddp.protocol import File


def in_words(run_dir: Path) -> str | None:
    """Return what a running training can't write, and until when it waits for that; None if nothing is known.

    Args:
        run_dir: its run directory. Its lock file says until when (`File.LOCK`), its file system how much is free.
    """
    try:
        space = os.statvfs(run_dir)
        until_s = (run_dir / File.LOCK).stat().st_mtime
    except OSError:
        return None
    free_mb = space.f_bavail * space.f_frsize / 1e6
    hint = f"Hint: make room: df -h {shlex.quote(str(run_dir))}; or see quota"
    if until_s > time.time():
        until = time.strftime("%H:%M:%S", time.localtime(until_s))
        found = f"the training has ended, and waits until {until} to write its last files; the rest is lost then"
        return f"{found}. Its disk has {free_mb:,.0f} MB free. {hint}"
    if space.f_bavail == 0:
        return f"its disk is full: logs, metrics and checkpoints are not written. {hint}"
    return None
