"""JAX functions read, planned, and run under their shardings: the translation computes what the
function computes, the sharded run what one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import planner
from planner.errors import PlanError
from planner.reader import read_model

jax = pytest.importorskip("jax")
jnp = jax.numpy

S, LAYERS, WIDTH, HEADS, LENGTH, VOCAB, BATCH = jax.ShapeDtypeStruct, 3, 32, 4, 16, 96, 8


def gpt(p: Any, ids: Any, labels: Any) -> Any:
    """A decoder with scanned, rematerialised blocks; mean cross-entropy."""
    x = p["wte"][ids] + p["wpe"]

    def block(x: Any, w: Any) -> Any:
        def heads(t: Any) -> Any:
            return t.reshape(*t.shape[:2], HEADS, -1).swapaxes(1, 2)

        y = norm(x, w["g1"])
        q, k, v = (heads(y @ w[n]) for n in ("q", "k", "v"))
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / np.sqrt(WIDTH // HEADS)
        scores = jnp.where(
            jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, jnp.finfo(scores.dtype).min
        )
        mixed = (jax.nn.softmax(scores, -1) @ v).swapaxes(1, 2).reshape(x.shape)
        x = x + mixed @ w["o"]
        return x + jax.nn.gelu(norm(x, w["g2"]) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(block), x, p["blocks"])
    logp = jax.nn.log_softmax(norm(x, p["g"]) @ p["wte"].T)
    return -jnp.take_along_axis(logp, labels[..., None], -1).mean()


def norm(x: Any, g: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * g


def gpt_parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def w(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    blocks = {
        "g1": w(LAYERS, WIDTH),
        "g2": w(LAYERS, WIDTH),
        **{n: w(LAYERS, WIDTH, WIDTH) for n in "qkvo"},
    }
    blocks |= {"up": w(LAYERS, WIDTH, 4 * WIDTH), "down": w(LAYERS, 4 * WIDTH, WIDTH)}
    return {"wte": w(VOCAB, WIDTH), "wpe": w(LENGTH, WIDTH), "g": w(WIDTH), "blocks": blocks}


def tokens() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return tuple(rng.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32) for _ in range(2))  # type: ignore[return-value]


def onnx_of(fn: Callable[..., Any], params: Any, *inputs: Any) -> Any:
    """The traced model with the parameters' bytes in it."""
    from onnx import numpy_helper

    from planner.from_jax import traced

    trace, leaves, _, found = traced(fn, params, *inputs)
    values = {
        v.parameter: leaf
        for v, leaf in zip(leaves, jax.tree.leaves((params, *inputs)), strict=True)
        if v.parameter
    }
    for name in list(trace.initializers):
        stem, _, i = name.rpartition(".")
        if name in values or stem in trace.stacked:
            trace.initializers[name] = numpy_helper.from_array(
                np.asarray(values[name] if name in values else values[stem][int(i)]), name
            )
    return trace.model([v for v in leaves if not v.parameter], found)


def agrees(fn: Callable[..., Any], params: Any, *inputs: Any) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = onnx_of(fn, params, *inputs)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(
        None,
        {
            i.name: np.asarray(x)
            for i, x in zip(session.get_inputs(), jax.tree.leaves(inputs), strict=True)
        },
    )
    for a, b in zip(got, jax.tree.leaves(jax.jit(fn)(params, *inputs)), strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=2e-4, atol=2e-5)


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


CASES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "the largest, and a router's weights": (
        lambda p, x: (
            jnp.stack(jax.lax.top_k(jax.nn.softmax(x @ p), 2)).sum(-1)
            + jax.lax.top_k((x @ p).T, 1)[1].sum()
            + jnp.tile(sum(jnp.unstack(jnp.stack([x, x * 2], 1), axis=1)), (1, 2))[:, :3].sum(-1)
        ),
        f32(4, 6),
        f32(3, 4),
    ),
    "sorted, by places too": (
        lambda p, x: (
            jnp.sort(x, axis=0)
            + jnp.take_along_axis(x, jnp.argsort(x * p, -1), -1)
            + jnp.argsort(x, 0)
        ),
        f32(4),
        f32(3, 4),
    ),
    "turned round, and bits": (
        lambda p, x: (
            jnp.flip(x, (0, 1)) * p
            + jnp.expm1(x)
            + jnp.arctan(x)
            + (((x * 8).astype(jnp.int32) & 5) | 2 ^ 3)
            + jnp.round(x * 3)
            + jnp.mod(x, 0.7)
            + jax.lax.dynamic_slice(x, (1, 0), (1, 4))
        ),
        f32(4),
        f32(3, 4),
    ),
    "products": (
        lambda p, x: (
            jnp.einsum("bik,jk->bij", x, p)
            + jnp.einsum("bik,bjk->bij", x, x).sum()
            + jnp.tensordot(p, x, ((1,), (2,))).sum()
        ),
        f32(5, 4),
        f32(2, 3, 4),
    ),
    "a product summed over two dims": (
        lambda p, x: jnp.einsum("bij,ijk->bk", x, p),
        f32(3, 4, 6),
        f32(2, 3, 4),
    ),
    "pointwise": (
        lambda p, x: (
            jax.nn.silu(x)
            + jax.nn.gelu(x, approximate=False) * p
            + jax.nn.softplus(x)
            + jnp.abs(x) ** 3
            + jnp.clip(x, -0.5, 0.5)
        ),
        f32(4),
        f32(2, 4),
    ),
    "conditions": (
        lambda p, x: jnp.where((x > p) & ~(x > 1) | (x < -1), x, jnp.maximum(x, p)),
        f32(4),
        f32(2, 4),
    ),
    "reductions": (
        lambda p, x: (
            (x * p).max(-1)
            + x.min(-1)
            + x.prod(-1)
            + x.mean((0, 1)).sum()
            + jax.nn.logsumexp(x, -1)
        ),
        f32(4),
        f32(2, 3, 4),
    ),
    "softmax over another axis": (
        lambda p, x: jax.nn.softmax(x * p, axis=1) + jax.nn.log_softmax(x, axis=0),
        f32(4),
        f32(2, 3, 4),
    ),
    "slices": (
        lambda p, x: jnp.concatenate([x[:, 1:], x[:, ::2], p[None, :, :].repeat(2, 0)], 1)[
            :, :, :3
        ],
        f32(5, 4),
        f32(2, 6, 4),
    ),
    "pads and sums": (
        lambda p, x: jnp.cumsum(jnp.pad(x, ((0, 0), (1, 2)), constant_values=2.0), 1) + p,
        f32(7),
        f32(2, 4),
    ),
    "tables": (
        lambda p, x: p[jnp.argmax(x, -1)] + jnp.take(p, jnp.arange(2), axis=0),
        f32(4, 3),
        f32(2, 4),
    ),
    "convolution": (
        lambda p, x: jax.lax.conv_general_dilated(
            x, p, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        f32(3, 3, 4, 6),
        f32(2, 8, 7, 4),
    ),
    "a scan that hands rows on": (
        lambda p, x: jax.lax.scan(
            lambda c, r: (jnp.tanh(c @ p["w"] + r), c * 2), x[:, 0], x.swapaxes(0, 1), reverse=True
        ),
        {"w": f32(4, 4)},
        f32(2, 3, 4),
    ),
    "types": (
        lambda p, x: (x * 3).astype(jnp.int32).astype(jnp.float32) + p.astype(jnp.int32),
        f32(4) * 5,
        f32(2, 4),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_translation_computes_what_the_function_computes(case: str) -> None:
    fn, params, x = CASES[case]
    agrees(fn, params, x)


def test_a_gpt_is_read_into_the_operators_of_any_other() -> None:
    agrees(gpt, gpt_parameters(), *tokens())
    planned = planner.from_jax(gpt, gpt_parameters(), *tokens(), devices=8)
    ops = [n.op for n in planned.strategy.graph.nodes]  # type: ignore[union-attr]
    assert (
        ops.count("LayerNormalization") == 2 * LAYERS + 1
        and ops.count("Gelu") == LAYERS
        and not planned.replicated
    )
    # Attention that is written out is no fused kernel: the compiler makes none of it.
    assert ops.count("Softmax") == LAYERS and "Attention" not in ops
    assert planned.strategy.model["parameters"] == sum(
        x.size for x in jax.tree.leaves(gpt_parameters())
    )
    (block,) = planned.strategy.blocks
    assert block["repeats"] in (LAYERS, LAYERS - 1)


def test_scores_of_written_out_attention_are_in_memory() -> None:
    """XLA for an H100 reports 6.1 GiB of temporary memory (`python -m benchmarks.jax_attention`)."""
    b, h, s, d = 8, 8, 4096, 64

    def attended(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[n]).reshape(b, s, h, d).transpose(0, 2, 1, 3) for n in "qkv")
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / 8.0
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype)
        return jnp.sum(((weights @ v).swapaxes(1, 2).reshape(x.shape) @ p["o"]) ** 2)

    params = {n: S((h * d, h * d), jnp.bfloat16) for n in "qkvo"}
    planned = planner.from_jax(attended, params, S((b, s, h * d), jnp.bfloat16), devices=1)
    memory = planned.strategy.costs["memory_breakdown_bytes"]
    assert memory["activations"] + memory["temporary"] > 6 * 2**30


def test_capped_scores_of_packed_sequences_are_attention() -> None:
    """As Gemma 2 caps them, and as packed rows mask them, in a model that may run in a program of
    ours."""

    def attended(p: Any, x: Any, ids: Any) -> Any:
        q, k, v = ((x @ p[n]).reshape(8, 16, 4, 8).transpose(0, 2, 1, 3) for n in "qkv")
        scores = 5.0 * jnp.tanh(jnp.einsum("bhsd,bhtd->bhst", q, k) * 0.3 / 5.0)
        seen = jnp.tril(jnp.ones((16, 16), bool)) & (ids[:, None, :, None] == ids[:, None, None])
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
        return jnp.sum(jnp.einsum("bhst,bhtd->bhsd", weights, v) ** 2)

    params, ids = {n: f32(32, 32) for n in "qkv"}, np.arange(128).reshape(8, 16).astype(np.int32)
    model = onnx_of(attended, params, f32(8, 16, 32), ids // 7)
    model.producer_name = "another"
    graph = read_model(model)
    (node,) = (n for n in graph.nodes if n.op == "Attention")
    assert node.attrs["cap"] == pytest.approx(5.0) and node.attrs["causal"] == 1
    assert node.attrs["segments"] == 1 and graph.tensors[node.inputs[3]].shape == (8, 1, 1, 16)


@pytest.mark.parametrize(
    ("more", "window"), [({}, 0), ({"bias": True}, 0), ({"local_window_size": (31, 0)}, 32)]
)
def test_calls_of_cudnns_attention_are_that_kernel(
    more: dict[str, Any], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as on a machine with a GPU."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda needed: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda needed: needed == "9.0")

    def attended(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[n]).reshape(8, 64, -1, 16) for n in "qkv")
        given = more | ({"bias": p["bias"]} if "bias" in more else {})
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn", **given)
        return jnp.sum((y.reshape(8, 64, -1) @ p["o"]).astype(jnp.float32) ** 2)

    shapes = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64), "bias": (1, 4, 64, 64)}
    params = {n: S(shape, jnp.bfloat16) for n, shape in shapes.items()}
    planned = planner.from_jax(
        attended,
        params,
        S((8, 64, 64), jnp.bfloat16),
        devices=8,
        hardware="h100-sxm",
        pins="dp=4,tp=2,tensor=megatron",
    )
    (row,) = (row for row in planned.strategy.nodes.values() if row["op"] == "Attention")
    assert row["attention_kernel"] == "cudnn" and not planned.replicated and row["split"]
    graph = planned.strategy.graph
    assert graph is not None
    (node,) = (n for n in graph.nodes if n.op == "Attention")
    assert node.attrs["scale"] == pytest.approx(0.25) and node.attrs["causal"] == 1
    assert node.attrs.get("window", 0) == window
    assert list(graph.shapes(node.inputs)) == [
        (8, 4, 64, 16),
        (8, 2, 64, 16),
        (8, 2, 64, 16),
        *([(1, 4, 64, 64)] if "bias" in more else []),
    ]


one_device = jax.jit(jax.value_and_grad(gpt))


@pytest.mark.parametrize(
    "pins",
    [
        "dp=4,tp=2,zero=3",
        *(
            pytest.param(p, marks=pytest.mark.slow)
            for p in ("dp=2,tp=4,zero=0,tensor=megatron", None, "dp=8,zero=1")
        ),
    ],
)
def test_a_gpt_trains_under_its_shardings_as_on_one_device(pins: str | None) -> None:
    params, data = gpt_parameters(), tokens()
    planned = planner.from_jax(gpt, params, *data, devices=8, pins=pins)
    where, *inputs = planned.in_shardings
    step = jax.jit(
        jax.value_and_grad(gpt), in_shardings=planned.in_shardings, out_shardings=(None, where)
    )
    placed = jax.device_put(params, where)
    loss, grads = step(placed, *(jax.device_put(x, to) for x, to in zip(data, inputs, strict=True)))
    want, want_grads = one_device(params, *data)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for got, w in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(w), rtol=1e-3, atol=1e-5)
    specs = {n: str(x.spec) for n, x in where["blocks"].items()}
    if pins and "megatron" in pins:
        assert (
            "'tensor'" in specs["up"]
            and "'tensor'" in specs["down"]
            and specs["up"] != specs["down"]
            and placed["blocks"]["up"].addressable_shards[0].data.shape[0] == LAYERS
        )
    if pins and "zero=3" in pins:
        assert "'data'" in specs["up"]


def mixed(p: Any, ids: Any, labels: Any) -> Any:
    """A decoder as mixed precision is written in JAX: parameters in float32, cast where they are
    read; heads are dims of the weights; the embedding is read in both types."""
    x = (p["wte"][ids] + p["wpe"]).astype(jnp.bfloat16)

    def block(x: Any, w: Any) -> Any:
        w = jax.tree.map(lambda a: a.astype(x.dtype), w)
        q, k, v = jnp.einsum("bsd,dthk->tbshk", norm(x, w["g1"]), w["qkv"])
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jnp.einsum("bshk,hkd->bsd", y, w["o"])
        return x + jax.nn.gelu(norm(x, w["g2"]) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(block, x, p["blocks"])
    logits = (norm(x, p["g"].astype(x.dtype)) @ p["wte"].T.astype(x.dtype)).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def mixed_parameters() -> dict[str, Any]:
    p = gpt_parameters()
    q, k, v, o = (p["blocks"].pop(n) for n in "qkvo")
    heads = (LAYERS, WIDTH, HEADS, WIDTH // HEADS)
    p["blocks"]["qkv"] = np.stack([t.reshape(heads) for t in (q, k, v)], 2)
    p["blocks"]["o"] = o.reshape(LAYERS, HEADS, WIDTH // HEADS, WIDTH)
    return p


def test_dropout_is_cut_as_what_it_drops() -> None:
    def dropped(p: Any, x: Any, key: Any) -> Any:
        for k, w in enumerate(p):
            kept = jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, x.shape)
            x = jnp.where(kept, jax.nn.relu(x @ w) / 0.9, 0)
        return jnp.mean(x**2)

    params, x = [f32(64, 64), f32(64, 64)], f32(128, 64)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        planned = planner.from_jax(dropped, params, x, key, devices=8, pins="dp=8")
        assert not planned.replicated
        graph = planned.strategy.graph
        assert graph is not None
        dropped_ = [n for n in graph.nodes if n.op == "Dropout"]
        assert [n.attrs["ratio"] for n in dropped_] == pytest.approx([0.1, 0.1])
        assert len(graph.nodes) < 12, "the mask's own arithmetic is Dropout's"
        rows = planned.strategy.tensors
        assert all(rows[n.outputs[0]]["layout"][0] == ["data"] for n in dropped_)
        got = jax.jit(dropped, in_shardings=planned.in_shardings)(params, x, key)
        np.testing.assert_allclose(got, jax.jit(dropped)(params, x, key), rtol=1e-5)


def test_what_noise_was_added_to_is_not_dropped() -> None:
    def noisy(p: Any, x: Any, key: Any) -> Any:
        x = x @ p + jax.random.uniform(key, (128, 64))
        return jnp.mean(jnp.where(x > 0, x, 0))

    planned = planner.from_jax(noisy, f32(64, 64), f32(128, 64), jax.random.key(0), devices=8)
    assert all(n.op != "Dropout" for n in planned.strategy.graph.nodes)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins", [pytest.param("dp=4,tp=2,zero=3", marks=pytest.mark.slow), "dp=8,zero=3"]
)
def test_weights_that_are_cast_are_cut_as_planned(pins: str) -> None:
    params, data = mixed_parameters(), tokens()
    planned = planner.from_jax(mixed, params, *data, devices=8, pins=pins)
    assert planned.strategy.workload["precision"] == "bf16-mixed" and not planned.replicated
    where, *inputs = planned.in_shardings
    assert jax.tree.leaves(planned.shardings(params)) == jax.tree.leaves(where)
    # Of matrices nothing is whole, be it transposed or reshaped on its way to a product.
    local = jax.tree.map(lambda x, to: np.prod(to.shard_shape(x.shape)) / x.size, params, where)
    matrices = {n: local["blocks"][n] for n in ("qkv", "o", "up", "down")} | {"wte": local["wte"]}
    assert max(matrices.values()) == (1 / 8 if "dp=8" in pins else 1 / 4), matrices
    step = jax.jit(jax.value_and_grad(mixed), in_shardings=planned.in_shardings)
    loss, _ = step(jax.device_put(params, where), *map(jax.device_put, data, inputs))
    np.testing.assert_allclose(loss, jax.jit(mixed)(params, *data), rtol=2e-2)


@pytest.mark.parametrize(
    ("types", "precision"),
    [("ff", "fp32"), ("fb", "bf16-mixed"), ("bb", "bf16-pure"), ("fh", "fp16")],
)
def test_the_precision_is_the_functions(types: str, precision: str) -> None:
    stored, computed = ({"f": jnp.float32, "b": jnp.bfloat16, "h": jnp.float16}[t] for t in types)

    def fn(p: Any, x: Any) -> Any:
        return jnp.sum((x.astype(computed) @ p.astype(computed)).astype(jnp.float32) ** 2)

    planned = planner.from_jax(fn, S((32, 32), stored), S((8, 32), np.float32), devices=4)
    assert planned.strategy.workload["precision"] == precision
    planned = planner.from_jax(
        fn, S((32, 32), stored), S((8, 32), np.float32), devices=4, precision="fp32"
    )
    assert planned.strategy.workload["precision"] == "fp32"


def test_the_optimizers_state_has_shardings_too() -> None:
    optax = pytest.importorskip("optax")
    params, data = gpt_parameters(), tokens()
    planned = planner.from_jax(gpt, params, *data, devices=8, pins="dp=8,zero=1")
    optimizer = optax.adamw(1e-2)
    where = planned.shardings(jax.eval_shape(optimizer.init, params), optimizer=True)
    state = jax.jit(optimizer.init, out_shardings=where)(params)
    assert any("data" in str(x.sharding.spec) for x in jax.tree.leaves(state))
    with pytest.raises(PlanError, match="no parameter named"):
        planned.shardings({"other": np.zeros(3)})


@pytest.mark.slow
def test_a_flax_gpt_runs_as_on_one_device() -> None:
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):  # type: ignore[name-defined, misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            mask = nn.make_causal_mask(jnp.ones((x.shape[0], x.shape[1])))
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))

    class Model(nn.Module):  # type: ignore[name-defined, misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, ids: Any) -> Any:
            x = nn.Embed(VOCAB, WIDTH)(ids) + self.param(
                "positions", nn.initializers.normal(), (LENGTH, WIDTH)
            )
            for _ in range(2):
                x = Block()(x)
            return nn.Dense(VOCAB, use_bias=False)(nn.LayerNorm()(x))

    model, (ids, labels) = Model(), tokens()
    params = jax.jit(model.init)(jax.random.key(0), ids)

    def loss(params: Any, ids: Any, labels: Any) -> Any:
        logp = jax.nn.log_softmax(model.apply(params, ids))
        return -jnp.take_along_axis(logp, labels[..., None], -1).mean()

    agrees(loss, params, ids, labels)
    planned = planner.from_jax(
        loss, params, ids, labels, devices=8, pins="dp=2,tp=4,tensor=megatron"
    )
    where = planned.in_shardings[0]
    cut = [x for x in jax.tree.leaves(where) if "tensor" in str(x.spec)]
    assert len(cut) >= 6, "columns and rows of both blocks"
    got, grads = jax.jit(jax.value_and_grad(loss), in_shardings=planned.in_shardings)(
        jax.device_put(params, where), ids, labels
    )
    want, want_grads = jax.jit(jax.value_and_grad(loss))(params, ids, labels)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-5)


def test_what_has_no_translation_is_planned_whole() -> None:
    def fn(p: Any, x: Any) -> Any:
        return jax.lax.cummax(x @ p, axis=1) @ p.T

    planned = planner.from_jax(fn, S((16, 32), np.float32), S((8, 16), np.float32), devices=4)
    assert planned.replicated == {"cummax": 1} and planned.strategy.workload["kind"] == "infer"
    row = next(r for r in planned.strategy.nodes.values() if r["op"] == "jax::cummax")
    assert row["split"] == {} and row["unsupported"]
    x, p = f32(8, 16), f32(16, 32)
    np.testing.assert_allclose(
        jax.jit(fn, in_shardings=planned.in_shardings)(p, x), fn(p, x), rtol=1e-5, atol=1e-5
    )


def test_unused_parameters_are_whole() -> None:
    planned = planner.from_jax(
        lambda p, x: x @ p["w"],
        {"w": S((16, 32), np.float32), "old": S((7,), np.float32)},
        S((8, 16), np.float32),
        devices=4,
    )
    assert planned.in_shardings[0]["old"].is_fully_replicated


@pytest.mark.parametrize(
    ("fn", "args", "said"),
    [
        (lambda p, x: x @ p, (S((3, 4), np.float32), S((5, 7), np.float32)), "cannot be traced"),
        (lambda p: (p * p).sum(), (S((3, 4), np.float32),), "takes no batch"),
        (
            lambda p, x: jax.lax.scan(lambda c, _: (c @ p, None), x, None, length=300)[0],
            (S((4, 4), np.float32), S((8, 4), np.float32)),
            "more than 200 operations",
        ),
        (
            lambda p, k: jax.random.normal(k, (4,)) + p,
            (S((4,), np.float32), jax.random.key(0)),
            "takes no batch",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(
    fn: Callable[..., Any], args: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.reader.jax.trace.MOST_EQUATIONS", 200)
    with pytest.raises(PlanError, match=said) as e:
        planner.from_jax(fn, *args, devices=4)
    assert e.value.code == "P195"
