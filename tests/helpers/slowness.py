"""Time limits of tests are for hangs only: all are multiplied by how slow this machine is now."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable

NOMINAL_S = 2.0
"""What `import torch` takes on an idle core of a machine from 2022."""
LIMIT_S = 600.0
"""How long a test waits for an event, at most."""
VARIABLE = "TESTS_SLOWNESS"
"""So that processes of tests need not measure again."""


def scaled(seconds: float) -> float:
    """A time limit in seconds, longer on a machine that is slow or busy."""
    return seconds * slowness()


def wait_until(condition: Callable[[], object], *, said: Callable[[], object] = str, pause_s: float = 0.05) -> None:
    """Wait until something holds, at most `LIMIT_S`, scaled. `said`: what a failure shows.

    Give a longer `pause_s` where the condition asks Slurm or looks at all processes: that costs CPU time.
    """
    deadline = time.monotonic() + scaled(LIMIT_S)
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(pause_s)


def stays(condition: Callable[[], object], seconds: float = 0.5, *, pause_s: float = 0.05) -> None:
    """Check that something holds, also for a while in which its end would come. A slow machine fails nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert condition()
        time.sleep(pause_s)
    assert condition()


@functools.cache
def slowness() -> float:
    """How many times longer than `NOMINAL_S` the import of torch takes, at least 1; measured once in a session."""
    if VARIABLE not in os.environ:
        taken_s = _import_s()
        if taken_s > NOMINAL_S:  # the first may find nothing compiled, and no file in memory
            taken_s = min(taken_s, _import_s())
        os.environ[VARIABLE] = str(max(1.0, taken_s / NOMINAL_S))
    return float(os.environ[VARIABLE])


def _import_s() -> float:
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - begun
