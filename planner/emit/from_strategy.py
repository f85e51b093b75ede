"""The program of a strategy: its model opened again and held against the file, then written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from costmodels.precision import load_recipe
from planner.emit.writer import Training
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.ops.lookup import rule_of
from planner.search.build_request import _gpu_memory, emitted_recipe
from planner.strategy.strategy import Strategy
from planner.support.choices import choose


def program(
    strategy: Strategy,
    source: str | Path,
    *,
    backend: str = "shard_map",
    unroll: bool = False,
    weights_file: str = "",
    model_folder: str = ".",
) -> Any:
    """The emitted program (text and constants) of a strategy on a model. weights_file,
    model_folder: as for `planner.emit.program.emit`. Raises PlanError when the model is another
    one."""
    from planner.emit.header import header
    from planner.emit.program import emit
    from planner.whatif.reprice import own_model

    choose("backend", backend, ("shard_map", "jit"))
    model = own_model(strategy, source)
    graph = model.graph(int(strategy.techniques["microbatches"]))
    return emit(
        graph,
        strategy.plan_for(graph),
        workload=strategy.workload["kind"],
        backend=backend,  # type: ignore[arg-type]
        unroll=unroll,
        gpu_memory=_gpu_memory(strategy),
        training=_training(strategy, graph),
        header=header(strategy, backend),
        weights_file=weights_file,
        model_folder=model_folder,
        compute=emitted_recipe(str(strategy.workload["precision"])).compute,
    )


def _training(strategy: Strategy, graph: Graph) -> Training:
    """What the program trains with, and what its figures are made of."""
    if strategy.workload["kind"] != "train":
        return Training()
    training, costs = strategy.workload.get("training") or {}, strategy.costs
    done = costs["flops_per_device"] * costs["distinct_work"]
    busy_s = costs["model_flops_utilization"] * costs["step_time_s"]
    hidden = sum(
        rule_of(node, graph)[0].flops / 2
        for node in graph.nodes
        if operator_of(node.op).kind == "attention" and node.attrs.get("causal")
    )
    passes = 3 * int(strategy.techniques["microbatches"])  # the backward pass counts twice
    items = int(costs.get("tokens_per_step", 0))
    return Training(
        optimizer=training.get("optimizer", "adamw"),
        lr=training.get("lr", 1e-4),
        state=load_recipe(str(strategy.workload["precision"])).state_type,
        items=items,
        item="samples" if items == strategy.workload["batch"] else "tokens",
        model_flops=max(0.0, done * int(strategy.topology["devices"]) - passes * hidden),
        peak_flops=done / busy_s if busy_s else 0.0,
    )


def emit(
    strategy: Strategy, source: str | Path, *, backend: str = "shard_map", unroll: bool = False
) -> str:
    """Source text of the program."""
    return str(program(strategy, source, backend=backend, unroll=unroll).text)
