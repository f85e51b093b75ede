"""Columns before rows: in pairs, across attention, and not in routers."""

from __future__ import annotations

import pytest

import planner
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


def test_adapters_are_no_pair() -> None:
    """The inner product as the weight beside it, the outer one by columns: cut by its rows, each
    result as wide as the weight's would be summed up over the tensor axis."""
    graph = api.open_model("zoo:llama-tiny", 8, batch=8, lora="rank=2,targets=*_proj.weight").graph(
        1
    )
    ways = {}
    for i, way in directions(graph).items():
        weight = next(n for n in graph.nodes[i].inputs if n in graph.weights)
        ways[graph.labels.get(weight, weight)] = way
    bases = {label for label in ways if label.endswith("_proj.weight")}
    assert len(bases) == 7 * 2
    for label in bases:
        assert (ways[f"{label}.lora_A"], ways[f"{label}.lora_B"]) == (ways[label], "columns")


def test_adapters_hardly_add_to_what_tensor_parallelism_sends() -> None:
    """Of Megatron's layout, two blocks of Llama-3 8B: 0.91 times the bytes (the table is frozen), 2.6 before."""

    def sent(**more: str) -> float:
        made = planner.plan(
            "zoo:llama3-8b,layers=2,seq=1024",
            devices=8,
            batch=8,
            runtime="megatron",
            pins="tp=8,sp=on,tensor=megatron-sp,micro=1,recompute=none",
            baselines=False,
            **more,
        )
        return sum(
            float(c["payload"])
            for ways in made.costs["communication_bytes_per_device"].values()
            for axes, c in ways.items()
            if axes == "tensor"
        )

    assert sent(lora="rank=16,targets=*_proj.weight") < 1.5 * sent()
