"""Fits recover the numbers that made the data; too little data gets a plain statement."""

from __future__ import annotations

import functools
import random

import pytest

from cluster_ddp.scaling import fit

COUNTS = (1, 2, 4, 8, 16, 32)


def noisy(rate: float, rng: random.Random) -> float:
    return rate * rng.uniform(0.995, 1.005)


@pytest.mark.parametrize("serial", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_amdahls_law(serial: float) -> None:
    rng = random.Random(0)
    model = fit.amdahl({n: noisy(1000 / (serial + (1 - serial) / n), rng) for n in COUNTS})
    assert isinstance(model, fit.Model)
    assert model.serial_part == pytest.approx(serial, rel=0.05, abs=0.001)
    assert model.samples_per_s(64) == pytest.approx(1000 / (serial + (1 - serial) / 64), rel=0.05)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize(("compute", "latency", "transfer"), [(1e-3, 2e-5, 4e-4), (1e-3, 0, 5e-4), (1e-3, 5e-5, 0)])
def test_the_model_of_communication(strong: bool, compute: float, latency: float, transfer: float) -> None:
    def rate(n: int) -> float:
        exchange = latency * (n - 1) + transfer * (n - 1) / n
        return 1 / (compute / n + exchange) if strong else n / (compute + exchange)

    model = fit.communication({n: rate(n) for n in COUNTS}, strong=strong)
    assert isinstance(model, fit.Model)
    assert model.coefficients == pytest.approx((compute, latency, transfer), rel=0.05, abs=1e-9)
    assert model.samples_per_s(64) == pytest.approx(rate(64), rel=0.05)
    measured = {n: rate(n) for n in COUNTS}
    assert fit.held_out_error(functools.partial(fit.communication, strong=strong), measured) == pytest.approx(
        0, abs=0.01
    )


def test_the_held_out_error_says_how_wrong_a_model_is() -> None:
    """Up to eight GPUs all is well; the sixteenth is on a slow network."""
    measured = {1: 100.0, 2: 200.0, 4: 400.0, 8: 800.0, 16: 800.0}
    assert fit.held_out_error(fit.amdahl, measured) == pytest.approx(1.0)
    assert fit.held_out_error(fit.amdahl, {1: 100.0, 2: 200.0, 4: 400.0}) is None
    assert fit.held_out_error(fit.amdahl, {}) is None


@pytest.mark.parametrize(("measured", "words"), [({}, "none"), ({2: 100.0}, "2"), ({1: 100.0, 4: 100.0}, "1, 4")])
def test_too_few_numbers_of_gpus(measured: dict[int, float], words: str) -> None:
    assert fit.amdahl(measured) == f"Amdahl's law was not fitted: it needs 3 numbers of GPUs; measured: {words}."
    said = fit.communication(measured, strong=False)
    assert said == f"the model of communication was not fitted: it needs 4 numbers of GPUs; measured: {words}."


def test_equal_throughputs_are_all_serial() -> None:
    model = fit.amdahl(dict.fromkeys(COUNTS, 100.0))
    assert isinstance(model, fit.Model) and model.serial_part == pytest.approx(1)
