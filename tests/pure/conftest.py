"""For tests that are soon done: without torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

_HINT = "Hint: a test that imports torch belongs in tests/ranks"


def pytest_collection_finish(session: pytest.Session) -> None:
    """No module here imports torch; seen where the tests of ranks were not collected, too."""
    if "torch" in sys.modules and all("tests/pure/" in item.nodeid for item in session.items):
        raise pytest.UsageError(f"a module in tests/pure imports torch. {_HINT}")


@pytest.fixture(autouse=True)
def without_torch() -> Iterator[None]:
    """Nor does a test."""
    before = "torch" in sys.modules
    yield
    assert before or "torch" not in sys.modules, _HINT
