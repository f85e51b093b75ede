"""Operators that cost nothing: they give another shape or another name to what they read."""

from __future__ import annotations

FREE = frozenset({"Reshape", "Identity"})
