"""A model opened for a workload, from every source that the planner takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.support.choices import choose
from planner.workload.host_tables import PLACES
from planner.workload.routing import factor_of, spread_of

if TYPE_CHECKING:
    from planner.workload.model import Model, Workload


def workload_of(*, workload: str = "train", **options: Any) -> Workload:
    """The workload of keywords, each a field of Workload; None leaves a field as it usually is.
    Raises PlanError for names that do not exist, and for what inference has not."""
    from planner.workload.model import Workload

    choose("tables", options.get("tables", PLACES[0]), PLACES)
    chosen = {k: v for k, v in options.items() if v is not None}
    for key, read in (("imbalance", spread_of), ("capacity", factor_of)):
        if key in chosen:
            chosen[key] = read(chosen[key])
    for key in ("trainable", "freeze", "tie"):
        chosen[key] = tuple(chosen.get(key, ()))
    return Workload(kind=workload, **chosen)


def open_model(source: Any, devices: int, **workload: Any) -> Model:
    """Open a model for a workload, given as keywords of `workload_of`."""
    from planner.workload.model import Model

    return Model.open(source, workload_of(**workload), devices)
