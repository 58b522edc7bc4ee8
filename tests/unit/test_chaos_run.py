"""What `make chaos` concludes from a training's records."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from chaos.run import Run


@pytest.mark.parametrize(
    ("times", "has_trained"),
    [([], False), ([3, 9], False), ([3, 40], False), ([40], False), ([40, 54], False), ([9, 40, 44, 55], True)],
)
def test_a_slow_start_is_no_training(times: list[float], has_trained: bool) -> None:
    """On a busy machine the first record came 22 s after a warning, which then stopped the training."""
    run = SimpleNamespace(records=lambda: [{"time": time} for time in times])
    assert Run.has_trained_for(run, 15, since_s=20) == has_trained  # type: ignore[arg-type]
