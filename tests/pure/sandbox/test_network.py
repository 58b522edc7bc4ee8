"""What a sandbox finds of itself on the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster_ddp.sandbox import network
from cluster_ddp.sandbox.layout import namespace_prefix


def test_an_interface_that_vanishes_while_it_is_read_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone" / "ifalias").mkdir(parents=True)  # as unreadable as one that another sandbox has just removed
    for name, alias in (("ours", namespace_prefix("one")), ("theirs", namespace_prefix("two"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ifalias").write_text(f"{alias}\n")
    monkeypatch.setattr(network, "INTERFACES", tmp_path)
    assert network.interfaces("one") == ["ours"]


def test_a_namespace_that_vanishes_after_it_was_listed_has_no_processes(tmp_path: Path) -> None:
    gone, here = tmp_path / "gone", Path("/proc/self/ns/net")
    assert network.processes_in([gone]) == []
    assert os.getpid() in network.processes_in([gone, here])
