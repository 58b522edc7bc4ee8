"""The tests' own ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from slowness import wait_until

from cluster_ddp.processes import started


def _waits() -> None:
    Path(os.environ["PID"]).write_text(str(os.getpid()))
    threading.Event().wait()


def test_a_rank_ends_with_the_tests_that_are_killed(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from ranks import run_ranks; from test_ranks_helper import _waits; "
    code += "run_ranks(_waits, [{'PID': sys.argv[1]}], Path(sys.argv[1]).parent)"
    noted, paths = tmp_path / "pid", os.pathsep.join(path for path in sys.path if path)
    tests = subprocess.Popen([sys.executable, "-c", code, str(noted)], env={**os.environ, "PYTHONPATH": paths})
    wait_until(lambda: noted.exists() and noted.read_text() != "")
    pid = int(noted.read_text())
    assert started(pid)
    tests.send_signal(signal.SIGKILL)
    tests.wait()
    wait_until(lambda: not started(pid))
