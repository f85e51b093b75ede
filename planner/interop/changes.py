"""What must change in a launcher's file so that it says other settings: lines as the launcher's
writer has them, and keys of the file that would contradict them.

The file's own spelling counts. A key that already has its new value is not named again, one that
says the same otherwise (layers of a virtual stage instead of the number of these) is taken out, and
the file with its changes is read again: what is told gives the settings that were priced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product

from planner.errors import PlanError
from planner.interop.keys import Keys, plain
from planner.interop.python_config import CLASS
from planner.interop.settings import Settings

UNREADABLE = len(fields(Settings)) + 1
"""Settings in which a file that cannot be read differs from any."""


@dataclass(frozen=True)
class Rewrite:
    """From settings to better ones. before, after: both as the launcher's writer has them; written:
    the keys of the latter; read: keys -> settings; stages: keys that say how layers lie on
    pipeline stages, of which a file has one way; kinds: keys that say which others mean
    anything, and those: where one changes, all that is written is new, and the others go."""

    yours: Settings
    best: Settings
    before: str
    after: str
    written: Keys
    read: Callable[[Keys], Settings]
    stages: Collection[str] = ()
    kinds: Mapping[str, Collection[str]] = field(default_factory=dict)


def changes(of_file: Keys, of: Rewrite) -> tuple[list[str], list[str]]:
    """(lines, keys to take out as they stand in the file) for a file with these keys. Lines begin
    with "- " and "+ "."""
    added, gone = _settled(of_file, of)
    lines = list[str]()
    for line in _settings_of(of.after):
        if (name := _key_of(line, of.written)) in added:
            lines += [f"- {old}" for old in _as_it_stands(of_file, of, name)]
            lines.append(f"+ {line}")
    for name in of_file.names():
        if name in gone:
            lines += [f"- {old}" for old in _as_it_stands(of_file, of, name)]
    return lines, [
        where.removesuffix(f".{CLASS}")
        for name in of_file.names()
        if name in gone
        for where, _ in of_file.entries(name)
    ]


def _settled(of_file: Keys, of: Rewrite) -> tuple[set[str], set[str]]:
    """(keys to write, keys to take out): what the writer has otherwise, and as much more as makes
    the file say the better settings."""
    old = set(_settings_of(of.before))
    differs = {_key_of(x, of.written) for x in _settings_of(of.after) if x not in old} - {""}
    new = {n for n in of.written.names() if not of_file.says(n, of.written)}
    added = new & differs
    gone = {n for x in old if (n := _key_of(x, of_file)) and n not in of.written}
    moved = (of.yours.stage, of.yours.virtual_stages) != (of.best.stage, of.best.virtual_stages)
    gone |= {n for n in of.stages if moved and n in of_file and n not in of.written}
    for name, others in of.kinds.items():
        if name in new and name in of_file:
            added |= new
            gone |= {n for n in others if n in of_file and n not in of.written}
    gone = {n for n in gone if any(value is not None for _, value in of_file.entries(n))}
    wanted = _wanted(of.read(of_file), of)

    def apart(more: Collection[str], less: Collection[str]) -> int:
        return _apart(of_file.with_those(of.written, added | {*more}, gone | {*less}), of, wanted)

    differing = apart((), ())
    while differing:
        mine = [
            n
            for n in of_file.names()
            if of_file.was_read(n)
            and n not in of.written
            and any(value is not None for _, value in of_file.entries(n))
        ]
        moves = [
            (apart(more, less), len(more) + len(less), more, less)
            for more, less in product(_none_or_one(new - added), _none_or_one(set(mine) - gone))
        ]
        least, _, more, less = min(moves)
        if least >= differing:
            break
        differing, added, gone = least, added | {*more}, gone | {*less}
    return added, gone


def _none_or_one(names: Collection[str]) -> list[tuple[str, ...]]:
    return [(), *((n,) for n in sorted(names))]


def _wanted(now: Settings, of: Rewrite) -> Settings:
    """What a file that says `now` is to say: the better settings, where these differ from yours; a
    precision that they do not say stays."""
    changed = {
        f.name: getattr(of.best, f.name)
        for f in fields(Settings)
        if getattr(of.yours, f.name) != getattr(of.best, f.name)
        and (f.name != "precision" or of.best.precision)
    }
    return replace(now, **changed)


def _apart(keys: Keys, of: Rewrite, wanted: Settings) -> int:
    """The number of settings in which a file with these keys differs from what is wanted."""
    try:
        settings = of.read(keys)
    except PlanError:
        return UNREADABLE
    return sum(getattr(settings, f.name) != getattr(wanted, f.name) for f in fields(Settings))


def _settings_of(text: str) -> list[str]:
    """Lines of a launcher's text that set something."""
    return [x.rstrip() for x in text.splitlines() if x.strip() and not x.lstrip().startswith("#")]


def _key_of(line: str, keys: Keys) -> str:
    """The key that a line sets, "" where it sets none of these."""
    words = (plain(word.rpartition(".")[2]) for word in re.findall(r"[\w.-]+", line))
    return next((word for word in words if word in keys), "")


def _as_it_stands(of_file: Keys, of: Rewrite, name: str) -> list[str]:
    """A key of the file, as the writer has it where it does."""
    line: Sequence[str] = [x for x in _settings_of(of.before) if _key_of(x, of_file) == name]
    entries = of_file.entries(name)
    if line and entries and name not in of.kinds:
        return list(line)
    entries = [(where.removesuffix(f".{CLASS}"), value) for where, value in entries]
    return [
        where
        if value is True
        else f"{where} {value}"
        if where.startswith("-")
        else f"{where}: {value}"
        for where, value in entries
    ]
