"""Columns before rows: in pairs, across attention, and not in routers."""

from __future__ import annotations

import pytest

import planner.api as api
from planner.analysis.columns_rows import directions


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        ("zoo:llama-tiny", {"embed_tokens", "self_attn.o_proj", "mlp.down_proj"}),
        ("zoo:gpt2-small,layers=2", {"wte", "attn.out_proj", "mlp.c_proj"}),
        ("zoo:mixtral-8x7b,layers=2", {"embed_tokens", "self_attn.o_proj"}),
        ("zoo:deepseek-v2-lite,layers=2", {"embed_tokens", "self_attn.o_proj", "down_proj"}),
        (
            "zoo:bert-base,layers=2",
            {"word_embeddings", "attention.output.dense", "output.dense", "classifier"},
        ),
    ],
)
def test_which_weights_are_cut_by_rows(model: str, rows: set[str]) -> None:
    graph = api.open_model(model, 8, batch=8).graph(1)
    for i, way in directions(graph).items():
        weight = next(n for n in graph.nodes[i].inputs if n in graph.weights)
        label = graph.labels.get(weight, weight).removesuffix(".weight")
        lookup = graph.tensors[graph.nodes[i].inputs[0]].name == weight
        tied = label.endswith("wte") and not lookup  # its head
        assert (way == "rows") == (any(label.endswith(r) for r in rows) and not tied), label
        assert not label.endswith("block_sparse_moe.gate")
