"""Every verb where standard streams are closed, or stdout's disk is full: no traceback, and no file gets their text."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import make_run
from slowness import LIMIT_S, scaled

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    make_run(tmp_path / "run")
    (tmp_path / "run" / "job.log").write_text("It begins.\n")
    (tmp_path / "run" / "hang.txt").write_text("rank 1 hangs\n")
    return tmp_path


def said(verb: str, words: str, streams: str, folder: Path) -> tuple[int, str]:
    """The exit status, and what a verb prints to those streams that are left."""
    line = f"{shlex.quote(sys.executable)} -m cluster_ddp {verb} {words} {streams}"
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=scaled(LIMIT_S))
    return done.returncode, done.stdout + done.stderr


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.fault(
    "a command's standard streams are closed", "it runs, its output is dropped, the exit status is as usual"
)
@pytest.mark.parametrize(("verb", "words"), WORDS.items())
def test_closed_streams_are_no_error(verb: str, words: str, folder: Path) -> None:
    usual, _ = said(verb, words, ">/dev/null", folder)
    before = contents(folder)
    for streams in (">&-", "<&- >&-", "<&- >&- 2>&-"):
        status, text = said(verb, words, streams, folder)
        assert status == usual and "Traceback" not in text, (streams, text)
        assert contents(folder) == before, streams


@pytest.mark.parametrize("verb", VERBS)
def test_help_to_a_closed_stdout_is_no_error(verb: str, folder: Path) -> None:
    before = contents(folder)
    status, text = said(verb, "--help", ">&-", folder)
    assert status == 0 and "Traceback" not in text, text
    assert contents(folder) == before


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("verb", "words"), WORDS.items())
def test_a_full_disk_behind_stdout_is_one_error(
    verb: str, words: str, unbuffered: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    status, text = said(verb, words, ">/dev/full", folder)
    assert status == 2, text
    error = f"cluster-ddp {verb}: error: Writing to stdout:\n  No space left on device.\n  Hint: free space there"
    assert text.startswith(error) and text.count("\n") == 3, text
