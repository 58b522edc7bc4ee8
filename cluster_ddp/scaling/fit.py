"""Models of how a training scales, fitted to measured throughputs.

Amdahl's law (G. M. Amdahl, AFIPS 1967): the time of a sample is a + b / n on n GPUs; a / (a + b) is the serial part.

Communication: each step computes, then exchanges gradients, as a ring all-reduce does (R. Thakur et al., IJHPCA 2005):
c + latency * (n - 1) + transfer * (n - 1) / n. With a batch of its own for each GPU (weak scaling), c is constant; with
a global batch (strong scaling), it is divided by n.

All coefficients are at least 0, and the relative error is the least.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

Terms = Callable[[int], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A fitted model."""

    name: str
    """Of the model."""
    coefficients: tuple[float, ...]
    """In the order of its terms, in seconds per sample."""
    counts: tuple[int, ...]
    """The numbers of GPUs that it was fitted to; between them it interpolates."""
    terms: Terms
    """The terms of the time per sample on n GPUs."""
    held_out_error: float | None = None
    """See `held_out_error`."""

    def samples_per_s(self, gpus: int) -> float:
        """Return the throughput of a number of GPUs."""
        return 1 / sum(a * x for a, x in zip(self.coefficients, self.terms(gpus)))

    def efficiency(self, gpus: int) -> float:
        """Return the efficiency of a number of GPUs, against one GPU."""
        return self.samples_per_s(gpus) / self.samples_per_s(1) / gpus

    @property
    def serial_part(self) -> float:
        """Of Amdahl's law: the part of the time on one GPU that more GPUs don't shorten, 0 to 1."""
        serial, parallel = self.coefficients
        return serial / (serial + parallel)


def models(measured: Mapping[int, float], *, strong: bool) -> list[Model | str]:
    """Fit both models. Returns each; or, in words, why it can't be fitted.

    Args:
        measured: number of GPUs -> work per second.
        strong: whether all do the same work, with the same global batch.
    """
    found: list[Model | str] = []
    for fit in (amdahl, functools.partial(communication, strong=strong)):
        model = fit(measured)
        if isinstance(model, Model):
            model = replace(model, held_out_error=held_out_error(fit, measured))
        found.append(model)
    return found


def amdahl(measured: Mapping[int, float]) -> Model | str:
    """Fit Amdahl's law to number of GPUs -> samples per second. Returns it; or, in words, why it can't be fitted."""
    return _fitted("Amdahl's law", lambda n: (1.0, 1 / n), measured)


def communication(measured: Mapping[int, float], *, strong: bool) -> Model | str:
    """Fit the model of communication, as `amdahl` does. `strong`: whether the global batch is the same for all."""

    def terms(n: int) -> tuple[float, ...]:
        step = (1 / n if strong else 1.0, n - 1.0, (n - 1) / n)
        return step if strong else tuple(term / n for term in step)

    return _fitted("the model of communication", terms, measured)


def held_out_error(fit: Callable[[Mapping[int, float]], Model | str], measured: Mapping[int, float]) -> float | None:
    """Return how wrong a model is about the largest measured number of GPUs if it is fitted to the others.

    It is relative, such as 0.04 if the predicted throughput is 4 % too high; None if too few are measured.
    """
    if not measured:
        return None
    largest = max(measured)
    model = fit({count: rate for count, rate in measured.items() if count != largest})
    return None if isinstance(model, str) else model.samples_per_s(largest) / measured[largest] - 1


def _fitted(name: str, terms: Terms, measured: Mapping[int, float]) -> Model | str:
    counts = tuple(sorted(measured))
    unknowns = len(terms(1))
    if len(counts) <= unknowns:
        numbers = ", ".join(map(str, counts)) or "none"
        return f"{name} was not fitted: it needs {unknowns + 1} numbers of GPUs; measured: {numbers}."
    rows = [[term * measured[count] for term in terms(count)] for count in counts]  # times 1 / (seconds per sample)
    return Model(name=name, coefficients=_at_least_0(rows), counts=counts, terms=terms)


def _at_least_0(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The coefficients, at least 0, for which all rows are nearest to 1: least squares over each choice of terms."""
    import numpy as np

    matrix, unknowns = np.array(rows), len(rows[0])
    best: tuple[float, tuple[float, ...]] | None = None
    for size in range(unknowns, 0, -1):
        for chosen in itertools.combinations(range(unknowns), size):
            solved = np.linalg.lstsq(matrix[:, chosen], np.ones(len(rows)), rcond=None)[0]
            if (solved < 0).any():
                continue
            coefficients = [0.0] * unknowns
            for at, value in zip(chosen, solved):
                coefficients[at] = float(value)
            error = float(((matrix @ np.array(coefficients) - 1) ** 2).sum())
            if best is None or error < best[0] * (1 - 1e-9):
                best = error, tuple(coefficients)
    assert best is not None  # one term alone has a coefficient above 0
    return best[1]
