"""TODO."""

from __future__ import annotations

ZERO_STAGES = (0, 1, 2, 3)
