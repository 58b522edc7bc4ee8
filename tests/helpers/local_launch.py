"""`cluster-ddp launch --ranks 2` on this machine, as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slowness import LIMIT_S, scaled


def launch(folder: Path, *words: str, **env: str) -> tuple[int, str]:
    """Start two ranks in a folder: options, "--", a command. Returns the exit status and what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "cluster_ddp", "launch", "--ranks", "2", *words],
        env={**os.environ, **env},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scaled(LIMIT_S),
    )
    return done.returncode, done.stdout
