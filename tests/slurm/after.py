"""`python after.py LINES script.py …`, or `… -m module …`: run lines of bash, then Python's, in mounts of their own.

What a shell does before a command that srun starts (`wrapped` in cluster.py), for ranks that are forked.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys

CLONE_NEWNS = 0x20000

lines, *sys.argv = sys.argv[1:]
if lines.startswith("exec >"):
    os.dup2(os.open(lines.removeprefix("exec >"), os.O_WRONLY), 1)
else:
    libc = ctypes.CDLL(None, use_errno=True)
    private = 1 << 18 | 1 << 14  # MS_PRIVATE, MS_REC: as unshare(1) has it
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, private, None) == 0
    subprocess.run(["bash", "-ec", lines], check=True)
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
