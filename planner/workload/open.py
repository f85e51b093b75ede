"""A model opened for a workload, from every source that the planner takes."""

from __future__ import annotations

from typing import Any

from planner.support.choices import choose
from planner.workload.host_tables import PLACES


def open_model(source: Any, devices: int, **workload: Any) -> Any:
    """Open a model for a workload."""
    from planner.workload.model import Model, Workload

    kind = workload.pop("workload", "train")
    choose("tables", workload.get("tables", PLACES[0]), PLACES)
    pick = {k: v for k, v in workload.items() if v is not None}
    for key in ("trainable", "freeze", "tie"):
        pick[key] = tuple(pick.get(key, ()))
    return Model.open(source, Workload(kind=kind, **pick), devices)
