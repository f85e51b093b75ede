"""What a plan's offloading keeps in the memory of hosts."""

from __future__ import annotations

from planner.analysis.facts import GraphFacts
from planner.execution.engine import Engine, engine_of
from planner.execution.even_collectives import weights_of_other_stages
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock
from planner.execution.pipeline import pipeline_of
from planner.execution.weight_offload import offloaded_names
from planner.pricing.device_weights import device_weights
from planner.pricing.pricer import Pricer
from planner.pricing.saved_activations import sent_activations
from planner.pricing.uneven_step import trained_weights


def offloaded_bytes(
    base: GraphFacts, flow: Flow, pricer: Pricer, runs: tuple[RepeatedBlock, ...]
) -> int:
    """Bytes of one device that lie in its host's memory: the optimizer's state, weights with their
    gradients, what recomputed blocks send there of the microbatches that run at a time."""
    plan, recipe = flow.plan, pricer.recipe
    state = "optimizer" in plan.offload
    if engine_of(plan) is Engine.UNEVEN:
        return int(state * sum(w.optimizer_bytes(recipe) for w in trained_weights(flow)))
    graph, pipeline, away = base.graph, pipeline_of(base.graph, plan), offloaded_names(flow, runs)
    elsewhere = weights_of_other_stages(graph, pipeline) if pipeline else frozenset[str]()
    total = plan.overlapped_microbatches * sent_activations(base, flow, pricer, runs)[0]
    for name, weight in device_weights(flow).items():
        if name in elsewhere:
            continue
        trained = name in flow.grad
        if trained and state:
            total += weight.optimizer_bytes(recipe)
        if name in away:
            t = graph.tensors[name]
            element = recipe.parameter_bytes if t.is_float else pricer.itemsize(t.dtype)
            total += weight.stored * element
            total += weight.gradient_bytes(recipe, looped=True) if trained else 0.0
    return int(total)
