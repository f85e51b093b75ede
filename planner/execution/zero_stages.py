"""TODO."""

from __future__ import annotations

ZERO_LEVELS = (0, 1, 2, 3)
