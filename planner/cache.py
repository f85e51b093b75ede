"""What earlier runs found, kept in a folder of the user's under a hash of all that it follows from.

An entry is a file named by its key: a line with the digest of the rest, then JSON. It is written beside its place and renamed, so that processes may share a
folder: a reader sees a whole entry or none. Whatever is wrong with an entry (cut short, edited, too large, of another user, writable by others) makes it no entry.
A folder that cannot be written keeps nothing and stops nothing. Beyond `MOST_BYTES` the entries that were used least recently go.

The folder: the option, else MESHWRIGHT_CACHE ("off": none), else `meshwright` in XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.atomic import replacing
from planner.errors import PlanError

VARIABLE, OFF, NAME = "MESHWRIGHT_CACHE", "off", "meshwright"
MOST_BYTES, MOST_ENTRY_BYTES = 256 * 2**20, 16 * 2**20
OURS = re.compile(r"\.?[0-9a-f]{32}\.json(\..+)?")
"""Names of entries, and of those that a process did not finish."""


@dataclass
class Cache:
    """Entries of one folder. asked, found: how many were looked for in this process, and how many of these were there and held."""

    folder: Path
    asked: int = 0
    found: int = 0

    @classmethod
    def chosen(cls, given: str | Path | None = None) -> Cache | None:
        """The cache of an option's value, or of the environment; None where it is off or there is no home. Raises PlanError P056 for an option that names a file."""
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
            raise PlanError("P056", f"cannot keep a cache in {name!r}", detail=["it is a file"], help=["--cache a folder, or --no-cache"])
        return cls(folder)

    def get(self, key: str) -> Any:
        """The entry of a key, None where there is none that can be used."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                at = os.fstat(file.fileno())
                if not stat.S_ISREG(at.st_mode) or at.st_size > MOST_ENTRY_BYTES or (os.name == "posix" and (at.st_uid != os.geteuid() or at.st_mode & 0o022)):
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
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path) as out:
                out.write(line + body)
            self._trim()

    def said(self) -> str:
        """For people: what was not searched for again; "" where everything was."""
        return f"{self.found} of {self.asked} search{'es' if self.asked > 1 else ''} from the cache {self.folder} (--no-cache searches anew)" if self.found else ""

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _trim(self) -> None:
        """Remove what was used least recently, down to the bound."""
        rows = []
        with os.scandir(self.folder) as entries:
            for e in entries:
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    if OURS.fullmatch(e.name) and e.is_file(follow_symlinks=False):
                        at = e.stat(follow_symlinks=False)
                        rows.append((at.st_mtime_ns, at.st_size, e.path))
        over = sum(size for _, size, _ in rows) - MOST_BYTES
        for _, size, path in sorted(rows):
            if over <= 0:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            over -= size


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
