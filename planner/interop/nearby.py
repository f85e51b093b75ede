"""Files that a configuration or a script names, where they lie: beside it, in a folder above (a
checkout), or from where the command runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

HIGHEST = 8
"""Folders above a file that are looked into."""


def places(file: Path, name: str) -> Iterator[Path]:
    """Where a file that is named so may lie, the nearest first; `..` is looked for above."""
    parts = [p for p in PurePosixPath(name).parts if p not in ("/", "..", ".", "~")]
    if not parts or "\0" in name:
        return
    yield file.parent.joinpath(*parts)
    yield file.parent / parts[-1]
    above = list(file.resolve().parent.parents)[:HIGHEST]
    yield from (folder.joinpath(*parts) for folder in above)
    yield Path(*parts)


def nearby_file(file: Path, name: str) -> Path | None:
    """The file that another names, None where it is nowhere."""
    try:
        return next((p for p in places(file, name) if p.is_file()), None)
    except OSError:  # a name too long to be one
        return None
