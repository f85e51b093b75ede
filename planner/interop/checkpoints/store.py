"""A folder of .safetensors: one file, or shards with an index. Headers are read at once, tensors
are mapped one at a time.

A file is 8 bytes (the header's length, little endian), the header (JSON: name -> dtype, shape,
data_offsets), and the tensors back to back (https://github.com/huggingface/safetensors, "Format").
Every header comes from a stranger: lengths and offsets are held to the file's size before anything
is read, and names of files that would lead out of the folder are refused.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from costmodels.hardware.intake import read_bytes
from planner.errors import PlanError
from planner.graph.ir import DTYPE_BYTES
from planner.support.atomic_write import replacing

if TYPE_CHECKING:
    import numpy as np

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
TYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""dtype of a header -> name in `planner.graph.ir.DTYPE_BYTES`."""
FLOATS = ("F64", "F32", "F16", "BF16")
HEADER_LIMIT_BYTES, JSON_LIMIT_BYTES = 100_000_000, 64 << 20
"""Of a header, as the format's own library has it; of an index or configuration."""
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file: dtype as the header says (a key of TYPES), and its bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    def array(self) -> np.ndarray:
        """The values, mapped read-only."""
        import numpy as np

        from planner.reader.draft.fold import numpy_dtype

        raw = (
            np.memmap(self.path, np.uint8, "r", self.offset, (self.size_bytes,))
            if self.size_bytes
            else np.zeros(0, np.uint8)
        )
        return raw.view(numpy_dtype(TYPES[self.dtype])).reshape(self.shape)


@dataclass(frozen=True)
class Shards:
    """The tensors of a folder by name, in the order of files and offsets; vocab_size (0: none) and
    model_type ("": none) of its config.json."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, Stored]
    vocabulary: int
    kind: str

    def of_file(self, path: Path) -> dict[str, Stored]:
        """The tensors of one file, in the order of their bytes."""
        return {name: t for name, t in self.tensors.items() if t.path == path}


def open_folder(folder: str | os.PathLike[str]) -> Shards:
    """The shards that the index names; else model.safetensors; else every .safetensors by name.
    Raises PlanError P210."""
    home = Path(folder)
    if not home.is_dir():
        raise _bad(f"{home} is no folder", "the folder that holds model.safetensors or its index")
    if (home / INDEX).exists():
        table = _json(home / INDEX).get("weight_map")
        if (
            not isinstance(table, dict)
            or not table
            or not all(isinstance(v, str) for v in table.values())
        ):
            raise _bad(f"{home / INDEX} has no weight_map of tensors and files")
        names = list(dict.fromkeys(table.values()))
    else:
        table, names = (
            None,
            (
                [SINGLE]
                if (home / SINGLE).exists()
                else sorted(p.name for p in home.glob("*.safetensors"))
            ),
        )
    if not names:
        raise _bad(
            f"{home} holds no .safetensors file",
            "weights in other formats: transformers' save_pretrained writes .safetensors",
        )
    files, tensors = tuple(inside(home, n) for n in names), dict[str, Stored]()
    for path in files:
        for name, stored in read_header(path).items():
            if name in tensors:
                raise _bad(f"{name!r} is in {tensors[name].path.name} and in {path.name}")
            tensors[name] = stored
    astray = [
        n for n, file in (table or {}).items() if n not in tensors or tensors[n].path.name != file
    ]
    if astray:
        raise _bad(
            f"{home / INDEX} places {len(astray)} tensors in files that lack them",
            detail=[f"{n}: {table[n]}" for n in astray[:8]] if table else (),
        )
    config = _json(home / CONFIG) if (home / CONFIG).exists() else {}
    size, kind = config.get("vocab_size"), config.get("model_type")
    return Shards(
        home,
        files,
        tensors,
        size if type(size) is int and size > 0 else 0,
        kind if isinstance(kind, str) else "",
    )


def inside(home: Path, name: str) -> Path:
    """The file of a folder, by its plain name. A link must stay in the folder, or lead to the blobs
    of the hub's cache whose snapshot the folder is."""
    path, real = home / name, home.resolve()
    if Path(name).name != name or name in (".", "..") or "\\" in name:
        raise _bad(f"{name!r} leads out of {home}")
    homes = [real, *([real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [])]
    if not any(path.resolve().is_relative_to(h) for h in homes):
        raise _bad(f"{path} is a link that leads out of {home}")
    if not path.is_file():
        raise _bad(f"{path} is missing", "all shards that the index names must be there")
    return path


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file, in the order of their bytes. Raises PlanError P210 for anything that
    the format forbids."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT_BYTES):
            raise _bad(
                f"{path} is no .safetensors file: its header would have {length} bytes, the file"
                f" has {size}"
            )
        header = _parsed(path, file.read(length))
    start, tensors = 8 + length, {}
    for name, row in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, span = (
            row.get(k) if isinstance(row, dict) else None
            for k in ("dtype", "shape", "data_offsets")
        )
        if (
            not isinstance(dtype, str)
            or dtype not in TYPES
            or not _wholes(shape)
            or not _wholes(span)
            or len(span) != 2
        ):
            raise _bad(
                f"{path}: {name!r} has dtype {dtype!r}, shape {shape!r}, offsets {span!r}",
                f"types that are read: {', '.join(TYPES)}",
            )
        tensors[name] = Stored(path, dtype, tuple(shape), start + span[0], span[1] - span[0])
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size_bytes)))
    offset = start
    for name, t in tensors.items():
        need = math.prod(t.shape) * width_bytes(t.dtype)
        if t.offset != offset or t.size_bytes != need:
            raise _bad(
                f"{path}: {name!r} lies at byte {t.offset} with {t.size_bytes} bytes, and belongs"
                f" at {offset} with {need}"
            )
        offset += need
    if offset != size:
        raise _bad(f"{path} has {size} bytes, and its tensors end at {offset}", "download it again")
    return tensors


def width_bytes(dtype: str) -> int:
    """Bytes of an element."""

    return int(DTYPE_BYTES[TYPES[dtype]])


def header_bytes(path: Path) -> bytes:
    """All that lies before the tensors."""
    with path.open("rb") as file:
        first = file.read(8)
        return first + file.read(int.from_bytes(first, "little"))


def new_header(rows: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """The header of tensors (name, dtype as in TYPES, shape) that follow each other."""
    header, offset = {}, 0
    for name, dtype, shape in rows:
        end = offset + math.prod(shape) * width_bytes(dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(stored: Stored) -> Iterator[bytes]:
    """A tensor's bytes as they lie, in chunks."""
    with stored.path.open("rb") as file:
        file.seek(stored.offset)
        for offset in range(0, stored.size_bytes, CHUNK_BYTES):
            yield file.read(min(CHUNK_BYTES, stored.size_bytes - offset))


def write(path: Path, header: bytes, pieces: Iterable[bytes | memoryview], size_bytes: int) -> None:
    """A file of `size_bytes` in all, whole or not at all. Raises PlanError P056, before anything is
    written where the disk has no room."""
    try:
        free = shutil.disk_usage(path.parent).free
        if free < size_bytes:
            raise PlanError(
                "P056",
                f"cannot write {str(path)!r}: it takes {size_bytes:,} bytes, and {free:,} are free",
            )
        with replacing(path) as file:
            file.write(header)
            for piece in pieces:
                file.write(piece)
    except OSError as e:
        raise PlanError(
            "P056",
            f"cannot write {str(path)!r}: {e.strerror}",
            help=["-o a place in a folder that exists and is writable"],
        ) from e


def _json(path: Path) -> dict[str, Any]:
    try:
        return _parsed(path, read_bytes(path, JSON_LIMIT_BYTES))
    except OSError as e:
        raise _bad(f"{path} cannot be read: {e.strerror}") from e


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise _bad(f"{path} holds no JSON where it should: {type(e).__name__}") from e
    if not isinstance(table, dict):
        raise _bad(f"{path} holds JSON that is no table")
    return table


def _wholes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _bad(what: str, *help: str, detail: Sequence[str] = ()) -> PlanError:
    return PlanError("P210", what, detail=detail, help=help)
