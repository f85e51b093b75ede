"""What earlier runs found, kept in a folder of the user's under a hash of all that it follows from.

An entry is a file named by its key: a line with the digest of the rest, then JSON. It is written
beside its place and renamed, so that processes may share a folder: a reader sees a whole entry or
none. Whatever is wrong with an entry (cut short, edited, too large, of another user, writable by
others) makes it no entry. A folder that cannot be written keeps nothing and stops nothing. Beyond
`MOST_BYTES` the entries that were used least recently go.

The folder: the option, else MESHWRIGHT_CACHE ("off": none), else `meshwright` in XDG_CACHE_HOME or
~/.cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware.intake import opened
from planner.cache.faults import TABLES, Faults, trusted
from planner.errors import PlanError
from planner.support.atomic_write import replacing

if TYPE_CHECKING:
    from planner.cache.reshard_tables import Tables


VARIABLE, OFF, NAME = "MESHWRIGHT_CACHE", "off", "meshwright"
MOST_BYTES, MOST_ENTRY_BYTES = 256 * 2**20, 16 * 2**20
MOST_TABLES_BYTES = 128 * 2**20
"""Files of tables, by the end of their names, take no more than a part: what spares a whole search
stays longer."""
OURS = re.compile(r"\.?[0-9a-f]{32}(\.json|-[0-9a-f]{16}\.tables)(\..+)?")
"""Names of entries and of files of tables (planner.cache.reshard_tables), and of those that a
process did not finish."""


@dataclass
class Cache:
    """Entries of one folder. lookups, hits: how many were looked for in this process, and how many
    of these were there and held."""

    folder: Path
    lookups: int = 0
    hits: int = 0
    alike: str = ""
    """The model and date of a search before, of a model much like the one searched last
    (planner.search.incremental)."""
    faults: Faults = field(default_factory=Faults)
    _tables: dict[str, Tables] = field(default_factory=dict)

    @classmethod
    def chosen(cls, given: str | Path | None = None) -> Cache | None:
        """The cache of an option's value, or of the environment; None where it is off or there is
        no home. Raises PlanError P056 for an option that names a file,
        P018 for one that names nothing."""
        if isinstance(given, bool):
            raise PlanError(
                "P018", f"cache={given}: a folder expected", help=["cache=None keeps nothing"]
            )
        name = str(given) if given is not None else os.environ.get(VARIABLE, "")
        if name == OFF:
            return None
        if name:
            folder = Path(name)
        else:
            above = os.environ.get("XDG_CACHE_HOME", "")
            try:
                folder = (Path(above) if os.path.isabs(above) else Path.home() / ".cache") / NAME
            except RuntimeError:  # no home
                return None
        if given is not None and folder.exists() and not folder.is_dir():
            raise PlanError(
                "P056",
                f"cannot keep a cache in {name!r}",
                detail=["it is a file"],
                help=["--cache a folder, or --no-cache"],
            )
        return cls(folder)

    def get(self, key: str) -> Any:
        """The entry of a key, None where there is none that can be used."""
        path = self._path(key)
        try:
            with opened(path) as file:
                status = os.fstat(file.fileno())
                if not trusted(status) or status.st_size > MOST_ENTRY_BYTES:
                    return None
                digest, _, body = file.read(MOST_ENTRY_BYTES).partition(b"\n")
            if digest.decode() != _digest(body):
                return None
            entry = json.loads(body)
            os.utime(path)  # the order of leaving is that of use
        except (OSError, ValueError, RecursionError):
            return None
        return entry

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        """Keep an entry of JSON's types; where that fails it is not kept."""
        path, body = self._path(key), json.dumps(entry, separators=(",", ":")).encode()
        line = _digest(body).encode() + b"\n"
        if len(line) + len(body) > MOST_ENTRY_BYTES:
            return
        with self.faults.writing():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(line + body)
            self._trim()

    def tables(self, machine: str) -> Tables:
        """The tables of a machine (planner.search.machine_key.machine_key)."""
        from planner.cache.reshard_tables import Tables

        return self._tables.setdefault(machine, Tables(self.folder, machine, self.faults))

    def keep_tables(self) -> None:
        """Write the tables that were made, and make room."""
        kept = [t.keep() for t in self._tables.values()]
        if any(kept):
            with self.faults.writing():
                self._trim()

    @property
    def priced(self) -> tuple[int, int]:
        """How many different tables the searches of this process asked for, and how many of these
        were there."""
        return sum(t.lookups for t in self._tables.values()), sum(
            t.hits for t in self._tables.values()
        )

    def said(self) -> str:
        """For people: what was not searched for, or priced, again; "" where everything was."""
        tables, there = self.priced
        parts = [f"{self.hits} of {self.lookups} search{'es' if self.lookups > 1 else ''}"] * bool(
            self.hits
        ) + [f"{there:,} of {tables:,} tables of moves"] * bool(there)
        return (
            f"{' and '.join(parts)} from the cache {self.folder} (--no-cache"
            f" {'searches' if self.hits else 'makes all'} anew)"
            if parts
            else ""
        )

    def held(self) -> dict[str, list[int]]:
        """Bytes of each file in the folder: of searches and what was read for them, and of
        tables."""
        rows = self._rows()
        return {
            "searches and readings": [size for _, size, path in rows if path.suffix != TABLES],
            "tables of moves": [size for _, size, path in rows if path.suffix == TABLES],
        }

    def clear(self) -> tuple[int, int]:
        """Remove what is the cache's in the folder: how many files, and their bytes. Raises
        OSError."""
        rows = self._rows()
        for _, _, path in rows:
            path.unlink(missing_ok=True)
        return len(rows), sum(size for _, size, _ in rows)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _rows(self) -> list[tuple[int, int, Path]]:
        """When each file of the cache was used last, its size and place, in that order; none where
        there is no folder. Raises OSError."""
        rows: list[tuple[int, int, Path]] = []
        if not self.folder.is_dir():
            return rows
        with os.scandir(self.folder) as entries:
            for e in entries:
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    if OURS.fullmatch(e.name) and e.is_file(follow_symlinks=False):
                        status = e.stat(follow_symlinks=False)
                        rows.append((status.st_mtime_ns, status.st_size, Path(e.path)))
        return sorted(rows)

    def _trim(self) -> None:
        """Remove what was used least recently: of tables down to their part, then of everything
        down to the bound."""
        rows = self._rows()
        for most, those in (
            (MOST_TABLES_BYTES, [r for r in rows if r[2].suffix == TABLES]),
            (MOST_BYTES, rows),
        ):
            over = sum(size for _, size, _ in those) - most
            for row in those:
                if over <= 0:
                    break
                row[2].unlink(missing_ok=True)
                rows.remove(row)
                over -= row[1]


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
