"""Configuration files of launchers as flat keys: which are read, which contradict each other, which
stay unread.

Sections are folded: `model_parallel: {tensor_model_parallel_size: 8}`,
`--tensor-model-parallel-size: 8` and the bare key are one. A key in two entries with two values is
an error. Tables whose keys are names of the user's (WHOLE) are values.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from costmodels.hardware.intake import read_text
from planner.errors import PlanError
from planner.interop.arguments import GIVEN, SUFFIXES, Unset, read_script, scalar, shown
from planner.interop.deepspeed import in_words, with_deepspeed
from planner.interop.python_config import PythonFile

DEEPEST = 4
WHOLE = frozenset(
    {"tp_plan", "base_model_tp_plan", "mesh", "axis_resources", "parameter_axis_resources"}
)
EXPECTED = (
    "a launch script or a list of arguments (.sh, .args), YAML of Megatron, MaxText, Levanter or"
    " accelerate, Python of torchtitan or Megatron-Bridge, TOML, or JSON of Hugging Face"
)
LARGEST = 4 * 2**20
"""Bytes of a file: far above any configuration."""


def load(path: str | Path) -> dict[str, Any]:
    """The table in a .toml, .json, .yaml or .yml file. Raises PlanError P190."""
    path = Path(path)
    table = {".toml": _toml, ".json": _json}.get(path.suffix, _yaml)(_text(path), path)
    if not isinstance(table, dict):
        raise PlanError("P190", f"{path} holds no table of keys", help=[EXPECTED])
    return table


def _text(path: Path) -> str:
    try:
        return read_text(path, LARGEST)
    except OSError as e:
        raise PlanError("P190", f"cannot read {str(path)!r}: {e.strerror}", help=[EXPECTED]) from e
    except ValueError as e:
        raise PlanError("P190", f"{path} is not text") from e


def read_keys(
    path: str | Path, overrides: Sequence[str], fits: Callable[[Mapping[str, Any]], bool]
) -> tuple[Keys, list[str]]:
    """(keys of a file of any form, what was not followed in it). path: FILE, or FILE:FUNCTION for
    one function of a Python file; overrides: `key=value` each, of keys or of a script's variables;
    fits: whether a table is a launcher's. Raises PlanError P190, P191."""
    file, function = function_of(path)
    said = [GIVEN.fullmatch(text) for text in overrides]
    if None in said:
        wrong = overrides[said.index(None)]
        raise PlanError("P191", f"{wrong!r} is no key=value", help=[f"plan import {file} key=4"])
    given = {found[1]: found[2] for found in said if found}
    notes: list[str] = []
    if file.suffix == ".py":
        table, notes = PythonFile(_text(file), file).choose(function, fits)
    elif file.suffix in SUFFIXES:
        script = read_script(_text(file), file, given)
        given = {name: text for name, text in given.items() if name not in script.used}
        table, notes = _with_files(file, script.table, script.files), script.notes
        notes += [
            f"{name}, which the command names, does not lie beside the script: it is not read"
            for name in script.files
            if not (file.parent / name).is_file()
        ]
    else:
        table = load(file)
    return Keys(_overridden(with_deepspeed(table, file, load), in_words(given))), notes


def _with_files(script: Path, table: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Keys of a program, over those of the configurations it is given that lie beside its script.
    Raises PlanError P190, P191."""
    for name in names:
        if (script.parent / name).is_file():
            said = {plain(key.rpartition(".")[2]) for key in table}
            table = _without(load(script.parent / name), said) | table
    return table


def function_of(path: str | Path) -> tuple[Path, str]:
    """(file, function) of FILE or FILE.py:FUNCTION."""
    file, colon, function = str(path).rpartition(":")
    if colon and file.endswith(".py") and function.isidentifier() and not Path(path).exists():
        return Path(file), function
    return Path(path), ""


def _overridden(table: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """A table with other values of some keys, at any depth: the key's last name counts."""
    named = {plain(key.rpartition(".")[2]) for key in given}
    return (_without(table, named) if given else dict(table)) | {
        k: scalar(v) for k, v in given.items()
    }


def _without(table: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """A table without keys of some names, at any depth."""
    return {
        key: _without(value, named) if isinstance(value, dict) and key not in WHOLE else value
        for key, value in table.items()
        if plain(str(key).rpartition(".")[2]) not in named
    }


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

    def tagged(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> str:
        return f"!{suffix} {node.value}" if isinstance(node, yaml.ScalarNode) else f"!{suffix}"

    Strict.add_constructor("tag:yaml.org,2002:map", table)
    Strict.add_multi_constructor("!", tagged)  # Levanter's !include: named, not followed
    try:
        return yaml.load(text, Loader=Strict)
    except (yaml.YAMLError, RecursionError, ValueError) as e:
        raise PlanError(
            "P190",
            f"{path} is not YAML: {' '.join(str(e).split())[:200]}",
            help=["TOML (torchtitan's) is read from files named .toml"],
        ) from e


class Keys:
    """Keys by their last name, `-` and `_` alike. What is asked for counts as read. layers: the
    blocks of the model, where somebody knows it, else 0."""

    def __init__(self, table: Mapping[str, Any], layers: Callable[[], int] = lambda: 0) -> None:
        self.layers = layers
        self._values: dict[str, list[tuple[str, Any]]] = {}
        self._read: set[str] = set()
        self._read_at: set[str] = set()
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
        unset = next(((where, v) for where, v in values if isinstance(v, Unset)), None)
        if unset is not None:
            raise PlanError(
                "P191",
                f"{unset[0]} is {shown(unset[1])}, which the script does not set",
                help=[f"{unset[1] if unset[1] != '(' else names[0]}=VALUE behind the file"],
            )
        other = next((x for x in values[1:] if x[1] != values[0][1]), None)
        if other:
            raise PlanError(
                "P191",
                f"{values[0][0]} = {values[0][1]!r} and {other[0]} = {other[1]!r} contradict each"
                " other",
                help=["leave one of them"],
            )
        return values[0][1] if values else None

    def at(self, place: str) -> Any:
        """Value of the key at a place, where others have its last name, too: `optim.name`; None
        where there is none."""
        for where, value in self._values.get(place.rpartition(".")[2], ()):
            if f".{where}".endswith(f".{place}"):
                self._read_at.add(where)
                return value
        return None

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

    def entries(self, name: str) -> Sequence[tuple[str, Any]]:
        """(key as it stands in the file, value) of each place that has a key."""
        return self._values.get(name, ())

    def says(self, name: str, other: Keys) -> bool:
        """Whether a key is there with the value that it has in others."""
        mine, theirs = (
            [str(value).lower() for _, value in keys.entries(name)] for keys in (self, other)
        )
        return bool(mine) and set(mine) == set(theirs)

    def with_those(self, other: Keys, names: Collection[str], without: Collection[str]) -> Keys:
        """These keys with some of others in the place of their own, and without some."""
        made = Keys({}, self.layers)
        mine = {n: e for n, e in self._values.items() if n not in names and n not in without}
        made._values = mine | {n: list(other.entries(n)) for n in names}
        return made

    def was_read(self, name: str) -> bool:
        """Whether a key was asked for."""
        return name in self._read

    @property
    def any_read(self) -> bool:
        """Whether a key that the file has was read."""
        return not self._read.isdisjoint(self._values)

    def unread(self) -> tuple[str, ...]:
        """Keys that were not read, as they stand in the file."""
        return tuple(
            where
            for name, entries in self._values.items()
            if name not in self._read
            for where, _ in entries
            if where not in self._read_at
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
