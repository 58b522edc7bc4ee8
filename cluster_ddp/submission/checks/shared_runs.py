"""A folder of run directories in which others can put theirs in the place of ours: jobs load code from them."""

from __future__ import annotations

import shlex
from pathlib import Path

from cluster_ddp.ownership import others
from cluster_ddp.submission.checks.performance_warnings import Advice


def advise(folder: Path) -> list[Advice]:
    """Warn if somebody else can rename what is in a folder. One that does not exist yet will be ours.

    Args:
        folder: the folder that the run directory will be in.
    """
    try:
        found = others(folder.stat())
    except OSError:
        return []
    if not found:
        return []
    text = (
        f"{folder} {found}. So others can put a run directory of theirs in the place of yours, and a job that waits"
        f" would run its code. If it is to be shared, its owner can prevent that: chmod +t {shlex.quote(str(folder))}"
    )
    return [Advice("shared-runs", text)]
