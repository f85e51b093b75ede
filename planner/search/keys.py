"""The key of a search: a hash of everything its answer follows from.

    program   every source file and figure of this package and of costmodels, Python, and the
              libraries that compute
    model     its file, the canonical graph that was made of it (both without names,
              planner.cache.content_digest), and the workload but for what no price knows
    request   machine, memory, precision, runtime, solver, pins, limits, seed: all of
              planner.search.request.Request but where it is kept; and where pins name nodes, the
              model's names

Values are written with their types and lengths, so that no two differ in meaning and agree in
bytes; a type that is not known is an error, never left out.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from planner.cache.content_digest import file_content, graph_content, names_of
from planner.cache.keys import digest, program

if TYPE_CHECKING:
    from planner.search.request import Request
    from planner.workload.model import Model

FORMAT = 2
"""Of what is kept under a key (planner.search.cache_entry)."""
APART = ("name", "folder", "proto", "workload")
"""Fields of a model that are no part of its key as they are: a name and a place change no plan,
file and workload have a part of their own. Nor are those that nothing is compared by."""


def model_key(model: Model) -> str:
    """The key of what a model is read as. Raises PlanError where it cannot be read."""
    content = file_content(model.proto, model.plain.trainable), graph_content(model.graph(1))
    return digest((*_circumstances(model), content))


def history_key(model: Model, request: Request) -> str:
    """The key of the searches for models that differ in their content alone
    (planner.search.incremental)."""
    return digest(
        (
            "history",
            *_circumstances(model),
            request,
            names_of(model.graph(1)) if request.pins.nodes else "",
        )
    )


def _circumstances(model: Model) -> tuple[Any, ...]:
    """What a model's key follows from beside its content: the program, and what is run."""
    public = {
        f.name: getattr(model, f.name)
        for f in fields(model)
        if f.compare and not f.name.startswith("_") and f.name not in APART
    }
    workload = replace(
        model.workload, batch=model.batch, tokens_per_step=None
    )  # as it was resolved, whoever said it
    if workload.kind == "train":
        workload = replace(workload, loss=model.loss, lr=0.0)  # how far a step goes costs nothing
    return FORMAT, program(), type(model).__qualname__, public, workload


def search_key(model: Model, key: str, request: Request) -> str:
    """The key of a search for a model, whose own is given (`model_key`), under a request."""
    return digest((key, request, names_of(model.graph(1)) if request.pins.nodes else ""))


def incremental_key(search: str) -> str:
    """The key of an answer to what another search, whose key is given, was asked, that keeps what
    was decided before (planner.search.incremental)."""
    return digest((search, "incremental"))


def reading_key(model: str, microbatches: int) -> str:
    """The key of what is known of a model's graph (`model_key`) at so many microbatches."""
    return digest((model, "reading", microbatches))
