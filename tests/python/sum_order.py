"""Bounds the difference of results that add the same numbers in another order. The rule
is derived in tests/support/sum_order.h."""

import math
import os

import torch

FLOAT_ROUNDOFF = 2.0**-24
BFLOAT16_ROUNDOFF = 2.0**-8
MARGIN = float(os.environ.get("FLATSHARD_TEST_MARGIN", 4))


def sum_tolerance(addends, in_a_row=1, size=1.0, roundoff=FLOAT_ROUNDOFF):
    """Largest difference of two results: `addends` of the longest sum, sums in a row
    between inputs and result, largest magnitude of a partial sum."""
    return MARGIN * 2.4 * math.sqrt(in_a_row * addends) * roundoff * size


# The small models of these tests: at most 64 addends, six sums in a row in a forward, as
# many in a backward, three steps. AdamW divides by at least its eps, 1e-4 here, and its
# rate is 1e-2: it grows errors of gradients of 0.1 tenfold, and those are sums over ranks
# and microbatches of one step.
SMALL_MODEL = sum_tolerance(64, in_a_row=2 * 6 * 3)


def near(expected, tolerance=SMALL_MODEL):
    """assert_close's tolerances, relative to the largest of `expected`."""
    largest = expected.detach().abs().max().item() if expected.numel() else 0.0
    return {"rtol": 0.0, "atol": tolerance * largest}


def use_as_default():
    """torch.testing.assert_close compares float32 within SMALL_MODEL where a test names
    no tolerance. Its own (1.3e-6 and 1e-5) have no reason in the number of addends."""
    precisions = torch.testing._comparison._DTYPE_PRECISIONS
    precisions[torch.float32] = (SMALL_MODEL, SMALL_MODEL)
