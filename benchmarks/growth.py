"""How a cost grows with the number of ranks: the exponent of a power law, fitted by least squares of the logarithms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping


def exponent(cost_by_ranks: Mapping[int, float]) -> float:
    """The k of the best fit cost = c * ranks**k: 0 for a constant cost, 1 for one that is proportional to the ranks."""
    points = [(math.log(ranks), math.log(cost)) for ranks, cost in cost_by_ranks.items()]
    x_mean, y_mean = (statistics.fmean(values) for values in zip(*points))
    return math.fsum((x - x_mean) * (y - y_mean) for x, y in points) / math.fsum((x - x_mean) ** 2 for x, _ in points)
