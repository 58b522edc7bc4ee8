"""What `status` says of a running training whose disk is full: a small file system of its own, in its own namespace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import unshare
from slowness import LIMIT_S, scaled

IN_ITS_NAMESPACE = r"""
set -e
mount -t tmpfs -o size=1m none "$1"
mkdir "$1/training-7"
run="$1/training-7" python=$2
"$python" - "$run/.lock" <<'PYTHON' &
import fcntl, json, os, sys, time
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
json.dump({"process": os.getpid()}, lock)
lock.flush()
time.sleep(600)
PYTHON
trap "kill $!" EXIT
until grep -q process "$run/.lock"; do sleep 0.05; done 2>/dev/null
show() { "$python" -m cluster_ddp status --runs-dir "$1"; echo ==; }
show "$1"
head -c 900000 /dev/zero >"$run/large"
touch -d "+5 min" "$run/.lock"
show "$1"
head -c 900000 /dev/zero >"$run/too large" 2>/dev/null || true
touch "$run/.lock"
show "$1"
"""


@pytest.mark.fault(
    "the disk is full when the training ends",
    "unwritten data is retried; `status` says what the job waits for and until when",
    bound="10 min",
    also=("test_a_disk_that_stays_full_ends_in_an_error",),
)
@pytest.mark.quick
def test_a_running_training_whose_disk_is_full(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    command = [
        *unshare("--user", "--map-root-user", "--mount"),
        "bash",
        "-c",
        IN_ITS_NAMESPACE,
        "bash",
        str(folder),
        sys.executable,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(LIMIT_S), check=False)
    assert done.returncode == 0, done.stderr
    free, waits, full, _ = done.stdout.split("==\n")
    assert all("RUNNING" in table for table in (free, waits, full)), done.stdout
    assert "disk" not in free
    assert "training-7: the training has ended, and waits until " in waits
    assert "Its disk has 0 MB free. Hint: make room: df -h " in waits
    assert "training-7: its disk is full: logs, metrics and checkpoints are not written. Hint: make room: df -h" in full
