"""Operators of com.microsoft: what is read of them computes what onnxruntime computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.reader import read_model
from planner.serving.cached import form_of
from tests.reader.canonical_onnx import difference, run, to_onnx
from tests.reader.reader_models import ops, rand, same

F, I, J = np.float32, np.int32, np.int64
B, S, H, G, D, P = 2, 5, 4, 2, 16, 3
"""Rows, tokens, heads, heads of keys, features of a head, tokens in the cache."""


def built(
    op: str, given: dict[str, Any], stored: dict[str, Any], outputs: int = 1, **attrs: Any
) -> onnx.ModelProto:
    """A model of one node: operands in their order (None: absent), those of `stored` in the
    file."""
    operands = {**given, **stored}
    names = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(
        op,
        [n if operands[n] is not None else "" for n in operands],
        names,
        name="node",
        domain="com.microsoft",
        **attrs,
    )
    return wrapped([node], {n: a for n, a in given.items() if a is not None}, stored, names)


def wrapped(
    nodes: Sequence[onnx.NodeProto],
    given: dict[str, Any],
    stored: dict[str, Any],
    outputs: Sequence[str],
) -> onnx.ModelProto:
    """A model of nodes."""
    code = helper.np_dtype_to_tensor_dtype
    graph = helper.make_graph(
        list(nodes),
        "g",
        [
            helper.make_tensor_value_info(n, code(np.asarray(a).dtype), np.shape(a))
            for n, a in given.items()
        ],
        [helper.make_empty_tensor_value_info(n) for n in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in stored.items() if a is not None],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def agrees(
    op: str, given: dict[str, Any], stored: dict[str, Any], outputs: int = 1, **attrs: Any
) -> Graph:
    """Reads one node, which onnxruntime computes alike before and after."""
    feeds = {n: np.asarray(a) for n, a in given.items() if a is not None}
    return same(built(op, given, stored, outputs, **attrs), feeds, tolerance=2e-5)


def angles(features: int = D, most: int = 16) -> dict[str, np.ndarray]:
    """Cosines and sines of positions."""
    turns = np.outer(np.arange(most), 1 / 100 ** (np.arange(features // 2) / (features // 2)))
    return {"cos": np.cos(turns).astype(F), "sin": np.sin(turns).astype(F)}


def heads(count: int, tokens: int = S, seed: int = 0) -> np.ndarray:
    """Projected features of so many heads."""
    return rand(B, tokens, count * D, seed=seed)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("simple", [False, True])
def test_norms_of_sums(simple: bool, bias: bool) -> None:
    op = "SkipSimplifiedLayerNormalization" if simple else "SkipLayerNormalization"
    stored = {"scale": rand(D), **({} if simple else {"shift": rand(D, seed=1)})}
    stored |= {"bias": rand(D, seed=2)} if bias else {}
    given = {"x": rand(B, S, D), "skip": rand(B, S, D, seed=3)}
    node = helper.make_node(
        op, [*given, *stored], ["y", "", "", "sum"], domain="com.microsoft", epsilon=1e-5
    )
    graph = same(wrapped([node], given, stored, ["y", "sum"]), given)
    norm = "RMSNormalization" if simple else "LayerNormalization"
    assert ops(graph) == ["Add", *(["Add"] if bias else []), norm]
    assert set(graph.trainable) == set(stored)


def test_norm_of_embeddings() -> None:
    ids = np.array([[1, 2, 3, 0], [4, 1, 0, 0]], I)
    stored = {"words": rand(9, D), "places": rand(6, D), "kinds": rand(2, D)}
    stored |= {"scale": rand(D), "shift": rand(D, seed=1)}
    given = {"ids": ids, "segments": ids % 2, **stored, "mask": (ids > 0).astype(I)}
    made = built("EmbedLayerNormalization", given, {}, 3, epsilon=1e-5)
    graph = same(made, {n: np.asarray(a) for n, a in given.items()})
    assert ops(graph).count("Gather") == 3


@pytest.mark.parametrize(
    ("op", "given", "stored", "expected"),
    [
        ("BiasGelu", {"x": rand(B, S, D)}, {"b": rand(D)}, "Add Gelu"),
        ("FastGelu", {"x": rand(B, S, D)}, {"b": rand(D)}, "Add Gelu"),
        ("FastGelu", {"x": rand(B, S, D)}, {}, "Gelu"),
        ("QuickGelu", {"x": rand(B, S, D)}, {}, ""),
    ],
)
def test_activations(op: str, given: Any, stored: Any, expected: str) -> None:
    graph = agrees(op, given, stored)
    assert not expected or ops(graph) == expected.split()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_packed_matrices(bits: int, zeros: bool) -> None:
    n, k, block = 6, 80, 32  # three blocks, the last one half
    random = np.random.default_rng(0)
    packed = random.integers(0, 256, (n, 3, block * bits // 8), np.uint8)
    scales = rand(n, 3) / 8
    given = {"x": rand(B, S, k)}
    zero = random.integers(0, 256, (n, -(-3 * bits // 8)), np.uint8) if zeros else None
    stored = {"w": packed, "scales": scales, "zeros": zero}
    graph = agrees("MatMulNBits", given, stored, K=k, N=n, bits=bits, block_size=block)
    assert ops(graph)[-1] == "MatMul" and not graph.trainable


@pytest.mark.parametrize("zeros", [False, True])
def test_packed_tables(zeros: bool) -> None:
    random = np.random.default_rng(0)
    stored = {"table": random.integers(0, 256, (10, 32), np.uint8)}
    given = {"ids": np.array([[1, 9, 0], [3, 3, 2]], J)}
    later = {"scales": rand(10, 4), "zeros": random.integers(0, 256, (10, 2), np.uint8)}
    if not zeros:
        del later["zeros"]
    node = helper.make_node(
        "GatherBlockQuantized",
        ["table", "ids", *later],
        ["y"],
        domain="com.microsoft",
        block_size=16,
        bits=4,
        quantize_axis=1,
    )
    graph = same(wrapped([node], given, {**stored, **later}, ["y"]), given)
    assert not graph.trainable


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("part", [0, 4])
def test_rotations(part: int, interleaved: int) -> None:
    places = np.array([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]], J)
    given = {"x": heads(H), "places": places}
    attrs = {"num_heads": H, "interleaved": interleaved, "rotary_embedding_dim": part}
    graph = agrees("RotaryEmbedding", given, angles(part or D), **attrs)
    assert "RotaryEmbedding" in ops(graph) and not graph.trainable
    agrees("RotaryEmbedding", {**given, "places": np.array([2], J)}, angles(part or D), **attrs)


def query_group(
    tokens: int, past: int, packed: bool = False, rotary: bool = True
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """Operands and attributes of GroupQueryAttention: of one row where onnxruntime takes no
    more."""
    given: dict[str, Any] = {"q": heads(H + 2 * G if packed else H, tokens)}
    given |= {f"{x}": None if packed else heads(G, tokens, k) for k, x in ((1, "k"), (2, "v"))}
    given |= {
        f"past_{x}": rand(B, G, past, D, seed=k) if past else None for k, x in ((3, "k"), (4, "v"))
    }
    given["seen"] = np.full((B,), past + tokens - 1, I)
    if past and tokens > 1:
        given = {n: a if a is None else a[:1] for n, a in given.items()}
    stored: dict[str, Any] = {"total": np.array(past + tokens, I)}
    attrs = {"num_heads": H, "kv_num_heads": G}
    if rotary:
        stored |= angles()
        attrs["do_rotary"] = 1
    return given, stored, attrs


@pytest.mark.parametrize(("tokens", "past"), [(S, 0), (1, P), (S, P)])
@pytest.mark.parametrize("packed", [False, True])
def test_grouped_queries(tokens: int, past: int, packed: bool) -> None:
    given, stored, attrs = query_group(tokens, past, packed)
    graph = agrees("GroupQueryAttention", given, stored, 3, **attrs)
    attention = next(n for n in graph.nodes if n.op == "Attention")
    assert bool(attention.attrs["causal"]) == (not past)
    assert len(attention.inputs) == (4 if past else 3)
    assert ops(graph).count("RotaryEmbedding") == 2 and not graph.trainable


@pytest.mark.parametrize("extra", ["window", "cap", "scale", "alternating", "bias"])
@pytest.mark.parametrize(("tokens", "past"), [(S, 0), (2, P)])
def test_forms_of_grouped_queries(tokens: int, past: int, extra: str) -> None:
    given, stored, attrs = query_group(tokens, past)
    more = {
        "window": {"local_window_size": 2},
        "cap": {"softcap": 1.5},
        "scale": {"scale": 0.3},
        "alternating": {"rotary_interleaved": 1},
        "bias": {},
    }[extra]
    if extra == "bias":
        stored |= {"places": None, "bias": rand(1, H, tokens, past + tokens)}
    agrees("GroupQueryAttention", given, stored, 3, **attrs, **more)


def test_rows_with_fewer_tokens_in_the_cache() -> None:
    """Without a mask to sum, the numbers of tokens say which keys of the cache are real."""
    given, stored, attrs = query_group(1, P)
    given["seen"] = np.array([P, P - 2], I)
    made = built("GroupQueryAttention", given, stored, 3, **attrs)
    feeds = {n: a for n, a in given.items() if a is not None}
    found, expected = (run(m, feeds)[0] for m in (to_onnx(read_model(made)), made))
    assert difference(found, expected) < 2e-5


OUTPUTS = ["y", "present.0.key", "present.0.value"]
PAST = {"past_k": "past_key_values.0.key", "past_v": "past_key_values.0.value"}


def with_summed_mask(tokens: int, past: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Grouped queries as exporters of language models write them: numbers of tokens are sums of
    the attention mask. A cache has a symbolic length."""
    given, stored, attrs = query_group(tokens, past)
    given = {PAST.get(n, n): a for n, a in given.items() if n != "seen" and a is not None}
    given["attention_mask"] = np.ones((B, past + tokens), J)
    stored |= {"axis": np.array([1], J), "one": np.array(1, J)}
    operands = [*"qkv", *(PAST.values() if past else ["", ""])]
    nodes = [
        helper.make_node("ReduceSum", ["attention_mask", "axis"], ["sum"], keepdims=0),
        helper.make_node("Sub", ["sum", "one"], ["before"]),
        helper.make_node("Cast", ["before"], ["seen"], to=onnx.TensorProto.INT32),
        helper.make_node(
            "GroupQueryAttention",
            [*operands, "seen", "total", "cos", "sin"],
            OUTPUTS,
            domain="com.microsoft",
            **attrs,
        ),
    ]
    made = wrapped(nodes, given, stored, OUTPUTS)
    for value in made.graph.input if past else ():
        dims = value.type.tensor_type.shape.dim
        if value.name.startswith("past"):
            dims[2].dim_param = "past"
        if value.name == "attention_mask":
            dims[1].dim_param = f"past + {tokens}"
    return made, given


def test_the_mask_that_was_summed_says_which_keys_are_real() -> None:
    made, feeds = with_summed_mask(1, P)
    graph = same(made, feeds, tolerance=2e-5, dims={"past": P})
    made_by = {o: n for n in graph.nodes for o in n.outputs}
    mask = next(n for n in graph.nodes if n.op == "Attention").inputs[3]
    while mask in made_by:
        assert made_by[mask].op in ("Cast", "Reshape")
        mask = made_by[mask].inputs[0]
    assert mask == "attention_mask"


def test_positions_that_the_operator_counts_are_no_input_of_a_cache() -> None:
    with pytest.raises(PlanError) as caught:  # of a layer alone
        form_of(with_summed_mask(1, P)[0], "m")
    assert caught.value.what.endswith("the model takes no token ids")


def test_padding_before_a_prompt_or_behind_it() -> None:
    """Behind it as onnxruntime has it; before it the same numbers further on."""
    made, feeds = with_summed_mask(S, 0)
    real = S - 2
    feeds["attention_mask"][:, real:] = 0
    graph = to_onnx(read_model(made))
    expected = run(made, feeds)[0][:, :real]
    assert difference(run(graph, feeds)[0][:, :real], expected) < 2e-5
    moved = {n: np.roll(a, S - real, 1) for n, a in feeds.items()}
    assert difference(run(graph, moved)[0][:, S - real :], expected) < 2e-5


def test_an_empty_cache_is_none() -> None:
    """A graph with a cache is that of prompts where a dim of the cache alone is 0."""
    made, _ = with_summed_mask(1, P)
    graph = read_model(made, dims={"past": 0})
    (attention,) = (n for n in graph.nodes if n.op == "Attention")
    assert attention.attrs["causal"] == 1
    assert not [n for n in graph.inputs if n.startswith("past")]
    assert graph.tensors["present.0.key"].shape == (B, G, 1, D)
    with pytest.raises(PlanError) as caught:
        read_model(made)
    assert any("--dim past=0" in line for line in caught.value.help)


def test_norms_of_heads() -> None:
    """A form that onnxruntime has on GPUs alone: the same as norms of numpy before it."""
    given, stored, attrs = query_group(S, 0)
    scales = {"q": rand(D), "k": rand(D, seed=1)}
    inside = {**stored, **dict.fromkeys("abcde"), **{f"{n}_norm": w for n, w in scales.items()}}
    made = built("GroupQueryAttention", given, inside, 3, **attrs, qk_norm_epsilon=1e-3)
    feeds = {n: a for n, a in given.items() if a is not None}
    found = run(to_onnx(read_model(made)), feeds)
    for n, scale in scales.items():
        x = given[n].reshape(B, S, -1, D)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale
        given[n] = feeds[n] = x.reshape(B, S, -1)
    expected = run(built("GroupQueryAttention", given, stored, 3, **attrs), feeds)
    for a, b in zip(found, expected, strict=True):
        assert difference(a, b) < 2e-5


def test_biases_that_onnxruntime_adds_on_gpus_alone() -> None:
    """BiasAdd beside numpy, BiasSplitGelu beside onnxruntime's BiasGelu of one half."""
    x, bias, skip = rand(B, S, 2 * D), rand(2 * D, seed=1), rand(B, S, 2 * D, seed=2)
    made = built("BiasAdd", {"x": x, "b": bias, "skip": skip}, {})
    (found,) = run(to_onnx(read_model(made)), {"x": x, "b": bias, "skip": skip})
    assert difference(found, x + bias + skip) < 2e-5
    (found,) = run(to_onnx(read_model(built("BiasSplitGelu", {"x": x}, {"b": bias}))), {"x": x})
    gate = {"x": x[..., D:]}
    (gelu,) = run(built("BiasGelu", gate, {"b": bias[D:]}), gate)
    assert difference(found, (x + bias)[..., :D] * gelu) < 2e-5


def test_sinks_are_refused() -> None:
    given, stored, attrs = query_group(S, 0)
    stored |= {"places": None, "bias": None, "sinks": rand(H)}
    with pytest.raises(PlanError) as caught:
        read_model(built("GroupQueryAttention", given, stored, 3, **attrs))
    assert "GroupQueryAttention with sinks" in str(caught.value)


@pytest.mark.parametrize("form", ["plain", "bias", "padding", "scores", "causal", "past"])
def test_many_heads(form: str) -> None:
    given: dict[str, Any] = {n: heads(H, S, k) for k, n in enumerate("qkv")}
    stored: dict[str, Any] = {}
    attrs: dict[str, Any] = {"num_heads": H, "unidirectional": int(form == "causal")}
    if form == "bias":
        stored = {"bias": rand(3 * H * D)}
    elif form == "padding":
        given |= {"bias": None, "mask": np.array([[1] * S, [1, 1, 1, 0, 0]], I)}
    elif form == "scores":
        given |= {"bias": None, "mask": None, "scores": rand(1, H, S, S)}
    elif form == "past":
        given |= {"bias": None, "mask": None, "scores": None}
        given |= {f"past_{x}": rand(B, H, P, D, seed=k) for k, x in enumerate("kv")}
    graph = agrees("MultiHeadAttention", given, stored, 3 if form == "past" else 1, **attrs)
    assert ops(graph).count("Attention") == 1


@pytest.mark.parametrize("last", [3, 2])
def test_heads_stacked(last: int) -> None:
    """Forms that onnxruntime has on GPUs alone: the same as apart."""
    parts = [heads(H, S, k).reshape(B, S, H, 1, D) for k in range(3)]
    stack = np.concatenate(parts[3 - last :], 3)
    given = {"q": stack} if last == 3 else {"q": heads(H, S), "k": stack}
    made = to_onnx(read_model(built("MultiHeadAttention", given, {}, num_heads=H)))
    apart = {n: heads(H, S, k) for k, n in enumerate("qkv")}
    (expected,) = run(built("MultiHeadAttention", apart, {}, num_heads=H), apart)
    assert difference(run(made, given)[0], expected) < 2e-5


@pytest.mark.parametrize("form", ["plain", "padding", "causal", "past"])
def test_packed_attention(form: str) -> None:
    given: dict[str, Any] = {"x": rand(B, S, H * D)}
    stored: dict[str, Any] = {"w": rand(H * D, 3 * H * D) / 8, "b": rand(3 * H * D)}
    given |= stored
    if form == "padding":
        given["mask"] = np.array([[1] * S, [1, 1, 0, 0, 0]], I)
    if form == "past":
        given |= {"mask": None, "past": rand(2, B, H, P, D)}
    attrs = {"num_heads": H, "unidirectional": int(form in ("causal", "past"))}
    made = built("Attention", given, {}, 2 if form == "past" else 1, **attrs)
    graph = same(made, {n: a for n, a in given.items() if a is not None}, tolerance=2e-5)
    assert ops(graph).count("Attention") == 1


@pytest.mark.parametrize("turned", [{}, {"transA": 1}, {"transB": 1}])
@pytest.mark.parametrize("batches", [{}, {"transBatchA": 1}, {"transBatchB": 1}])
def test_products_with_transposes(turned: dict[str, int], batches: dict[str, int]) -> None:
    """Rows before batch dims, as the optimizer leaves them of heads that it did not move."""
    sizes = {"A": (4, 6), "B": (6, 5)}
    given = {}
    for side, (m, n) in sizes.items():
        m, n = (n, m) if f"trans{side}" in turned else (m, n)
        given[side] = rand(*((m, 2, 3, n) if f"transBatch{side}" in batches else (2, 3, m, n)))
    graph = agrees("FusedMatMul", given, {}, alpha=0.5, **turned, **batches)
    assert ops(graph).count("MatMul") == 1


@pytest.mark.parametrize(
    ("kind", "numbers"), [("Relu", []), ("LeakyRelu", [0.1]), ("Clip", [-0.5, 0.7])]
)
def test_layers_with_their_activation(kind: str, numbers: list[float]) -> None:
    stored = {"w": rand(4, 3, 3, 3), "b": rand(4)}
    given = {"x": rand(2, 3, 6, 6)}
    more: dict[str, Any] = {"activation_params": numbers} if numbers else {}
    graph = agrees("FusedConv", given, stored, activation=kind, **more)
    assert ops(graph) == ["Conv", "Add", kind]
    if kind != "Clip":
        more = {"activation_alpha": 0.1} if numbers else {}
        stored = {"w": rand(8, 4), "b": rand(4)}
        graph = agrees("FusedGemm", {"x": rand(3, 8)}, stored, activation=kind, **more)
        assert ops(graph) == ["MatMul", "Add", kind]


def eight(*shape: int, signed: bool = False) -> np.ndarray:
    """Small numbers of eight bits: sums in 16 bits, which some kernels of onnxruntime take, hold
    them."""
    made = np.random.default_rng(len(shape)).integers(0, 40, shape)
    return made.astype(np.int8 if signed else np.uint8)


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
def test_quantised_arithmetic(op: str) -> None:
    numbers = {"as": F(0.02), "az": np.uint8(3), "b": eight(3, 8)[::-1], "bs": F(0.04)}
    numbers |= {"bz": np.uint8(9), "cs": F(0.05), "cz": np.uint8(1)}
    agrees(op, {"a": eight(3, 8)}, numbers)


def test_quantised_products() -> None:
    weight = {"b": eight(8, 4, signed=True), "bs": rand(4) ** 2}
    zeros = np.zeros(4, np.int8)
    given = {"x": rand(3, 8)}
    graph = agrees("DynamicQuantizeMatMul", given, {**weight, "bz": zeros, "bias": rand(4)})
    assert "MatMulInteger" in ops(graph) and graph.trainable == {"bias"}
    given = {"a": eight(3, 8)}
    stored = {"b": weight["b"], "as": F(0.1), "bs": F(0.2), "az": np.uint8(5), "bz": np.int8(0)}
    agrees("MatMulIntegerToFloat", given, stored | {"bias": rand(4)})
    stored = {"as": F(0.1), "az": np.uint8(5), "b": weight["b"], "bs": weight["bs"], "bz": zeros}
    stored |= {"c": np.arange(4, dtype=I), "ys": F(0.3), "yz": np.uint8(7)}
    graph = agrees("QGemm", given, stored)
    assert not graph.trainable


@pytest.mark.parametrize("form", ["plain", "padding", "causal"])
def test_quantised_attention(form: str) -> None:
    stored = {"w": eight(32, 96, signed=True), "b": rand(96), "xs": F(0.01), "ws": F(0.005)}
    given: dict[str, Any] = {"x": eight(B, S, 32), **stored, "mask": None}
    if form == "padding":
        given["mask"] = np.array([[1] * S, [1, 1, 0, 0, 0]], I)
    given |= {"xz": np.uint8(7), "wz": np.int8(0)}
    held = {n: given.pop(n) for n in ("xz", "wz")}
    attrs = {"num_heads": H, "unidirectional": int(form == "causal")}
    graph = agrees("QAttention", given, held, **attrs)
    assert ops(graph).count("Attention") == 1 and "MatMulInteger" in ops(graph)
