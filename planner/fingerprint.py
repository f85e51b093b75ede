"""The key of a search: a hash of everything its answer follows from.

    program   every source file and figure of this package and of costmodels, Python, and the libraries that compute
    model     its file, the canonical graph that was made of it (both without names, planner.content), and the workload but for what no price knows
    request   machine, memory, precision, runtime, solver, pins, limits, seed: all of planner.request.Request but where it is kept; and where pins name nodes, the model's names

Values are written with their types and lengths, so that no two differ in meaning and agree in bytes; a type that is not known is an error, never left out.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from planner.content import file_content, graph_content, names_of

if TYPE_CHECKING:
    from planner.model import Model
    from planner.request import Request

FORMAT = 2
"""Of what is kept under a key (planner.recall)."""
LIBRARIES = ("numpy", "highspy", "ortools", "numba", "scipy")
APART = ("name", "folder", "proto", "workload")
"""Fields of a model that are no part of its key as they are: a name and a place change no plan, file and workload have a part of their own."""


def model_key(model: Model) -> str:
    """The key of what a model is read as. Raises PlanError where it cannot be read."""
    content = file_content(model.proto, model.plain.trainable), graph_content(model.graph(1))
    return digest((*_circumstances(model), content))


def history_key(model: Model, request: Request) -> str:
    """The key of the searches for models that differ in their content alone (planner.incremental)."""
    return digest(("history", *_circumstances(model), request, names_of(model.graph(1)) if request.pins.nodes else ""))


def _circumstances(model: Model) -> tuple[Any, ...]:
    """What a model's key follows from beside its content: the program, and what is run."""
    public = {f.name: getattr(model, f.name) for f in fields(model) if not f.name.startswith("_") and f.name not in APART}
    workload = replace(model.workload, batch=model.batch, tokens_per_step=None)  # as it was resolved, whoever said it
    if workload.kind == "train":
        workload = replace(workload, loss=model.loss, lr=0.0)  # how far a step goes costs nothing
    return FORMAT, program(), type(model).__qualname__, public, workload


def search_key(model: Model, key: str, request: Request) -> str:
    """The key of a search for a model, whose own is given (`model_key`), under a request."""
    return digest((key, request, names_of(model.graph(1)) if request.pins.nodes else ""))


def incremental_key(search: str) -> str:
    """The key of an answer to what another search, whose key is given, was asked, that keeps what was decided before (planner.incremental)."""
    return digest((search, "incremental"))


def reading_key(model: str, microbatches: int) -> str:
    """The key of what is known of a model's graph (`model_key`) at so many microbatches."""
    return digest((model, "reading", microbatches))


@lru_cache(maxsize=1)
def program() -> str:
    """Digest of the code that plans and of what it computes with."""
    import costmodels
    import planner

    known = hashlib.blake2b(digest_size=16)
    for package in (planner, costmodels):
        folder = os.path.dirname(package.__file__ or "")
        for path in sorted(_sources(folder)):
            with open(path, "rb", buffering=0) as file:  # four hundred files: what pathlib does beside reading them would take twice as long
                body = file.read()
            _add(known, (path[len(folder) :], len(body)))
            known.update(body)
    _add(known, (sys.version, installed(LIBRARIES)))
    return known.hexdigest()


def _sources(folder: str) -> Iterator[str]:
    """Files of a folder and those in it that say how is planned."""
    with os.scandir(folder) as entries:
        for e in entries:
            if e.is_dir():
                yield from _sources(e.path)
            elif e.name.endswith((".py", ".toml", ".json")):
                yield e.path


def installed(names: Sequence[str], places: Sequence[str] | None = None) -> tuple[str, ...]:
    """Folders of the packages' metadata, which their versions are part of, in the places that modules are looked for in. importlib.metadata would take longer to load than
    all else that a key needs."""
    found = []
    for place in sys.path if places is None else places:
        with suppress(OSError):
            found += [e for e in os.listdir(place or ".") if e.endswith((".dist-info", ".egg-info")) and e.partition("-")[0].lower() in names]
    return tuple(sorted(found))


def digest(value: Any) -> str:
    """Digest of a value made of plain types, tuples, lists, mappings, sets of plain values and dataclasses. Raises TypeError for anything else."""
    known = hashlib.blake2b(digest_size=16)
    _add(known, value)
    return known.hexdigest()


def _add(known: Any, value: Any) -> None:
    if isinstance(value, bytes):
        known.update(b"b%d:" % len(value) + value)
    elif value is None or isinstance(value, bool | int | float | str):
        text = repr(value).encode()
        known.update(type(value).__name__.encode() + b"%d:" % len(text) + text)
    elif is_dataclass(value) and not isinstance(value, type):
        _add(known, type(value).__qualname__)
        _add(known, {f.name: getattr(value, f.name) for f in fields(value) if f.compare})
    elif isinstance(value, Mapping):
        known.update(b"m%d:" % len(value))
        for pair in value.items():
            _add(known, pair)
    elif isinstance(value, tuple | list):
        known.update(b"s%d:" % len(value))
        for item in value:
            _add(known, item)
    elif isinstance(value, frozenset | set):
        _add(known, sorted(value))
    else:
        raise TypeError(f"{type(value).__qualname__} has no fingerprint")
