"""Array types of the detector."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
State = dict[str, Any]
"""What a part of the detector saves: arrays, numbers, strings, and lists and dicts of them."""
