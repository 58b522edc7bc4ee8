"""Every verb where stdout, or all standard streams, are closed: no traceback, and no file gets their text."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.__main__ import VERBS

# What each verb prints without a cluster.
WORDS = {
    "completion": "bash",
    "doctor": "--autopsy run",
    "logs": "run",
    "report": "run",
    "submit": "--local --dry-run -- python train.py",
    "status": "",
    "env": "",
}


def said(verb: str, words: str, streams: str, folder: Path) -> tuple[int, str]:
    """The exit status, and what a verb prints to those streams that are left."""
    run = folder / "run"
    if not run.exists():
        run.mkdir()
        (run / "run.json").write_text("{}")
        (run / "job.log").write_text("It begins.\n")
        (run / "hang.txt").write_text("rank 1 hangs\n")
        (folder / "train.py").write_text("")
    line = f"{shlex.quote(sys.executable)} -m cluster_ddp {verb} {words} {streams}"
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("streams", [">&-", "<&- >&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("verb", "words"), [*WORDS.items(), *((verb, "--help") for verb in VERBS)])
def test_a_closed_stdout_is_no_error(verb: str, words: str, streams: str, tmp_path: Path) -> None:
    usual, _ = said(verb, words, ">/dev/null", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status, text = said(verb, words, streams, tmp_path)
    assert status == usual and "Traceback" not in text, text
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
