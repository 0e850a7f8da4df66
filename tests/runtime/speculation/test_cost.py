"""What speculation is expected to gain, against figures of the literature and against a simulation."""

from __future__ import annotations

import numpy as np
import pytest
from compressor_runtime.speculation.cost import best_count, expected_tokens, forecast

FLAT = [1.0] * 40


@pytest.mark.parametrize(
    ("draft_cost", "wanted"),
    [(0.5, (1.13, 1.22, 1.38, 1.51)), (0.25, (1.46, 1.69, 2.09, 2.47)), (0.1, (1.98, 2.47, 3.43, 4.48))],
)
def test_bounds_where_a_verification_takes_a_step(draft_cost: float, wanted: tuple[float, ...]) -> None:
    found = [forecast(acceptance, draft_cost, FLAT).speedup for acceptance in (0.7, 0.8, 0.9, 0.95)]
    assert found == pytest.approx(wanted, abs=0.006)


def test_a_forecast_is_what_a_simulation_gives() -> None:
    random, verification = np.random.default_rng(0), [1 + 0.08 * k for k in range(1, 17)]
    for acceptance, draft_cost in ((0.5, 0.02), (0.8, 0.1), (0.9, 0.3), (0.7, 0.6)):
        best = forecast(acceptance, draft_cost, verification)

        def simulated(length: int, acceptance: float = acceptance, draft_cost: float = draft_cost) -> float:
            right = random.random((20_000, length)) < acceptance
            tokens = 1 + np.cumprod(right, axis=1).sum(axis=1).mean()
            return float(tokens / (verification[length - 1] + length * draft_cost))

        assert best.speedup == pytest.approx(simulated(best.length), rel=0.02)
        assert best.speedup >= max(simulated(length) for length in range(1, 17)) * 0.98


def test_a_forecast_in_words() -> None:
    assert str(forecast(0.7, 0.6, [1.2, 1.4])) == (
        "would not pay: a draft step costs 0.6 of a step, acceptance 0.7, 0.94x expected"
    )
    assert str(forecast(0.8, 0.25, FLAT)).startswith("pays with 3 tokens a draft: a draft step costs 0.25 of a step")
    assert expected_tokens(0.5, 2) == 1.75


def test_as_many_rows_as_pay() -> None:
    assert best_count([0.9, 0.5, 0.2], 1, lambda rows: 1 + 0.3 * (rows - 1)) == 2
    assert best_count([0.9, 0.5, 0.2], 1, lambda rows: 1) == 3
    assert best_count([0.2, 0.1], 1, lambda rows: 1 + 0.3 * (rows - 1)) == 0
    assert best_count([0.35], 1, lambda rows: 1 + 0.3 * (rows - 1), margin=0.05) == 0
    assert best_count([0.9] * 8, 4, lambda rows: 1 + 0.1 * (rows - 4)) == 8
    assert best_count([0.3] * 8, 4, lambda rows: 1 + 0.1 * (rows - 4)) == 0  # a row for 0.3 tokens; four rows give four
