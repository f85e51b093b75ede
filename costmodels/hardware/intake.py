"""Files that users name, read so that none makes a command wait or takes its memory: looked at
before they are opened, opened without waiting, looked at once more, and read only when they are
regular files of a size that their kind may have.

JSON and TOML are read strictly: a key once, no NaN and no Infinity, and no nesting that ends the
interpreter. What is wrong is an OSError or a ValueError.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from collections.abc import Iterable
from typing import Any, BinaryIO, NoReturn

TEXT_BYTES = 512 * 2**20
"""Of a text at most: the strategies of the largest models take a few percent of it."""
SMALL_BYTES = 16 * 2**20
"""Of a file that people write by hand."""
_PART_BYTES = 2**20
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a pipe"),
    (stat.S_ISSOCK, "it is a socket"),
    (stat.S_ISCHR, "it is a device"),
    (stat.S_ISBLK, "it is a device"),
)


def irregular(mode: int) -> str:
    """What a file is that is no regular one, in words; "" for one that is."""
    return (
        ""
        if stat.S_ISREG(mode)
        else next((words for test, words in _KINDS if test(mode)), "it is no regular file")
    )


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, open for reading. Raises OSError, for anything else too."""
    try:
        _refuse(os.stat(path).st_mode, path)
        handle = os.open(path, _FLAGS)
    except ValueError as e:  # a name with a NUL
        raise OSError(errno.EINVAL, str(e), os.fspath(path)) from e
    try:
        _refuse(os.fstat(handle).st_mode, path)  # another file may have taken its place
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _refuse(mode: int, path: str | os.PathLike[str]) -> None:
    if what := irregular(mode):
        raise OSError(errno.EINVAL, what, os.fspath(path))


def read_bytes(path: str | os.PathLike[str], most: int = TEXT_BYTES) -> bytes:
    """The bytes of a regular file of at most so many. Raises OSError."""
    data = (
        bytearray()
        # grown as it is read: room for the most would be taken at once, and a file's size need not
        # be true
    )
    with opened(path) as file:
        while (
            len(data) <= most
            and os.fstat(file.fileno()).st_size <= most
            and (part := file.read(_PART_BYTES))
        ):
            data += part
        if len(data) > most or os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
    return bytes(data)


def read_text(path: str | os.PathLike[str], most: int = TEXT_BYTES) -> str:
    """The text of a regular file in UTF-8. Raises OSError, and ValueError where it is none."""
    return read_bytes(path, most).decode("utf-8")


def read_json(path: str | os.PathLike[str], most: int = TEXT_BYTES) -> Any:
    """What a JSON file holds. Raises OSError and ValueError."""
    return parse_json(read_text(path, most))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a TOML file holds. Raises OSError and ValueError."""
    text = read_text(path, SMALL_BYTES)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested deeper than any file of this kind") from None


def parse_json(text: str) -> Any:
    """What JSON holds, strictly. Raises ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested deeper than any file of this kind") from None


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} stands there twice")
    return table


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON's")


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is a regular file; a name that the system refuses is none."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether anything is there; a name that the system refuses is nothing. (pathlib raises for one
    that is too long.)"""
    try:
        os.stat(path)
    except (OSError, ValueError):
        return False
    return True
