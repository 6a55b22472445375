import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replicas.least_squares import nonnegative_least_squares


@given(st.integers(0, 2**32 - 1), st.integers(1, 16), st.integers(1, 60))
def test_no_step_within_the_bounds_makes_the_fit_better(seed: int, unknowns: int, samples: int) -> None:
    draw = np.random.default_rng(seed)
    rows, values = draw.normal(size=(samples, unknowns)), draw.normal(size=samples)
    gram = rows.T @ rows + 1e-6 * np.eye(unknowns)
    target = rows.T @ values
    x = nonnegative_least_squares(gram, target)
    gradient = gram @ x - target
    assert (x >= 0).all()
    assert (gradient >= -1e-6).all()  # what is 0 would have to fall below it
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-6


def test_equal_columns_do_no_harm() -> None:
    rows = np.ones((10, 3))
    x = nonnegative_least_squares(rows.T @ rows + 1e-6 * np.eye(3), rows.sum(axis=0))
    assert abs(x.sum() - 1.0) < 1e-6
