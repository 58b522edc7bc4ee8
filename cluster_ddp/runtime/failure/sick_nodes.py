"""sick-nodes.txt: nodes that were found at fault. The batch script leaves them behind (`--requeue-elsewhere`).

Errors of the user's code never belong there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.contract import Env, File
from cluster_ddp.errors import printable
from cluster_ddp.files import open_own

_LONGEST = 300


def note(env: Mapping[str, str], node: str, why: str) -> None:
    """Append a node. If it can't be written, nothing is said: the job then ends as it would without the note.

    Args:
        env: an environment, such as os.environ; without `Env.RUN_DIR` there, nothing is done.
        node: its name in Slurm.
        why: what is wrong with it.
    """
    if not (run_dir := env.get(Env.RUN_DIR)) or not node or len(node.split()) != 1:
        return
    line = f"{node} {printable(' '.join(why.split()))[:_LONGEST]}\n"
    with contextlib.suppress(OSError):
        descriptor = open_own(Path(run_dir) / File.SICK_NODES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with open(descriptor, "ab", buffering=0) as file:
            file.write(line.encode())
