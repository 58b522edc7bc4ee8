"""Every verb where standard streams are closed, or stdout's disk is full: no traceback, and no file gets their text."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import make_run

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
    if not (folder / "train.py").exists():
        (folder / "train.py").write_text("")
        make_run(folder / "run")
        (folder / "run" / "job.log").write_text("It begins.\n")
        (folder / "run" / "hang.txt").write_text("rank 1 hangs\n")
    line = f"{shlex.quote(sys.executable)} -m cluster_ddp {verb} {words} {streams}"
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("verb", "words", "streams"), [
    *((verb, words, streams) for verb, words in WORDS.items() for streams in (">&-", "<&- >&-", "<&- >&- 2>&-")),
    *((verb, "--help", ">&-") for verb in VERBS),
])  # fmt: skip
def test_a_closed_stdout_is_no_error(verb: str, words: str, streams: str, tmp_path: Path) -> None:
    usual, _ = said(verb, words, ">/dev/null", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status, text = said(verb, words, streams, tmp_path)
    assert status == usual and "Traceback" not in text, text
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("verb", "words"), WORDS.items())
def test_a_full_disk_behind_stdout_is_one_error(
    verb: str, words: str, unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    status, text = said(verb, words, ">/dev/full", tmp_path)
    assert status == 2, text
    error = f"cluster-ddp {verb}: error: Writing to stdout:\n  No space left on device.\n  Hint: free space there"
    assert text.startswith(error) and text.count("\n") == 3, text
