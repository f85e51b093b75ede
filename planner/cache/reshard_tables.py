"""Tables of reshard seconds that earlier searches made, kept beside their answers under what
they follow from: those that a changed model has in common with one that was planned before are
read, not derived and priced again.

A table (`planner.pricing.reshard.ReshardPrices.table`) is an array of float64 under a digest of all
that is in its numbers: the mesh, a tensor's shape and size of an element, the layouts of its rows
and of its columns. Which operators those belong to, how often a layer is repeated, names and places
in the graph are no part of it. Tables of one machine, runtime and version of the planner
(`machine_key`) share files, one for each search that made some:

    bytes 0-31     digest of the index
    bytes 32-39    how many tables
    the index      per table its key, where it begins (bytes), its rows and columns, and a checksum
    the tables     row by row

A file is mapped into memory: what is not asked for is not read, and a checksum is held against its
table when that is asked for first. Whatever is wrong (cut short, edited, of another user) counts as
not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from costmodels.hardware.intake import opened
from planner.cache.faults import TABLES, Faults, trusted
from planner.support.atomic_write import replacing

FORMAT = 1
HEAD = 40
ROW = np.dtype(
    [("key", "V16"), ("at", "<u8"), ("rows", "<u4"), ("columns", "<u4"), ("check", "<u8")]
)
MOST_NEW_BYTES = 32 * 2**20
"""What one search adds at most."""
MOST_FILES = 64
"""Of a machine that are looked into, those used last."""


@dataclass
class Tables:
    """The tables of one machine in a folder. lookups, hits: how many different ones were asked for
    in this process, and how many of these were there."""

    folder: Path
    machine: str
    faults: Faults = field(default_factory=Faults)
    lookups: int = 0
    hits: int = 0
    _at: dict[bytes, tuple[int, int, int, int, int]] = field(default_factory=dict)
    """key -> file, first number in it, rows, columns, checksum."""
    _files: list[tuple[Path, np.ndarray]] = field(default_factory=list)
    _known: dict[bytes, np.ndarray] = field(default_factory=dict)
    """What was read and held, or made."""
    _new: dict[bytes, np.ndarray] = field(default_factory=dict)
    _new_bytes: int = 0
    _used: set[int] = field(default_factory=set)
    _opened: bool = False

    def array(
        self, key: bytes, rows: int, columns: int, make: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """The table of a key [rows, columns], not to be written to: as it was kept, or made."""
        table = self._known.get(key)
        if table is not None:
            return table
        self.lookups += 1
        table = self.faults.spare("tables read", lambda: self._read(key, rows, columns), None)
        if table is None:
            table = make()
            if self._new_bytes + table.nbytes <= MOST_NEW_BYTES:
                self._new[key] = table
                self._new_bytes += table.nbytes
        else:
            self.hits += 1
        self._known[key] = table
        return table

    def keep(self) -> bool:
        """Write what was made since the last time, whether there was any; where writing fails it is
        not kept. What was read counts as used now."""
        for file in sorted(self._used):
            with contextlib.suppress(OSError):
                os.utime(self._files[file][0])
        self._used.clear()
        if not self._new:
            return False
        index, offset = np.zeros(len(self._new), ROW), HEAD + len(self._new) * ROW.itemsize
        for k, (key, table) in enumerate(self._new.items()):
            index[k] = key, offset, *table.shape, zlib.crc32(table.data)
            offset += table.nbytes
        head = _digest(index.tobytes())
        with self.faults.writing():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self.folder / f"{self.machine}-{head.hex()[:16]}{TABLES}") as out:
                out.write(head + struct.pack("<Q", len(index)) + index.tobytes())
                out.writelines(table.data for table in self._new.values())
        self._new, self._new_bytes = {}, 0
        return True

    def _read(self, key: bytes, rows: int, columns: int) -> np.ndarray | None:
        """A table as it was kept, None where there is none of this size that holds."""
        if not self._opened:
            self._opened = True
            for path in self._paths():
                self._open(path)
        place = self._at.get(key)
        if place is None or place[2:4] != (rows, columns):
            return None
        file, first, *_, check = place
        table = self._files[file][1][first : first + rows * columns]
        if zlib.crc32(table.data) != check or np.isnan(table).any():
            return None
        self._used.add(file)
        return table.reshape(rows, columns)

    def _paths(self) -> Iterable[Path]:
        """Files of the machine, those used last first."""
        by_age = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith(f"{self.machine}-") and entry.name.endswith(TABLES):
                    with contextlib.suppress(OSError):
                        by_age.append((-entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
        return [Path(path) for _, path in sorted(by_age)[:MOST_FILES]]

    def _open(self, path: Path) -> None:
        """Take up the index of a file, where it holds."""
        try:
            with opened(path) as file:
                size = os.fstat(file.fileno()).st_size
                if not trusted(os.fstat(file.fileno())) or size < HEAD:
                    return
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return
        head, (count,) = mapped[:32], struct.unpack("<Q", mapped[32:HEAD])
        begin = HEAD + count * ROW.itemsize
        if begin > size or _digest(mapped[HEAD:begin]) != head:
            return
        index = np.frombuffer(mapped, ROW, count, HEAD)
        ends = index["at"] + 8 * index["rows"].astype(np.uint64) * index["columns"]
        if count and (
            int(ends.max()) > size or int(index["at"].min()) < begin or (index["at"] % 8).any()
        ):
            return
        whole, number = np.frombuffer(mapped, np.float64, size // 8), len(self._files)
        self._files.append((path, whole))
        firsts = (index["at"] // 8).tolist()
        for key, first, rows, columns, check in zip(
            index["key"].tolist(),
            firsts,
            index["rows"].tolist(),
            index["columns"].tolist(),
            index["check"].tolist(),
            strict=True,
        ):
            self._at.setdefault(key, (number, first, rows, columns, check))


def _digest(index: bytes) -> bytes:
    return hashlib.blake2b(index, digest_size=32).digest()
