"""The rule for sums in another order is the one of the C++ tests."""

import pytest
import torch

from tests.python.sum_order import MARGIN, SMALL_MODEL, near, sum_tolerance


def test_has_the_values_of_the_header():
    """tests/support/sum_order_test.cpp has them too."""
    expected = [(1, 1, 1.0, 1.430511e-07), (64, 36, 0.5, 3.433228e-06)]
    for addends, in_a_row, size, value in expected:
        found = sum_tolerance(addends, in_a_row, size) / MARGIN
        assert found == pytest.approx(value, rel=1e-6)


def test_assert_close_has_it_as_default():
    one = torch.ones(3)
    torch.testing.assert_close(one * (1 + SMALL_MODEL), one)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(one * (1 + 3 * SMALL_MODEL), one)
    torch.testing.assert_close(one * (1 + SMALL_MODEL / 2), one, **near(one))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(one * (1 + 2 * SMALL_MODEL), one, **near(one))
