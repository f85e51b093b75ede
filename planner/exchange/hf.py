"""Hugging Face transformers: a tensor-parallel plan per module, and the degrees and arguments of its Trainer, as JSON.

    tp_plan                                      module pattern -> colwise, rowwise, colwise_gather_output (a head), embedding_rowwise (a vocabulary)
    tp_size, cp_size, dp_replicate_size, dp_shard_size     model, sequence, data at level 0, data at levels 2 and 3
    per_device_train_batch_size, gradient_accumulation_steps, gradient_checkpointing, fsdp_config.reshard_after_forward

The styles are read from the layouts of the plan that is priced last: a weight whose cut dim is summed over is rowwise, one whose cut dim its result has colwise.
Source: docs/source/en/tensor_parallelism.md of huggingface/transformers and the `base_model_tp_plan` of its configurations.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from planner.exchange.settings import Facts, Rounds, Settings
from planner.naming import role_named

if TYPE_CHECKING:
    from planner.base import Base
    from planner.strategy import Strategy

NAME, SUFFIX = "hf", ".json"


def round_off(rounds: Rounds, facts: Facts) -> list[str]:
    """Rounds settings to what can be said here; returns what cannot be said and has no price."""
    s = rounds.now
    if s.stage > 1:
        rounds.to("no pipeline stages: data parallel instead", data=s.data * s.stage, stage=1, schedule="", virtual=1)
    if s.expert > 1:
        rounds.to("experts are not cut apart: data parallel instead", data=rounds.now.replicas, expert=1)
    rounds.usual("transformers")
    if rounds.now.zero == 1:
        rounds.to("sharded ranks scatter gradients too: optimizer level 2", zero=2)
    rounds.to("tensor parallelism leaves positions whole", positions=False)
    return []


def write(s: Settings, facts: Facts) -> str:
    """The settings as one JSON table."""
    table: dict[str, Any] = {
        "distributed_config": {"tp_size": s.model}, "tp_plan": dict(facts.styles) if s.model > 1 else {},
        "parallelism_config": {"dp_replicate_size": 1 if s.zero else s.data, "dp_shard_size": s.data if s.zero else 1, "cp_size": s.sequence, "tp_size": s.model},
        "training_arguments": {"per_device_train_batch_size": s.rows, "gradient_accumulation_steps": s.microbatches, "gradient_checkpointing": s.recompute == "block"},
    }  # fmt: skip
    if s.zero:
        table["training_arguments"]["fsdp_config"] = {"fsdp_version": 2, "reshard_after_forward": s.zero == 3}
    return json.dumps(table, indent=2) + "\n"


def styles(strategy: Strategy, base: Base) -> dict[str, str]:
    """Module pattern -> style, of the weights that "model" cuts; layer numbers starred, in the order of the graph."""
    graph, found = base.graph, dict[str, str]()
    for name in graph.weights:
        row = strategy.tensors.get(name)
        cut = [d for d, axes in enumerate(row["layout"]) if any(role_named(a) == "model" for a in axes)] if row else []
        label = graph.labels.get(name, name)
        module, _, leaf = label.rpartition(".")
        if not cut or leaf != "weight":
            continue
        i, slot = graph.consumers[name][0]
        node, rule = graph.nodes[i], base.rules[i]
        factor = rule.operands[slot][cut[0]][0]
        kept = any(factor in dim for dim in rule.results[0])
        if node.op == "Gather":
            style = "embedding_rowwise" if cut[0] == 0 else ""
        elif node.op in ("MatMul", "Gemm"):
            style = "rowwise" if not kept else "colwise_gather_output" if i not in base.repeated else "colwise"
        else:
            style = ""
        if style:
            found.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module), style)
    return found


