"""What the compiler of a published run hid, and which attention its framework had, by release: what
costmodels/runtimes/releases.toml says of the run's source and date."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from costmodels.runtimes import FOLDER, Runtime

Row = Mapping[str, Any]
FILE: Path = FOLDER / "releases.toml"


@dataclass(frozen=True)
class Release:
    """One table of the file. runs: words of a row's source, of which one is enough; before: the
    first date that it no longer holds for, "" for any date and none; gathered (forward, backward),
    scattered: as in costmodels.runtimes.Hidden; unfused: attention was plain products."""

    name: str
    runs: tuple[str, ...]
    before: str
    gathered: tuple[float, float]
    scattered: float
    source: str
    unfused: bool = False

    def compiled(self, row: Row) -> bool:
        """Whether a row was compiled by this release. Rows without a date are of today's."""
        date, words = str(row.get("date") or "today"), str(row["source"])
        early = not self.before or date < self.before
        return early and any(word in words for word in self.runs)


@cache
def releases() -> tuple[Release, ...]:
    """The releases that are known, the narrowest first."""
    with FILE.open("rb") as file:
        tables = tomllib.load(file)
    return tuple(
        Release(
            name=name,
            runs=tuple(table["runs"]),
            before=table.get("before", ""),
            gathered=(table["gathered"][0], table["gathered"][1]),
            scattered=table["scattered"],
            source=table["source"],
            unfused=table.get("unfused", False),
        )
        for name, table in tables.items()
        if name != "optimizer_bytes"
    )


@cache
def optimizer_bytes() -> float:
    """Traffic of a parameter's update in frameworks of published runs (the file's head)."""
    with FILE.open("rb") as file:
        return float(tomllib.load(file)["optimizer_bytes"])


def release_of(row: Row) -> Release | None:
    """The release that compiled a row for GPUs; None where it hid what today's does."""
    return next((release for release in releases() if release.compiled(row)), None)


def as_compiled(row: Row, runtime: Runtime) -> Runtime:
    """The profile of emitted programs with what a row's optimizer moves and its compiler hid."""
    runtime = replace(runtime, optimizer_bytes=optimizer_bytes())
    release = release_of(row)
    if release is None:
        return runtime
    hidden = replace(runtime.hidden, gathered=release.gathered, scattered=release.scattered)
    return replace(runtime, hidden=hidden)
