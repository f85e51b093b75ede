"""Configuration files of launchers as flat keys: which are read, which contradict each other, which
stay unread.

Sections are folded: `model_parallel: {tensor_model_parallel_size: 8}`,
`--tensor-model-parallel-size: 8` and the bare key are one. A key in two entries with two values is
an error. Tables whose keys are names of the user's (WHOLE) are values.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from costmodels.hardware.intake import read_text
from planner.errors import PlanError

DEEPEST = 4
WHOLE = frozenset({"tp_plan", "base_model_tp_plan"})
EXPECTED = (
    "a configuration of Megatron or MaxText (YAML), of torchtitan (TOML) or Hugging Face (JSON)"
)
LARGEST = 4 * 2**20
"""Bytes of a file: far above any configuration."""


def load(path: str | Path) -> dict[str, Any]:
    """The table in a .toml, .json, .yaml or .yml file. Raises PlanError P190."""
    path = Path(path)
    try:
        text = read_text(path, LARGEST)
    except OSError as e:
        raise PlanError("P190", f"cannot read {str(path)!r}: {e.strerror}", help=[EXPECTED]) from e
    except ValueError as e:
        raise PlanError("P190", f"{path} is not text") from e
    table = {".toml": _toml, ".json": _json}.get(path.suffix, _yaml)(text, path)
    if not isinstance(table, dict):
        raise PlanError("P190", f"{path} holds no table of keys", help=[EXPECTED])
    return table


def _toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise PlanError("P190", f"{path} is not TOML: {e}") from e


def _json(text: str, path: Path) -> Any:
    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return _once(pairs, path)

    try:
        return json.loads(text, object_pairs_hook=table)
    except (json.JSONDecodeError, RecursionError, ValueError) as e:
        raise PlanError(
            "P190",
            f"{path} is not JSON: {' '.join(str(e).split())[:200]}",
            help=["YAML and TOML are read from files named so"],
        ) from e


def _once(pairs: Iterable[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """A table; a key twice is the contradiction it may be."""
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out and out[name] != value:
            raise PlanError(
                "P191", f"{path}: {name} is {out[name]!r} and {value!r}", help=["leave one of them"]
            )
        out[name] = value
    return out


def _yaml(text: str, path: Path) -> Any:
    import yaml

    class Strict(yaml.SafeLoader):
        """Tables are read by `_once`."""

    def table(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
        return _once(
            (
                (str(loader.construct_object(k, deep=True)), loader.construct_object(v, deep=True))
                for k, v in node.value
            ),
            path,
        )

    Strict.add_constructor("tag:yaml.org,2002:map", table)
    try:
        return yaml.load(text, Loader=Strict)
    except (yaml.YAMLError, RecursionError, ValueError) as e:
        raise PlanError(
            "P190",
            f"{path} is not YAML: {' '.join(str(e).split())[:200]}",
            help=["TOML (torchtitan's) is read from files named .toml"],
        ) from e


class Keys:
    """Keys by their last name, `-` and `_` alike. What is asked for counts as read."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._values: dict[str, list[tuple[str, Any]]] = {}
        self._read: set[str] = set()
        for where, value in _leaves(table, "", 0):
            self._values.setdefault(plain(where.rpartition(".")[2]), []).append((where, value))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, *names: str) -> Any:
        """Value of the first of several spellings that is there and not null. Raises PlanError P191
        where they say different things."""
        self._read.update(names)
        values = [
            (where, v) for name in names for where, v in self._values.get(name, ()) if v is not None
        ]
        other = next((x for x in values[1:] if x[1] != values[0][1]), None)
        if other:
            raise PlanError(
                "P191",
                f"{values[0][0]} = {values[0][1]!r} and {other[0]} = {other[1]!r} contradict each"
                " other",
                help=["leave one of them"],
            )
        return values[0][1] if values else None

    def whole(self, default: int, *names: str, least: int = 1) -> int:
        """A whole number. Raises PlanError P191."""
        value = self.get(*names)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, str) and value.lstrip("-").isdigit():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PlanError(
                "P191", f"{names[0]} = {value!r} is no whole number of at least {least}"
            )
        return value

    def flag(self, default: bool, *names: str) -> bool:
        """True or false. Raises PlanError P191."""
        value = self.get(*names)
        value = (
            {"true": True, "false": False}.get(value.lower(), value)
            if isinstance(value, str)
            else value
        )
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise PlanError("P191", f"{names[0]} = {value!r} is neither true nor false")

    def word(self, default: str, *names: str) -> str:
        """A word, in lower case."""
        value = self.get(*names)
        return default if value is None else str(value).lower()

    def names(self) -> list[str]:
        """Every key, in the order of the file."""
        return list(self._values)

    def unread(self) -> tuple[str, ...]:
        """Keys that were not read, as they stand in the file."""
        return tuple(
            where
            for name, entries in self._values.items()
            if name not in self._read
            for where, _ in entries
        )


def plain(name: str) -> str:
    """`--tensor-model-parallel-size` as tensor_model_parallel_size."""
    return name.lstrip("-").replace("-", "_")


def _leaves(table: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        where = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < DEEPEST and plain(key) not in WHOLE:
            yield from _leaves(value, f"{where}.", depth + 1)
        else:
            yield where, value
