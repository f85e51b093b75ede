"""Files that are whole or not there: written beside their place, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends: a reader sees the old file or the new one, and where the block fails the old one
    stays and nothing else. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:  # Ctrl-C too leaves no half file behind
        Path(name).unlink(missing_ok=True)
        raise
