"""Reading of files that others may have written: regular ones only, and never more than a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster_ddp.run import files


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(b" " * (8 << 20))
    assert len(files.read_text(path)) == 8 << 20
    path.write_bytes(b" " * ((8 << 20) + 1))
    with pytest.raises(OSError, match="larger than 8 MiB"):
        files.read_text(path)


def test_a_refused_file_leaves_no_descriptor(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = [*Path("/proc/self/fd").iterdir()]
    for _ in range(3):
        with pytest.raises(OSError, match="not a regular file"):
            files.read_text(tmp_path / "pipe")
    assert len([*Path("/proc/self/fd").iterdir()]) == len(before)


@pytest.mark.parametrize("depth", [51, 900, 100_000])
def test_deep_json_is_no_value(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"a":' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ValueError, match="nested too deeply"):
        files.read_json(path)
    path.write_text('{"a":' + "[" * 40 + "]" * 40 + "}")
    assert files.read_json(path)


def test_a_tail_is_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("first\nlast\n")
    assert files.tail(path, 5) == "last\n"
    assert files.tail(path) == "first\nlast\n"
    assert files.tail(tmp_path / "missing") == files.tail(tmp_path) == ""


def test_json_lines_are_objects_with_numbers_that_can_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n[1]\n{"b": 1' + "0" * 5000 + '}\n{"c"\n{"d": ' + "x" * (2 << 20) + '}\n{"e": 2}\n{"f"')
    assert files.json_lines(path) == [{"a": 1}, {"b": float("inf")}, {"e": 2}]
    assert files.json_lines(path, last_bytes=13) == [{"e": 2}]
    assert files.json_lines(tmp_path / "missing") == []
