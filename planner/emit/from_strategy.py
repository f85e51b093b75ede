"""The program of a strategy: its model opened again and held against the file, then written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from costmodels.precision import load_recipe, recipe_names
from planner.errors import PlanError
from planner.search.build_request import _gpu_memory
from planner.strategy.strategy import Strategy
from planner.support.choices import choose


def program(
    strategy: Strategy,
    source: str | Path,
    *,
    backend: str = "shard_map",
    unroll: bool = False,
    weights_file: str = "",
) -> Any:
    """The emitted program (text and constants) of a strategy on a model. Raises PlanError when the
    model is another one."""
    from planner.emit.header import header
    from planner.emit.program import emit
    from planner.emit.writer import Training
    from planner.whatif.reprice import own_model

    choose("backend", backend, ("shard_map", "jit"))
    model = own_model(strategy, source)
    graph = model.graph(int(strategy.techniques["microbatches"]))
    training = (
        (strategy.workload.get("training") or {}) if strategy.workload["kind"] == "train" else {}
    )
    return emit(
        graph,
        strategy.plan_for(graph),
        workload=strategy.workload["kind"],
        backend=backend,  # type: ignore[arg-type]
        unroll=unroll,
        gpu_memory=_gpu_memory(strategy),
        training=Training(training.get("optimizer", "adamw"), training.get("lr", 1e-4)),
        header=header(strategy, backend),
        weights_file=weights_file,
        compute=computed_in(str(strategy.workload["precision"])),
    )


def computed_in(precision: str) -> str:
    """The type that programs of a recipe compute in. Raises PlanError P077 for recipes that are
    priced, not emitted."""

    choose("precision", precision, recipe_names())
    recipe = load_recipe(precision)
    if not recipe.emitted:
        written = [name for name in recipe_names() if load_recipe(name).emitted]
        raise PlanError(
            "P077",
            f"no program is written in {precision} ({recipe.note}): it is priced only",
            detail=[f"programs are written in {' and '.join(written)}"],
            help=[
                f"plan again with --precision {' or '.join(written)} for a program, or for the"
                " price alone without --emit and --confirm"
            ],
        )
    return recipe.compute


def emit(
    strategy: Strategy, source: str | Path, *, backend: str = "shard_map", unroll: bool = False
) -> str:
    """Source text of the program."""
    return str(program(strategy, source, backend=backend, unroll=unroll).text)
