"""Digests that cache keys are made of: of the planner's own code, of the libraries installed, and
of plain values."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

FOLDERS = tuple(str(Path(__file__).parents[2] / package) for package in ("planner", "costmodels"))
"""Whose sources say how is planned."""
LIBRARIES = ("numpy", "highspy", "ortools", "numba", "scipy")


@lru_cache(maxsize=1)
def program() -> str:
    """Digest of the code that plans and of what it computes with."""
    known = hashlib.blake2b(digest_size=16)
    for folder in FOLDERS:
        for path in sorted(_sources(folder)):
            with open(
                path,
                "rb",
                buffering=0,
                # four hundred files: what pathlib does beside reading them would take twice as long
            ) as file:
                body = file.read()
            _add(known, (path[len(folder) :], len(body)))
            known.update(body)
    _add(known, (sys.version, installed(LIBRARIES)))
    return known.hexdigest()


def _sources(folder: str) -> Iterator[str]:
    """Files of a folder and those in it that say how is planned."""
    with os.scandir(folder) as entries:
        for e in entries:
            if e.is_dir():
                yield from _sources(e.path)
            elif e.name.endswith((".py", ".toml", ".json")):
                yield e.path


def installed(names: Sequence[str], places: Sequence[str] | None = None) -> tuple[str, ...]:
    """Folders of the packages' metadata, which their versions are part of, in the places that
    modules are looked for in. importlib.metadata would take longer to load than all else that a key
    needs."""
    folders = []
    for place in sys.path if places is None else places:
        with suppress(OSError):
            folders += [
                e
                for e in os.listdir(place or ".")
                if e.endswith((".dist-info", ".egg-info")) and e.partition("-")[0].lower() in names
            ]
    return tuple(sorted(folders))


def digest(value: Any) -> str:
    """Digest of a value made of plain types, tuples, lists, mappings, sets of plain values and
    dataclasses. Raises TypeError for anything else."""
    known = hashlib.blake2b(digest_size=16)
    _add(known, value)
    return known.hexdigest()


def _add(known: Any, value: Any) -> None:
    if isinstance(value, bytes):
        known.update(b"b%d:" % len(value) + value)
    elif value is None or isinstance(value, bool | int | float | str):
        text = repr(value).encode()
        known.update(type(value).__name__.encode() + b"%d:" % len(text) + text)
    elif is_dataclass(value) and not isinstance(value, type):
        _add(known, type(value).__qualname__)
        _add(known, {f.name: getattr(value, f.name) for f in fields(value) if f.compare})
    elif isinstance(value, Mapping):
        known.update(b"m%d:" % len(value))
        for pair in value.items():
            _add(known, pair)
    elif isinstance(value, tuple | list):
        known.update(b"s%d:" % len(value))
        for item in value:
            _add(known, item)
    elif isinstance(value, frozenset | set):
        _add(known, sorted(value))
    else:
        raise TypeError(f"{type(value).__qualname__} has no fingerprint")
