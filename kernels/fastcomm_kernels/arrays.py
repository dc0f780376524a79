"""Name the types of arrays, and define the integer that stands for null in them."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

NULL = -(2**63)  # smallest int64
