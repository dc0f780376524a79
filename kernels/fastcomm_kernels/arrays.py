"""Name the types of arrays, and define the integers that stand for null in them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Numbers = NDArray[np.int32]  # of rows, nodes, lanes and the like, or codes
Floats = NDArray[np.float64]
Ids = NDArray[Any]  # int16 or int32
Flags = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Matrix = NDArray[np.int64]  # with two axes

NULL = -(2**63)  # no value: the smallest int64
NONE = -1  # no row, node or edge, in arrays of their numbers
