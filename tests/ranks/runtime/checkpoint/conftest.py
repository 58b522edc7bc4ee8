"""For trainings in this process, in a world of one."""

from __future__ import annotations

import pytest

from cluster_ddp.runtime.checkpoint import stop_agreement
from cluster_ddp.runtime.run_dir import background_writer


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks agree after every step, not only about once a second."""
    monkeypatch.setattr(stop_agreement, "AGREE_EVERY_S", 0.0)
    monkeypatch.setattr(background_writer, "_files", [])  # which the world of all tests would wait for
