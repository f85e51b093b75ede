"""Values that a file does not say itself."""

from __future__ import annotations

from typing import Any


class Unset(str):
    """A value that a file does not say: the name of the variable that would, "(" for what a command
    would print, "=" for what is computed where a file of Python runs."""


def shown(value: Any) -> str:
    """A value as people read it."""
    if not isinstance(value, Unset):
        return repr(value)
    return {"(": "what a command prints", "=": "computed where the file runs"}.get(
        value, f"${value}"
    )


COMPUTED = Unset("=")
"""What is computed where a file of Python runs."""
