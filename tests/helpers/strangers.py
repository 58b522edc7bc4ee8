"""A second local user, for tests of what such a one can do to us. Becoming one takes root, as in CI."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled

STRANGER = 65533
"""User and group id of somebody who is neither us nor "nobody" (65534, which file systems use for unknown users)."""
USER = 65532
"""Another one, for attacks that root would withstand."""
needs_a_stranger = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_stranger(*command: str | Path, user: int = STRANGER, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command as the stranger, or as another user, from /, in an environment with nothing but a PATH."""
    return subprocess.run(
        command,
        user=user,
        group=user,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=scaled(LIMIT_S),
    )


@contextmanager
def folder_of_all(mode: int = 0o1777) -> Iterator[Path]:
    """A folder that everybody can reach and, by its mode, write. pytest's own can be entered by one user only."""
    with tempfile.TemporaryDirectory(prefix="cluster-ddp-test-", dir="/tmp") as name:
        Path(name).chmod(mode)
        yield Path(name)
