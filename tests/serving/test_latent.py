"""Latent attention (DeepSeek): caches hold latents, steps read them where they lie, and programs
generate what the model itself does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import models_zoo
from models_zoo.hf_config import from_config
from planner.cli import main
from planner.errors import PlanError
from planner.pins.pins import Pins
from planner.search.build_request import make_request
from planner.search.to_strategy import compose
from planner.serving.joint import NO_TECHNIQUES, Joint, weight_pins
from planner.serving.result import Serving
from planner.serving.serve import reopened, serve
from tests.serving.test_cache_type import run
from tests.serving.test_serving import (
    cut_along_positions,
    emitted,
    generated,
    greedy,
    on_mesh,
    prompts,
    rounded,
    uncached,
)

TINY = "zoo:deepseek-tiny,cache=1,weights=inline"
V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 512,
}
"""Values are narrower than the keys' part without rotation."""


def caches(made: Serving) -> dict[str, tuple[list[int], list[list[str]]]]:
    """Label -> (shape, layout) of each cache."""
    return {
        str(t["label"]): (list(t["shape"]), t["layout"])
        for t in made.step.tensors.values()
        if str(t.get("label", "")).startswith("cache.")
    }


def generates(source: str, made: Serving, folder: Path, model: Any = None) -> bool:
    """Whether the program generates what onnxruntime does with the model's own cache; the second
    sequence is shorter."""
    ids = prompts(made.shape.concurrency, 8)
    wanted = greedy(model or models_zoo.build(source), ids, made.shape.generate)
    return bool((generated(folder, emitted(folder, source, made), ids) == wanted).all())


@pytest.mark.slow
def test_heads_are_cut_and_latents_are_whole(tmp_path: Path) -> None:
    """Two replicas of four devices, of which each has a head."""
    made = on_mesh(TINY, 2, 4)
    kept = {"latent": 32, "rotary_key": 8}
    assert caches(made) == {
        f"cache.{i}.{part}": ([4, 1, 14, width], [["data"], [], [], []])
        for i in range(2)
        for part, width in kept.items()
    }
    assert made.figures["cache_bytes"] == 2 * 2 * 14 * (32 + 8) * 2
    splits = [n["split"] for n in made.step.nodes.values() if n["op"] == "CachedLatentAttention"]
    assert len(splits) == 2 and all(s["h"] == ["tensor"] for s in splits)
    assert generates(TINY, made, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "split", "label"), [(4, 2, "tp"), (1, 8, "layout of a step"), (2, 4, "layout")]
)
def test_other_meshes_generate_alike(replicas: int, split: int, label: str, tmp_path: Path) -> None:
    assert generates(TINY, on_mesh(TINY, replicas, split, label=label), tmp_path)


@pytest.mark.parametrize(
    ("replicas", "split", "label"),
    [
        (4, 2, "ep=4 tp=2"),
        pytest.param(2, 4, "ep=2 layout of a step", marks=pytest.mark.slow),
        pytest.param(4, 2, "ep=4 layout of the prompts", marks=pytest.mark.slow),
    ],
)
def test_replicas_share_experts(replicas: int, split: int, label: str, tmp_path: Path) -> None:
    """Each has latents of its own sequences, and a part of all experts; prompts in two passes."""
    made = on_mesh(TINY, replicas, split, label=label, prefill_tokens=8)
    assert {str(layout) for _, layout in caches(made).values()} == {str([["expert"], [], [], []])}
    (experts,) = (n["split"] for n in made.step.nodes.values() if n["op"] == "RoutedExperts")
    assert "expert" in {axis for axes in experts.values() for axis in axes}
    assert generates(TINY, made, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [8, 8192])
def test_rows_travel_to_their_experts(at_once: int, tmp_path: Path) -> None:
    """Pinned, in both phases, prompts in two passes and in one."""
    made = serve(TINY, prompt=8, generate=6, concurrency=8, devices=8, prefill_tokens=at_once)
    models, mesh = reopened(made, TINY), {"expert": (4,), "tensor": (2,)}
    request = make_request(
        devices=8, hardware=None, topology=None, workload="infer", baselines=False
    )
    joint = Joint(models[0], models[1], request, prefill_tokens=at_once)
    own = {"*/self_attn/Attention": {"split": {"b": ["expert"]}}}
    sent = {"split": {"expert-b": ["expert"]}}
    step = joint.solve(models[1], Pins(mesh, NO_TECHNIQUES, nodes={**own, "*/routedexperts": sent}))
    assert step is not None and step.best is not None
    passed = joint.prompts(4)
    weights = weight_pins(step.base, step.best.plan, passed.graph(1))
    nodes = {**own, "*/mlp/ReduceSum_4": sent, **weights}
    first = joint.solve(passed, Pins(mesh, NO_TECHNIQUES, nodes=nodes))
    assert first is not None
    pair = joint.price("pinned", first, step, 4, 2)
    assert pair is not None and pair.wave == (4 if at_once == 8 else 8)
    made = replace(
        made,
        figures=pair.figures(),
        prompts=compose(passed, request, first, {}, ()),
        step=compose(models[1], request, step, {}, ()),
    )
    assert generates(TINY, made, tmp_path)


@pytest.mark.slow
def test_tokens_are_those_of_the_model_without_a_cache(tmp_path: Path) -> None:
    made = serve(TINY, prompt=8, generate=6, concurrency=8, devices=8)
    ids = np.random.default_rng(2).integers(1, 500, (8, 8))
    tokens = generated(tmp_path, emitted(tmp_path, TINY, made), ids)
    assert (tokens == uncached("zoo:deepseek-tiny,weights=inline", ids, 6)).all()


@pytest.mark.slow
def test_nothing_is_made_of_earlier_tokens_in_a_step() -> None:
    """No tensor but caches and their mask has as many rows as there are earlier tokens."""
    made = serve(TINY, prompt=32, generate=5, concurrency=8, devices=2)
    graph = reopened(made, TINY)[1].graph(1)
    read = {n for node in graph.nodes for n in (*node.inputs, *node.outputs)}
    long = {n for n in read if n in graph.tensors and {36, 37} & set(graph.tensors[n].shape)}
    assert {n for n in long if "mask" not in n} == {n for n in long if n.startswith("past")}
    assert len(long) > 4 and {"CachedLatentAttention", "HeadProduct"} <= {n.op for n in graph.nodes}


def in_two(model: Any, transposed: bool) -> Any:
    """The model with matrices of their own for keys and values, which may be stored the other way
    round."""
    stored = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    nodes = list[Any]()
    for node in model.graph.node:
        end = node.name.rpartition("self_attn/")[2]
        if end in ("Reshape_1", "Transpose_1"):
            continue
        if end == "kv_b_proj/MatMul":
            latent, matrix = node.input[0], stored[node.input[1]].reshape(32, 4, 32)
        elif end == "Split_2":
            for result, start in zip(node.output, (0, 16), strict=True):
                flat = matrix[:, :, start : start + 16].reshape(32, 64)
                weight = numpy_helper.from_array(
                    flat.T.copy() if transposed else flat.copy(), f"{result}.weight"
                )
                sizes = numpy_helper.from_array(np.array([0, -1, 4, 16]), f"{result}.sizes")
                model.graph.initializer.extend([weight, sizes])
                name = f"{result}.columns" if transposed else weight.name
                if transposed:
                    nodes.append(helper.make_node("Transpose", [weight.name], [name], perm=[1, 0]))
                nodes += [
                    helper.make_node("MatMul", [latent, name], [f"{result}.flat"]),
                    helper.make_node(
                        "Reshape", [f"{result}.flat", sizes.name], [f"{result}.apart"]
                    ),
                    helper.make_node("Transpose", [f"{result}.apart"], [result], perm=[0, 2, 1, 3]),
                ]
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_keys_and_values_may_have_matrices_of_their_own(transposed: bool, tmp_path: Path) -> None:
    source = str(tmp_path / "model.onnx")
    onnx.save(in_two(models_zoo.build(TINY), transposed), source)
    made = serve(source, prompt=8, generate=6, concurrency=1, devices=1)
    ops = [n["op"] for n in made.step.nodes.values()]
    assert ops.count("CachedLatentAttention") == 2 and ops.count("HeadProduct") == 4


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_their_own_generate_alike(transposed: bool, tmp_path: Path) -> None:
    source = str(tmp_path / "model.onnx")
    onnx.save(in_two(models_zoo.build(TINY), transposed), source)
    assert generates(source, on_mesh(source, 2, 4), tmp_path, onnx.load(source))


def test_other_uses_of_latents_are_refused() -> None:
    """Latents that pass a function before the product are no longer what the cache holds."""
    model = models_zoo.build(TINY)
    product = next(n for n in model.graph.node if "layers.1/self_attn/kv_b_proj" in n.name)
    at = list(model.graph.node).index(product)
    model.graph.node.insert(at, helper.make_node("Tanh", [product.input[0]], ["bent"]))
    model.graph.node[at + 1].input[0] = "bent"
    with pytest.raises(PlanError, match="cache 'present.1.latent' is read by Reshape") as e:
        serve(model, prompt=8, generate=6, concurrency=4, devices=4)
    assert e.value.code == "P221"


@pytest.mark.slow  # test_windows.py serves another
def test_a_config_is_served_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Queries that are not compressed, values of other widths than keys, no word of a cache."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(V3))
    sizes = ["--prompt", "8", "--generate", "6", "--concurrency", "4", "--devices", "4"]
    command = ["config.json", "--workload", "infer", *sizes, "-o", "plan.json"]
    assert main([*command, "--emit", "program.py"]) == main([*command, "--quiet"]) == 0
    assert "latent [b" in capsys.readouterr().out
    assert "CachedLatentAttention" in {
        n["op"] for n in Serving.load("plan.json").step.nodes.values()
    }
    model = from_config("config.json", {"cache": "1", "weights": "inline"})
    onnx.save(model, "model.onnx")
    assert generates("model.onnx", on_mesh("model.onnx", 2, 4), tmp_path, model)


@pytest.mark.slow
def test_a_window_of_latents_generates_alike(tmp_path: Path) -> None:
    source = f"{TINY},window=6,full_every=2"
    made = on_mesh(source, 2, 4)
    assert {tuple(shape) for shape, _ in caches(made).values()} == {
        (4, 1, tokens, width) for tokens in (6, 14) for width in (32, 8)
    }
    assert generates(source, made, tmp_path)


@pytest.mark.slow
def test_latents_cut_along_positions_generate_alike(tmp_path: Path) -> None:
    """Pinned: no search of so small a model would choose it."""
    made = cut_along_positions(TINY, "*/self_attn/Attention")
    assert {str(layout) for _, layout in caches(made).values()} == {
        str([["data"], [], ["tensor"], []])
    }
    assert generates(TINY, made, tmp_path)


@pytest.mark.slow
def test_a_rounded_cache_generates_what_a_model_with_one_does(tmp_path: Path) -> None:
    made = serve(TINY, prompt=8, generate=6, concurrency=8, devices=8, cache_type="fp8")
    ids = prompts(8, 8)
    ids[1, :3] = ids[2, :3]  # no padding here
    tokens = generated(tmp_path, emitted(tmp_path, TINY, made), ids)
    assert (tokens == run(models_zoo.build(TINY), ids, 6, True)[0]).all()


@pytest.mark.slow
def test_int8_leaves_what_spreads_latents_as_it_is(tmp_path: Path) -> None:
    """The model with rounded weights in the place of others generates the program's tokens."""
    model, changed = rounded(TINY, apart="kv_b_proj")
    made, ids = on_mesh(TINY, 2, 4, quantize="int8"), prompts(4, 8)
    graph = reopened(made, TINY)[1].graph(1)
    kept = {n: t.dtype for n, t in graph.tensors.items() if n in graph.weights and "_proj" in n}
    assert changed and set(kept.values()) == {"int8", "float32"}
    assert {d for n, d in kept.items() if "kv_b_proj" in n} == {"float32"}
    tokens = generated(tmp_path, emitted(tmp_path, TINY, made), ids)
    assert (tokens == greedy(model, ids, 6)).all()


@pytest.mark.slow
def test_a_token_of_v3_takes_576_numbers_a_layer() -> None:
    """On every device of a replica, however many cut its heads; a row of keys and values spread out
    for 128 heads would be 71 times as large."""
    ask: dict[str, Any] = {"prompt": 2000, "generate": 48, "concurrency": 16, "devices": 4}
    made = serve("zoo:deepseek-v3,layers=2,dense_layers=1", hardware="h200", **ask)
    rows = {row["split"]: row for row in made.rows if row["label"].startswith("tp=")}
    for split, row in rows.items():
        replicas = 4 // split
        assert row["cache_bytes"] == 2 * 576 * 2 * 2048 * 16 // replicas
    assert len(rows) == 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("heads", "published"), [(128, 660e12), (16, 3000e9)])
def test_the_price_of_a_step_is_near_flashmla(heads: int, published: float) -> None:
    """FlashMLA on H800 (deepseek-ai/FlashMLA, README): up to 660 TFLOP/s where arithmetic bounds
    it, as with all heads of DeepSeek-V3 on a device, and 3,000 GB/s where memory does, as with 16
    of them."""
    source = f"zoo:deepseek-v3,layers=1,dense_layers=1,heads={heads},kv_heads={heads}"
    tokens = 8192
    made = serve(source, hardware="h100", prompt=8000, generate=192, concurrency=64, devices=1)
    (took_s,) = (
        n["time_s"] for n in made.step.nodes.values() if n["op"] == "CachedLatentAttention"
    )
    amount = 2 * heads * (576 + 512) if heads == 128 else 576 * 2
    assert 64 * tokens * amount / took_s == pytest.approx(published, rel=0.15)
