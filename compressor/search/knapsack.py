"""Choices under a budget, as a mixed-integer programme."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from compressor.errors import ToolchainError, UsageError

_LARGEST_COST, _LARGEST_SIZE = 1e4, 1e6  # the solver's tolerances are absolute, a millionth
_INFEASIBLE = 2  # of milp's states


def choose_within(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], budget: float) -> list[int]:
    """One alternative of each item, so that the costs' sum is the least that the sizes' sum allows.

    A multiple-choice knapsack, solved exactly (HiGHS, through :func:`scipy.optimize.milp`).

    Args:
        costs, sizes: of each item's alternatives; costs are not negative.
        budget: the most that the chosen sizes may sum to, but for rounding (1e-12 of it).
    Returns:
        the index of the alternative chosen for each item.
    Raises:
        UsageError: the smallest alternatives together exceed the budget.
        ToolchainError: the extra ``search`` is not installed, or the solver failed.
    """
    require_solver()
    least = sum(min(alternatives) for alternatives in sizes)
    if least > budget:
        raise UsageError(f"the budget, {amount(budget)}, is less than the smallest choice takes, {amount(least)}")
    scale = _LARGEST_SIZE / budget if budget > 0 else 1.0
    weights = [size * scale for alternatives in sizes for size in alternatives]
    picked = solve(costs, [(weights, budget * scale)])
    if picked is None:
        raise ToolchainError(f"the mixed-integer programme was not solved: no choice found within {amount(budget)}")
    return picked


def solve(costs: Sequence[Sequence[float]], bounds: Sequence[tuple[Sequence[float], float]]) -> list[int] | None:
    """Return the place of each item's alternative with the least sum of costs, or None if none is within all bounds.

    Args:
        costs: of each item's alternatives, not negative.
        bounds: a coefficient of every alternative, item after item, and the most that those chosen may sum to.  The
            solver's tolerances are absolute, so scale them.
    Raises:
        ToolchainError: the extra ``search`` is not installed, or the solver failed.
    """
    require_solver()
    import numpy as np
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    flat = np.array([cost for alternatives in costs for cost in alternatives], np.float64)
    if flat.max() > 0:
        flat = flat / flat.max() * _LARGEST_COST  # in this order, for the quotient of the two may be infinite
    counts = [len(alternatives) for alternatives in costs]
    one_each = sparse.csr_array(
        (np.ones(len(flat)), (np.repeat(np.arange(len(counts)), counts), np.arange(len(flat)))),
        shape=(len(counts), len(flat)),
    )
    limits = [LinearConstraint(np.array([row], np.float64), -np.inf, most) for row, most in bounds]
    found = milp(
        flat,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), *limits],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        if found.status == _INFEASIBLE:
            return None
        raise ToolchainError(f"the mixed-integer programme was not solved: {found.message}")
    ends = np.cumsum([0, *counts])
    return [int(found.x[first:last].argmax()) for first, last in itertools.pairwise(ends)]


def require_solver() -> None:
    """Refuse an installation without the solver.

    Raises:
        ToolchainError: the extra ``search`` is not installed.
    """
    try:
        import scipy.optimize  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise ToolchainError(
            f"choosing under a budget needs scipy: pip install 'compressor[search]' ({error})"
        ) from error


def amount(value: float) -> str:
    """Format a number for messages, whatever its size."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
