"""Files that are whole or not there: written beside their place, then renamed."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from costmodels.hardware.intake import irregular
from planner.errors import PlanError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends: a reader sees the old file or
    the new one, and where the block fails the old one stays and nothing else. A device, a pipe or a
    folder is not replaced. Raises OSError."""
    if os.path.exists(path) and (what := irregular(os.stat(path).st_mode)):
        raise OSError(errno.EINVAL, what, str(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:  # Ctrl-C too leaves no half file behind
        Path(name).unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. Raises PlanError P056, for `-` too, which is typed where
    stdout is meant."""
    if str(path) == "-":
        raise PlanError(
            "P056", "cannot write '-': this goes to a file", help=["the name of a file"]
        )
    try:
        with replacing(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as e:
        raise PlanError(
            "P056",
            f"cannot write {str(path)!r}: {e.strerror}",
            help=["-o a file in a folder that exists and is writable"],
        ) from e
