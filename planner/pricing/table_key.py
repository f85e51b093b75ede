"""Tables of reshard seconds that outlive a search: how they are named, and what keeps them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import numpy as np


class TableStore(Protocol):
    """Whatever keeps tables under their keys (planner.cache.reshard_tables)."""

    def array(
        self, key: bytes, rows: int, columns: int, make: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """The table of a key [rows, columns], not to be written to: as it was kept, or made."""


def key_of(*parts: bytes) -> bytes:
    """The key of a table that follows from these parts."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()
