"""TODO."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


FREE = frozenset({"Reshape", "Identity"})
