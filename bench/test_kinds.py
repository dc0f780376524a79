"""Rows alike of several columns, beside what a sort of the columns takes."""

import numpy as np

from fastcomm_kernels.grouping import kinds

ROWS = 1_000_000


def test_kinds(bar):
    columns = np.random.default_rng(0).integers(0, 8, (3, ROWS))
    bar("kinds", lambda: kinds(columns), lambda: np.lexsort(columns), count=ROWS)
