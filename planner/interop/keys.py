"""Configuration files of launchers as flat keys: which are read, which contradict each other, which
stay unread.

Sections are folded: `model_parallel: {tensor_model_parallel_size: 8}`,
`--tensor-model-parallel-size: 8` and the bare key are one. A key in two entries with two values is
an error. Tables whose keys are names of the user's (WHOLE) are values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from planner.errors import PlanError
from planner.interop.arguments import GIVEN, SUFFIXES, read_script, scalar
from planner.interop.deepspeed import in_words, with_deepspeed
from planner.interop.foreign import refuse
from planner.interop.nearby import nearby_file
from planner.interop.python_config import PythonFile
from planner.interop.tables import Twice, load, text_of
from planner.interop.unset import Unset, shown

DEEPEST = 4
BASED, DEFAULTS = "base_config", "base.yml"
"""MaxText's key for the file that another is built on, and the one that has its defaults."""
WHOLE = frozenset(
    {"tp_plan", "base_model_tp_plan", "mesh", "axis_resources", "parameter_axis_resources"}
)


def read_keys(
    path: str | Path, overrides: Sequence[str], fits: Callable[[Mapping[str, Any]], bool]
) -> tuple[Keys, list[str]]:
    """(keys of a file of any form, what was not followed in it). path: FILE, or FILE:FUNCTION for
    one function of a Python file; overrides: `key=value` each, of keys or of a script's variables;
    fits: whether a table is a launcher's. Raises PlanError P190, P191."""
    file, function = function_of(path)
    pairs = [GIVEN.fullmatch(text) for text in overrides]
    if None in pairs:
        wrong = overrides[pairs.index(None)]
        raise PlanError("P191", f"{wrong!r} is no key=value", help=[f"plan import {file} key=4"])
    overriding = {match[1]: match[2] for match in pairs if match}
    others = _Said()
    if file.suffix == ".py":
        table, others.notes = PythonFile(text_of(file), file).choose(function, fits)
    elif file.suffix in SUFFIXES:
        script = read_script(text_of(file), file, overriding)
        overriding = {name: text for name, text in overriding.items() if name not in script.used}
        others.notes = script.notes
        table = _with_files(file, script.table, script.files, others)
    else:
        table = _based(others.load(file), file, others)
    refuse(Keys(table).names(), path)
    overriding = in_words(overriding)
    named = {plain(name.rpartition(".")[2]) for name in overriding}
    keys = Keys(_overridden(with_deepspeed(table, file, load), overriding), given=named)
    keys.defaults = others.defaults
    return keys, others.notes


MOST_FILES = 8
"""Configurations on which others are built."""


def _with_files(
    script: Path, table: dict[str, Any], names: Sequence[str], others: _Said
) -> dict[str, Any]:
    """Keys of a program, over those of the configurations it is given that are there. Raises
    PlanError P190, P191."""
    for name in names:
        file = others.file_named(script, name, "the command")
        if file is not None:
            table = _over(table, _based(others.load(file), file, others))
    return table


def _over(table: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """A table, and what another has beside it."""
    return _without(base, {plain(key.rpartition(".")[2]) for key in table}) | table


def _based(table: dict[str, Any], file: Path, others: _Said, depth: int = 0) -> dict[str, Any]:
    """A table over the file that it is built on (MaxText's base_config). Raises PlanError P190."""
    name = table.get(BASED)
    if not isinstance(name, str) or not name or depth > MOST_FILES:
        return table
    base = others.file_named(file, name, BASED)
    if base is None:
        return table
    return _over(table, _based(others.load(base), base, others, depth + 1))


class _Said:
    """What there is to say of files that others name: notes, and keys of base.yml, which has all
    keys that there are."""

    def __init__(self) -> None:
        self.notes, self.defaults = list[str](), set[str]()

    def file_named(self, file: Path, name: str, by: str) -> Path | None:
        """Where a file lies that is named by something; a note where it lies nowhere."""
        there = nearby_file(file, name)
        if there is None and PurePosixPath(name).name != DEFAULTS:
            self.notes.append(f"{name}, which {by} names, is not there: it is not read")
        return there

    def load(self, file: Path) -> dict[str, Any]:
        """The table of a file. Raises PlanError P190."""
        table = load(file)
        if file.name == DEFAULTS:
            self.defaults |= {plain(w.rpartition(".")[2]) for w, _ in _leaves(table, "", 0)}
        return table


def function_of(path: str | Path) -> tuple[Path, str]:
    """(file, function) of FILE or FILE.py:FUNCTION."""
    file, colon, function = str(path).rpartition(":")
    if colon and file.endswith(".py") and function.isidentifier() and not Path(path).exists():
        return Path(file), function
    return Path(path), ""


def _overridden(table: Mapping[str, Any], overriding: Mapping[str, str]) -> dict[str, Any]:
    """A table with other values of some keys, at any depth: the key's last name counts."""
    named = {plain(key.rpartition(".")[2]) for key in overriding}
    return (_without(table, named) if overriding else dict(table)) | {
        k: scalar(v) for k, v in overriding.items()
    }


def _without(table: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """A table without keys of some names, at any depth."""
    return {
        key: _without(value, named) if isinstance(value, dict) and key not in WHOLE else value
        for key, value in table.items()
        if plain(str(key).rpartition(".")[2]) not in named
    }


class Keys:
    """Keys by their last name, `-` and `_` alike. What is asked for counts as read. layers: the
    blocks of the model, where somebody knows it, else 0; given: names whose values go behind the
    file, over any other spelling of theirs; first: sections whose value of a name counts where
    others have another; defaults: names of a file that has all there are, which nobody wrote;
    optimizer: what it trains with, as --optimizer has it, where that is priced unasked."""

    def __init__(
        self,
        table: Mapping[str, Any],
        layers: Callable[[], int] = lambda: 0,
        given: Collection[str] = (),
    ) -> None:
        self.layers, self.given = layers, frozenset(given)
        self.first: Sequence[str] = ()
        self.optimizer = ""
        self.defaults: Collection[str] = ()
        self.passed_over: dict[str, str] = {}
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
        spellings = [name for name in names if name in self.given] or names
        values = [
            (where, v)
            for name in spellings
            for where, v in self._values.get(name, ())
            if v is not None
        ]
        for where, of in (x for pair in values for x in _said_twice(*pair)):
            raise PlanError(
                "P191",
                f"{where} is {' and '.join(map(repr, of))}",
                help=[f"leave one of them, or {names[0]}=VALUE behind the file"],
            )
        unset = next(((where, v) for where, v in values if isinstance(v, Unset)), None)
        if unset is not None:
            where, by = unset
            raise PlanError(
                "P191",
                f"{where} is {shown(by)}"
                + (", which the script does not set" if by != "=" else ""),
                help=[f"{by if by.isidentifier() else names[0]}=VALUE behind the file"],
            )
        return self._one(values, names[0])[1] if values else None

    def _one(self, values: Sequence[tuple[str, Any]], name: str) -> tuple[str, Any]:
        """The entry that counts. Raises PlanError P191 where others say something else."""
        for section in self.first:
            mine = [x for x in values if x[0].rpartition(".")[0] == section]
            if mine and all(x[1] == mine[0][1] for x in mine):
                others = {w: v for w, v in values if v != mine[0][1]}
                self.passed_over |= {
                    w: f"{w} = {v!r} is left out: {mine[0][0]} = {mine[0][1]!r} counts"
                    for w, v in others.items()
                }
                return mine[0]
        other = next((x for x in values[1:] if x[1] != values[0][1]), None)
        if other:
            raise PlanError(
                "P191",
                f"{values[0][0]} = {values[0][1]!r} and {other[0]} = {other[1]!r} contradict each"
                " other",
                help=[f"leave one of them, or {name}=VALUE behind the file"],
            )
        return values[0]

    def some(self, name: str) -> Any:
        """A value of a key that nothing is computed with, whoever says it; None without one."""
        self._read.add(name)
        return next((v for _, v in self._values.get(name, ()) if v is not None), None)

    def at(self, place: str) -> Any:
        """Value of the key at a place, where others have its last name, too: `optim.name`; None
        where there is none."""
        for where, value in self._values.get(place.rpartition(".")[2], ()):
            if f".{where.lstrip('-')}".endswith(f".{place}"):  # of a script an option
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

    def flag_anywhere(self, name: str) -> bool:
        """Whether one of the places that have a flag turns it on. Raises PlanError P191."""
        if name in self.given:
            return self.flag(False, name)
        self._read.add(name)
        values = [value for _, value in self._values.get(name, ()) if value is not None]
        if wrong := [v for v in values if str(v).lower() not in ("true", "false")]:
            raise PlanError("P191", f"{name} is {shown(wrong[0])}, neither true nor false")
        return any(str(value).lower() == "true" for value in values)

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
        merged = Keys({}, self.layers, self.given)
        merged.first = self.first
        mine = {n: e for n, e in self._values.items() if n not in names and n not in without}
        merged._values = mine | {n: list(other.entries(n)) for n in names}
        return merged

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
            if name not in self._read and name not in self.defaults
            for where, _ in entries
            if where not in self._read_at
        )


def plain(name: str) -> str:
    """`--tensor-model-parallel-size` as tensor_model_parallel_size."""
    return name.lstrip("-").replace("-", "_")


def _leaves(table: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        where = f"{prefix}{key}"
        if isinstance(value, Twice) and any(isinstance(v, Mapping) for v in value):
            for one in value:
                yield from _leaves({key: one}, prefix, depth)
        elif isinstance(value, Mapping) and depth < DEEPEST and plain(key) not in WHOLE:
            yield from _leaves(value, f"{where}.", depth + 1)
        else:
            yield where, value


def _said_twice(where: str, value: Any) -> Iterator[tuple[str, Twice]]:
    """(key, its values) of what a file says several times in a value."""
    if isinstance(value, Twice):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _said_twice(f"{where}.{key}", item)
