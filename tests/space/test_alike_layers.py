"""Layers that decide alike inside a block: the problem of a search that ties them says of a choice
what the problem of all layers apart says of the same splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodels.precision import load_recipe
from costmodels.runtimes import load_runtime
from planner.analysis.facts import GraphFacts
from planner.execution.save_policies import PRESETS, saving
from planner.machine.mesh_choices import meshes, staged_meshes
from planner.machine.topology import for_devices
from planner.pricing.pricer import Pricer
from planner.solvers import solve
from planner.solvers.problem import FORBIDDEN, evaluate
from planner.space.assemble import assemble, usage_of
from planner.space.build import build_space
from planner.space.techniques import Techniques
from planner.space.variables import Space
from planner.workload.model import Model, Workload

WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    # Three layers with a window, then one without.
    "gemma3_text": {
        **WIDE,
        "intermediate_size": 512,
        "vocab_size": 512,
        "num_hidden_layers": 9,
        "sliding_window": 16,
        "sliding_window_pattern": 4,
        "max_position_embeddings": 64,
    },
    # Dense layers and mixtures in turn, three layers with a window and one without.
    "llama4_text": {
        **WIDE,
        "intermediate_size": 128,
        "intermediate_size_mlp": 512,
        "vocab_size": 512,
        "num_hidden_layers": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 64,
        "attention_chunk_size": 16,
    },
}
TECHNIQUES = (
    Techniques(1, "none"),
    Techniques(3, "none", 2),
    Techniques(1, "block"),
    Techniques(2, "block-keep", 2),
    *(Techniques(1, saving(PRESETS[p])) for p in ("save_qkv_proj", "minimal_with_context")),
)
STAGED = (Techniques(1, "none", 4), Techniques(1, "block", 4, "gpipe"))


def facts(model_type: str, tmp_path: Path) -> GraphFacts:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": model_type, **CONFIGS[model_type]}))
    model = Model.open(str(config), Workload(batch=16, dims={"seq": 64}), 8)
    return GraphFacts.of(model.graph(1), training=True)


def space_of(base: GraphFacts, shape: tuple[int, ...], hardware: str) -> Space:
    topology = for_devices(hardware, 8)
    known = (*meshes(topology), *staged_meshes(topology, 2))
    mesh = next(m for m in known if tuple(a.size for a in m.axes) == shape)
    pricer = Pricer(topology, mesh, load_runtime("jax-shard_map"), load_recipe("bf16-mixed"))
    return build_space(base, pricer, zero_axes=mesh.zero_axes)


def same_choice(tied: Space, apart: Space, choice: np.ndarray) -> tuple[int, ...]:
    """The choice of a tied space in one whose layers decide apart."""
    shared = tied.base.shared
    carried = apart.base.carried
    name_of_key = {}
    for edge in tied.base.tensor_edges:
        uses = tuple((i, slot) for i, slot, _ in edge.uses)
        name_of_key[edge.maker, uses, edge.name in carried] = edge.name
    k_of = {v.name: k for k, v in enumerate(tied.variables)}
    name_of = {}
    for edge in apart.base.tensor_edges:
        made = edge.maker and (shared[edge.maker[0]], edge.maker[1])
        uses = tuple(dict.fromkeys((shared[i], slot) for i, slot, _ in edge.uses))
        name_of[edge.name] = name_of_key[made, uses, edge.name in carried]
    result = []
    for v in apart.variables:
        if v.kind == "op":
            k = tied.op_of[shared[v.node]]
            result.append(v.splits.index(tied.variables[k].splits[choice[k]]))
        else:
            k = k_of[name_of[v.name]]
            result.append(v.layouts.index(tied.variables[k].layouts[choice[k]]))
    return tuple(result)


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize(
    ("shape", "hardware"),
    [((4, 2), "h100-sxm"), ((8,), "h100-sxm"), ((2, 2, 2), "h100-sxm"), ((4, 2), "v5e")],
)
def test_tied_problems_are_those_of_layers_apart(
    model_type: str, shape: tuple[int, ...], hardware: str, tmp_path: Path
) -> None:
    base = facts(model_type, tmp_path)
    assert len(base.tied.times) < 0.75 * len(base.times) and base.tied.untied is base
    apart, tied = space_of(base, shape, hardware), space_of(base.tied, shape, hardware)
    rng = np.random.default_rng(5)
    for at in TECHNIQUES if len(shape) < 3 else STAGED:
        one, other = (assemble(space, at, None) for space in (tied, apart))
        drawn = [[int(rng.choice(np.flatnonzero(c < FORBIDDEN))) for c in one.cost] for _ in "1234"]
        # What is drawn is mostly forbidden, so that of its cost nothing is said.
        for choice in map(np.array, (*drawn, solve(one, "dp").choice)):
            there = same_choice(tied, apart, choice)
            cost, cost_apart = evaluate(one, choice), evaluate(other, there)
            assert cost.forbidden == 0 or cost_apart.forbidden > 0
            if not cost.forbidden:
                assert cost.cost == pytest.approx(cost_apart.cost, rel=1e-9, abs=len(there) * 8)
            held, held_apart = usage_of(tied, at, choice), usage_of(apart, at, there)
            assert held == pytest.approx(held_apart, rel=1e-9, abs=8)
