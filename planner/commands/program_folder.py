"""A program as a folder: model.py, the runtime beside it, and the weights that travel with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.emit.owned import MODEL, PACKAGE, START, is_as_emitted, is_as_vendored, vendored
from planner.errors import PlanError

MAIN = "__main__.py"


def is_folder(target: Path, standalone: bool = False) -> bool:
    """Whether a program goes into a folder of this name: one that is there, or a name that does not
    end in .py."""
    return not standalone and (target.is_dir() or target.suffix != ".py")


def refuse_folder(target: Path, force: bool, model: bool = True) -> None:
    """Refuse to write a program into a folder, or (without `model`) its runtime alone, where files
    of others are in the way, or what somebody has changed. Raises PlanError P053, P056."""
    if target.exists() and not target.is_dir():
        raise PlanError(
            "P053",
            f"{target} exists and is no folder",
            help=["-o FILE.py or --standalone: the program in one file", "name another folder"],
        )
    place = target if target.exists() else target.absolute().parent
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise PlanError(
            "P056",
            f"cannot write {str(target)!r}",
            detail=[f"{place} is no folder one may write in"],
            help=["a folder that is there, or a new one in a folder that is writable"],
        )
    if force:
        return
    again = "--force writes it anew"
    if model and (file := target / MODEL).exists() and not is_as_emitted(_read(file)):
        raise PlanError(
            "P053",
            f"{file} is not as this command wrote it: somebody has edited it, or it is another's",
            help=[
                "name another folder, and compare",
                "--runtime-only writes the runtime beside it and leaves it alone",
                again,
            ],
        )
    ours = START.splitlines()[0]  # of any version
    if model and (file := target / MAIN).exists() and not _read(file).startswith(ours):
        raise PlanError(
            "P053",
            f"{file} exists and was not written by this command",
            help=["name another folder", again],
        )
    if (there := _runtime(target)) and not is_as_vendored(there):
        raise PlanError(
            "P053",
            f"files of {target / PACKAGE} are not as this command wrote them",
            help=[
                f"what {MODEL} defines stands in place of a function of the runtime: changes are"
                " better there",
                again,
            ],
        )


def write_folder(
    target: Path, model: str, write_weights: Callable[[Path], None] | None = None
) -> list[str]:
    """Write a program's folder; the names written. A new folder is there whole or not at all; in
    one that is there each file is, the runtime as one, and model.py last.

    model: text of model.py, "" to write the runtime alone; write_weights: writes the file of its
    weights at a path.
    """
    try:
        with _aside(target) as aside:
            for name, text in vendored().items():
                path = aside / PACKAGE / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            names = [PACKAGE]
            if write_weights:
                names.append(Path(MODEL).with_suffix(".safetensors").name)
                write_weights(aside / names[-1])
            if model:
                (aside / MAIN).write_text(START)
                (aside / MODEL).write_text(model)
                names += [MAIN, MODEL]
            if target.exists():
                _move(aside, target, names)
            else:
                aside.rename(target)
    except OSError as e:
        raise PlanError(
            "P056",
            f"cannot write {str(target)!r}: {e.strerror}",
            help=["-o a folder that is writable, or a new one"],
        ) from e
    return [str(target / name) for name in reversed(names) if name != MAIN]


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A folder beside the one to be written, gone in the end unless it was renamed."""
    place = target.absolute()
    path = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        path.chmod(0o755)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _move(aside: Path, target: Path, names: list[str]) -> None:
    """Put what was written aside into a folder that is there."""
    for name in names:
        new, place = aside / name, target / name
        if new.is_dir() and place.exists():
            old = aside / f"{name}.before"
            place.rename(old)
            try:
                new.rename(place)
            except OSError:
                old.rename(place)
                raise
        else:
            new.replace(place)


def _runtime(target: Path) -> dict[str, str]:
    """The files of the runtime in a program's folder, by their paths in it."""
    home = target / PACKAGE
    return {p.relative_to(home).as_posix(): _read(p) for p in sorted(home.rglob("*.py"))}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""  # nothing that was written here
