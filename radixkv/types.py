"""The array types that every rank shares. No logic."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenIds: TypeAlias = NDArray[np.int32]
PageIds: TypeAlias = NDArray[np.int32]
SlotMapping: TypeAlias = NDArray[np.int64]
Namespace: TypeAlias = tuple[str | int | None, ...]
"""Key of one tree in the forest: typed fields, never a joined string. ``()`` is the default one."""
