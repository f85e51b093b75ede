"""TODO."""

from __future__ import annotations

FREE = frozenset({"Reshape", "Identity"})
