"""Typed access to the fields of a Hugging Face config.json, with errors that name file and field
(P074)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models_zoo.spec import LAYERS_LIMIT, WHOLE_LIMIT
from planner.errors import PlanError

LONGEST_DEFAULT = (
    4096  # a context window of 128 k is what a model can read, not what it is trained on
)


class Fields:
    """The fields; layers and parameters that the zoo does not write of such a model (`left_out`),
    and what else is not as in the library (`notes`)."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path, self.data = path, data
        self.notes: list[str] = []
        self.left_out: list[str] = []

    def whole(self, key: str, default: int, *, limit: int = WHOLE_LIMIT) -> int:
        """A whole number from 1 to `limit`; the default where the file has none, noted where it
        says null. Raises PlanError P074, as all of these do, for anything else."""
        value = self.data.get(key)
        if value is None:
            if key in self.data:
                self.notes.append(f"{key} is null in the file: {default} is taken")
            return default
        if type(value) is not int or not 1 <= value <= limit:
            raise self.bad(key, f"a whole number from 1 to {limit}")
        return value

    def maybe(self, key: str, *, limit: int = WHOLE_LIMIT) -> int | None:
        """A whole number as `whole`, None where the file has none."""
        return None if self.data.get(key) is None else self.whole(key, 1, limit=limit)

    def count(self, key: str, default: int) -> int:
        """A whole number that may be 0."""
        value = self.data.get(key)
        if value is None:
            return default
        return 0 if type(value) is int and value == 0 else self.whole(key, default)

    def wholes(self, key: str, default: list[int]) -> list[int]:
        """A short list of whole numbers."""
        value = self.data.get(key, default)
        if (
            not isinstance(value, list)
            or not 1 <= len(value) <= 8
            or any(type(n) is not int or not 1 <= n <= WHOLE_LIMIT for n in value)
        ):
            raise self.bad(key, "a list of up to 8 whole numbers")
        return value

    def layers(self, key: str, default: int) -> int:
        """A number of layers."""
        return self.whole(key, default, limit=LAYERS_LIMIT)

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self.data.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise self.bad(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.data.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.bad(key, "true or false")
        return value

    def one_of(self, key: str, default: str, allowed: Mapping[str, Any]) -> Any:
        """The value that `allowed` has for the word in the file."""
        value = self.data.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.bad(key, "one of " + ", ".join(allowed))
        return allowed[value]

    def bad(self, key: str, wanted: str) -> PlanError:
        """The error for a field that is not as `wanted`, P074."""
        return PlanError(
            "P074", f"{self.path}: {key} = {json.dumps(self.data.get(key))[:80]}: {wanted} expected"
        )

    def labels(self, default: int) -> int:
        """Number of classes, from id2label or num_labels."""
        table = self.data.get("id2label")
        return (
            len(table) if isinstance(table, dict) and table else self.whole("num_labels", default)
        )

    def length(self, key: str, default: int) -> int:
        """Sequence length to plan for: the context window, up to `LONGEST_DEFAULT`."""
        window = self.whole(key, default)
        if window > LONGEST_DEFAULT:
            self.notes.append(
                f"The context window is {window}; the graph has sequence length {LONGEST_DEFAULT}"
                " (--dim seq sets it)."
            )
        return min(window, LONGEST_DEFAULT)

    def only(self, key: str, value: Any, *also: Any) -> None:
        """Raise unless a field is absent or has the one value (or one of several) that the zoo
        writes."""
        if self.data.get(key) not in (None, value, *also):
            raise self.bad(key, json.dumps(value))
