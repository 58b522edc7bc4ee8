"""The table of how long examples/ddp.py takes on several ranks."""

from __future__ import annotations

import ddp_timing
import pytest


@pytest.mark.quick
def test_the_table_has_medians_and_compares_with_the_first_number_of_ranks() -> None:
    runs = {1: [(4.0, 0.5), (6.0, 0.7), (5.0, 0.6)], 2: [(2.5, 0.5), (2.0, 0.4), (4.0, 0.3)]}
    assert ddp_timing.table(runs).splitlines()[2:] == [
        "| 1 | 5.00 s | 4.00 … 6.00 | 1.00 | 0.6000 |",
        "| 2 | 2.50 s | 2.00 … 4.00 | 2.00 | 0.4000 |",
    ]
