"""The zoo's graphs in onnxruntime, with seeded weights: spellings agree, and pieces match plain
definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models_zoo
from models_zoo import layers, mamba, moe, t5
from models_zoo.builder import Net, Scope

from .test_zoo import checked

TINY = [name for name in models_zoo.presets() if "tiny" in name]
Feeds = dict[str, np.ndarray]


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 3
    quiet.intra_op_num_threads = 1
    return ort.InferenceSession(
        model.SerializeToString(), quiet, providers=["CPUExecutionProvider"]
    )


def inputs(model: onnx.ModelProto, batch: int, seed: int = 0) -> Feeds:
    """Seeded inputs; ids below 3, which every table of these tests has."""
    rng, feeds = np.random.default_rng(seed), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value or batch for d in kind.shape.dim]
        if kind.elem_type == onnx.TensorProto.INT64:
            low = 1 if value.name == "attention_mask" else 0
            feeds[value.name] = rng.integers(low, 2 if value.name == "attention_mask" else 3, shape)
        else:
            feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
    return feeds


def first(model: onnx.ModelProto, feeds: Feeds) -> np.ndarray:
    return np.asarray(session(model).run(None, feeds)[0])


def weights(model: onnx.ModelProto) -> Feeds:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def close(a: np.ndarray, b: np.ndarray, tolerance: float = 2e-5) -> None:
    assert a.shape == b.shape and np.isfinite(a).all()
    assert np.abs(a - b).max() <= tolerance * max(1.0, float(np.abs(b).max()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_run_and_treat_each_sample_alone(name: str) -> None:
    model = models_zoo.build(f"{name},weights=inline")
    run, feeds = session(model), inputs(model, 5)
    whole = run.run(None, feeds)[0]
    declared = [d.dim_value or 5 for d in model.graph.output[0].type.tensor_type.shape.dim]
    assert list(whole.shape) == declared and np.isfinite(whole).all() and whole.std() > 1e-3
    parts = [run.run(None, {k: v[a:b] for k, v in feeds.items()})[0] for a, b in ((0, 2), (2, 5))]
    close(np.concatenate(parts), whole)


def test_live_batch_norm_depends_on_the_batch_and_not_on_running_statistics() -> None:
    model = models_zoo.build("resnet-tiny,weights=inline,training=1")
    feeds = inputs(model, 4)
    whole = first(model, feeds)
    assert (
        np.abs(first(model, {"pixel_values": feeds["pixel_values"][:2]}) - whole[:2]).max() > 1e-2
    )
    for tensor in model.graph.initializer:
        if ".running_" in tensor.name:
            tensor.raw_data = np.full(tensor.dims, 7.0, np.float32).tobytes()
    close(first(model, feeds), whole)


SPELLINGS = [
    ("gpt-tiny", "decomposed=1"),
    ("gpt-tiny,causal=0", "decomposed=1"),
    ("llama-tiny", "decomposed=1"),
    ("llama-tiny,tied=1,attention_bias=1,mlp_bias=1", "decomposed=1"),
    ("llama-tiny", "rotary=op"),
    ("llama-tiny,head_dim=24", "rotary=op"),
    ("mixtral-tiny", "decomposed=1"),
    ("mixtral-tiny", "form=gathered"),
    ("mixtral-tiny", "form=capacity,capacity=4"),
    ("llama-tiny,qkv_bias=1,qk_norm=1", "decomposed=1"),
    ("llama-tiny,act=gelu-tanh,scale_embedding=1", "decomposed=1"),
    ("deepseek-tiny", "decomposed=1"),
    ("deepseek-tiny", "form=gathered"),
    ("deepseek-tiny,shared_gate=1,scoring=softmax", "form=capacity,capacity=4"),
    ("dit-tiny", "decomposed=1"),
    ("bert-tiny", "decomposed=1"),
    ("bert-tiny,head=mlm", "decomposed=1"),
    ("vit-tiny", "decomposed=1"),
    ("vit-tiny", "batch=3"),
    ("t5-tiny", "decomposed=1"),
    ("unet-tiny", "decomposed=1"),
    ("ssm-tiny", "decomposed=1"),
    ("hybrid-tiny", "decomposed=1"),
    ("ssm-tiny", "chunk=24"),
    ("ssm-tiny", "chunk=1"),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("spec", "other"), SPELLINGS)
def test_two_spellings_of_a_model_agree(spec: str, other: str) -> None:
    a, b = (models_zoo.build(f"{s},weights=inline") for s in (spec, f"{spec},{other}"))
    feeds = inputs(a, 3)
    if "attention_mask" in feeds:
        feeds["attention_mask"][0, 9:] = 0
    close(first(b, feeds), first(a, feeds))


def test_a_full_expert_drops_tokens() -> None:
    exact, dropped = (
        models_zoo.build(f"mixtral-tiny,weights=inline,form={f}")
        for f in ("dense", "capacity,capacity=0.3")
    )
    feeds = inputs(exact, 3)
    assert np.abs(first(exact, feeds) - first(dropped, feeds)).max() > 1e-2


def test_the_embedded_form_is_the_same_network() -> None:
    whole = models_zoo.build("gpt-tiny,tied=0,causal=0,weights=inline,batch=3")
    rows = models_zoo.build("gpt-tiny,tied=0,embedding=0,weights=inline,batch=3")
    feeds, w = inputs(whole, 3), weights(whole)
    x = w["transformer.wte.weight"][feeds["input_ids"]] + w["transformer.wpe.weight"]
    logits, mean = session(rows).run(None, {"x": x.reshape(48, 64)})
    close(logits.reshape(3, 16, 512), first(whole, feeds))
    close(mean, logits.mean(dtype=np.float64), 1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        "gpt-tiny",
        "llama-tiny",
        "llama-tiny,decomposed=1",
        "mixtral-tiny",
        "deepseek-tiny",
        "ssm-tiny,chunk=4",
        "hybrid-tiny",
        "t5-tiny",
    ],
)
def test_later_tokens_do_not_change_earlier_logits(spec: str) -> None:
    model = models_zoo.build(f"{spec},weights=inline")
    run, feeds = session(model), inputs(model, 2)
    name = "decoder_input_ids" if "decoder_input_ids" in feeds else "input_ids"
    before = run.run(None, feeds)[0]
    feeds[name][:, 7] += 1
    after = run.run(None, feeds)[0]
    close(after[:, :7], before[:, :7])
    assert np.abs(after[:, 7:] - before[:, 7:]).max() > 1e-3


@pytest.mark.parametrize("spec", ["bert-tiny,head=mlm", "bert-tiny,head=mlm,decomposed=1"])
def test_masked_tokens_are_not_seen(spec: str) -> None:
    model = models_zoo.build(f"{spec},weights=inline")
    run, feeds = session(model), inputs(model, 2)
    feeds["attention_mask"][:, 11:] = 0
    before = run.run(None, feeds)[0]
    feeds["input_ids"][:, 11:] += 5
    after = run.run(None, feeds)[0]
    close(after[:, :11], before[:, :11])
    assert np.abs(after[:, 11:] - before[:, 11:]).max() > 1e-3


def piece(write: Any, shapes: dict[str, tuple[int, ...]], out: tuple[int, ...]) -> onnx.ModelProto:
    """A model of one part: write(scope, *inputs) names the tensor that becomes output y."""
    net = Net("piece", inline=True)
    y = write(net.root.at("part"), *(net.input(name, shape) for name, shape in shapes.items()))
    net.root.op("Identity", y, out="y")
    net.output("y", out)
    return net.model()


@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([1, 3]),
    st.booleans(),
    st.integers(0, 10**6),
)
@settings(max_examples=20, deadline=None)
def test_the_state_space_is_the_recurrence(
    chunks: int, steps: int, groups: int, decomposed: bool, seed: int
) -> None:
    sizes: dict[str, int] = {"hidden": 6, "heads": 3, "head_dim": 4, "state": 3, "groups": groups}
    c = mamba.Mamba2(**sizes, seq=chunks * steps, chunk=steps, decomposed=decomposed)
    b, s, h, p, n = 2, c.seq, c.heads, c.head_dim, c.state
    shared = (b, s, groups * n)
    shapes = {"x": (b, s, h, p), "a": (b, s, h), "b": shared, "k": shared}
    model = piece(
        lambda at, x, a, bb, k: mamba.scan(at, x, a, (bb, k), c, mamba.masks(at, c)),
        shapes,
        (b, s, h, p),
    )
    feeds = inputs(model, b, seed)
    feeds["a"] = -np.abs(feeds["a"])
    own = {key: np.repeat(feeds[key].reshape(b, s, groups, n), h // groups, axis=2) for key in "bk"}
    state, wanted = np.zeros((b, h, n, p)), np.zeros((b, s, h, p))
    for t in range(s):
        state = state * np.exp(feeds["a"][:, t])[:, :, None, None] + np.einsum(
            "bhn,bhp->bhnp", own["b"][:, t], feeds["x"][:, t]
        )
        wanted[:, t] = np.einsum("bhn,bhnp->bhp", own["k"][:, t], state)
    close(first(model, feeds), wanted)


def test_angles_are_positions_over_wave_lengths() -> None:
    model = piece(lambda at, x: layers.angles(at, x, 5, 500.0), {"x": (3,)}, (3, 5))
    x = np.array([0.0, 1.0, 70.0], np.float32)
    close(first(model, {"x": x}), x[:, None] * 500.0 ** (-np.arange(5) / 5), 1e-6)


@pytest.mark.parametrize("both", [True, False])
def test_relative_position_buckets_follow_the_definition(both: bool) -> None:
    c = t5.T5Config(1, 8, 2, 4, 8, buckets=16, max_distance=40)
    length = 60
    model = piece(
        lambda at: t5._relative_bias(at, c, length, both=both), {}, (1, 2, length, length)
    )

    def bucket(distance: int) -> int:
        count, start = (8, 8 if distance > 0 else 0) if both else (16, 0)
        far = abs(distance) if both else max(-distance, 0)
        half = count // 2
        if far < half:
            return start + far
        return start + min(
            count - 1, half + int(math.log(far / half) / math.log(40 / half) * (count - half))
        )

    table = weights(model)["part.relative_attention_bias.weight"]
    wanted = np.array(
        [[table[bucket(key - query)] for key in range(length)] for query in range(length)]
    ).transpose(2, 0, 1)[None]
    wrong = (np.abs(first(model, {}) - wanted) > 1e-6).any(axis=1).mean()
    assert wrong < 0.01  # a distance exactly on a logarithmic edge may round either way in float32


@pytest.mark.parametrize("form", ["dense", "gathered", "capacity"])
def test_experts_follow_the_definition(form: str) -> None:
    c = moe.MoeConfig(1, 6, 1, 1, 10, 8, 7, experts=5, top=2, form=form, capacity=5.0)  # type: ignore[arg-type]
    model = piece(lambda at, x: moe.mixture(at, x, c), {"x": (2, 7, 6)}, (2, 7, 6))
    feeds, w = inputs(model, 2), weights(model)
    wanted = np.zeros((2, 7, 6))
    for place in np.ndindex(2, 7):
        x = feeds["x"][place].astype(np.float64)
        share = np.exp(x @ w["part.gate.weight"])
        best = np.argsort(-share)[:2]
        for e in best:
            gate, up = (x @ w[f"part.experts.{n}_proj.weight"][e] for n in ("gate", "up"))
            y = (gate / (1 + np.exp(-gate)) * up) @ w["part.experts.down_proj.weight"][e]
            wanted[place] += y * share[e] / share[best].sum()
    close(first(model, feeds), wanted)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_grouped_routing_follows_the_definition(scoring: str) -> None:
    sizes: dict[str, Any] = {
        "experts": 8,
        "top": 3,
        "groups": 4,
        "group_top": 2,
        "scaling": 2.5,
        "scoring": scoring,
        "normalise": scoring == "sigmoid",
    }
    c = moe.MoeConfig(1, 6, 1, 1, 10, 8, 7, **sizes)
    w = weights(piece(lambda at, x: moe._route(at, x, c)[0], {"x": (2, 7, 6)}, (2, 7, 3)))
    feeds = inputs(piece(lambda at, x: x, {"x": (2, 7, 6)}, (2, 7, 6)), 2)
    value = first(piece(lambda at, x: moe._route(at, x, c)[0], {"x": (2, 7, 6)}, (2, 7, 3)), feeds)
    index = first(
        piece(
            lambda at, x: at.op("Cast", moe._route(at, x, c)[1], to=1), {"x": (2, 7, 6)}, (2, 7, 3)
        ),
        feeds,
    ).astype(int)
    for place in np.ndindex(2, 7):
        logits = feeds["x"][place].astype(np.float64) @ w["part.gate.weight"]
        scores = (
            np.exp(logits) / np.exp(logits).sum()
            if scoring == "softmax"
            else 1 / (1 + np.exp(-logits))
        )
        biased = scores + (w["part.gate.e_score_correction_bias"] if scoring == "sigmoid" else 0)
        rank = [
            np.sort(g)[-1 if scoring == "softmax" else -2 :].sum() for g in biased.reshape(4, 2)
        ]
        allowed = [e for e in range(8) if e // 2 in np.argsort(rank)[-2:]]
        best = sorted(allowed, key=lambda e: -biased[e])[:3]
        assert index[place].tolist() == best
        close(
            value[place], 2.5 * scores[best] / (scores[best].sum() if scoring == "sigmoid" else 1)
        )


WIDTH, SWITCH, EVEN = st.integers(1, 3), st.integers(0, 1), st.sampled_from([2, 6])
SMALL: dict[str, st.SearchStrategy[str]] = {
    "mlp-tiny": st.builds(
        "layers={},hidden={},in={},out={},mean={}".format, WIDTH, WIDTH, WIDTH, WIDTH, SWITCH
    ),
    "gpt-tiny": st.builds(
        "heads={},hidden=12,seq={},layers={},ff=5,vocab=11,tied={}".format,
        WIDTH,
        WIDTH,
        WIDTH,
        SWITCH,
    ),
    "llama-tiny": st.builds(
        "heads={0},kv_heads={0},hidden=12,head_dim={1},seq={2},ff=5,vocab=7".format,
        WIDTH,
        EVEN,
        WIDTH,
    ),
    "mixtral-tiny": st.builds(
        "experts={},top=1,seq={},ff=5,form={}".format,
        WIDTH,
        WIDTH,
        st.sampled_from(["dense", "gathered", "capacity,capacity=3"]),
    ),
    "deepseek-tiny": st.builds(
        "seq={},v_dim={},rope={},nope={},dense_layers={}".format,
        WIDTH,
        WIDTH,
        EVEN,
        WIDTH,
        st.integers(0, 2),
    ),
    "dit-tiny": st.builds(
        "heads={},hidden=12,patch={},side=4,channels={},learned_sigma={}".format,
        WIDTH,
        st.sampled_from([1, 2, 4]),
        WIDTH,
        SWITCH,
    ),
    "bert-tiny": st.builds(
        "heads={},hidden=12,seq={},layers={},classes={}".format, WIDTH, WIDTH, WIDTH, WIDTH
    ),
    "vit-tiny": st.builds(
        "heads={},hidden=12,image={},patch={},channels=1".format,
        WIDTH,
        st.sampled_from([4, 6, 7]),
        WIDTH,
    ),
    "t5-tiny": st.builds(
        "seq={},target={},layers={},decoder_layers={}".format, WIDTH, WIDTH, WIDTH, WIDTH
    ),
    "resnet-tiny": st.builds(
        "blocks={},block={},width={},image={}".format,
        st.sampled_from(["1", "2-1"]),
        st.sampled_from(["basic", "bottleneck"]),
        WIDTH,
        st.sampled_from([8, 13]),
    ),
    "dlrm-tiny": st.builds(
        "rows={}-9,width=4,bottom={}-4,top=3-{},dense={}".format,
        st.integers(3, 5),
        WIDTH,
        WIDTH,
        WIDTH,
    ),
    "lstm-tiny": st.builds("layers={},in={},hidden={},seq={}".format, WIDTH, WIDTH, WIDTH, WIDTH),
    "ssm-tiny": st.builds(
        "hidden=4,head_dim=4,state={},seq={},taps={}".format,
        WIDTH,
        st.sampled_from([1, 8, 16]),
        WIDTH,
    ),
    "unet-tiny": st.builds(
        "widths={},groups=2,heads=2,text_rows={},per_level=1,side=4".format,
        st.sampled_from(["4", "4-6", "2-4-2"]),
        WIDTH,
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SMALL)
@given(st.data())
@settings(max_examples=6, deadline=None)
def test_small_sizes_are_valid_and_run(name: str, data: st.DataObject) -> None:
    model = models_zoo.build(f"{name},weights=inline," + data.draw(SMALL[name]))
    shapes = checked(model)
    out = model.graph.output[0].name
    found = first(model, inputs(model, 3))
    assert (
        found.shape == tuple(3 if d == "batch" else d for d in shapes[out])
        and np.isfinite(found).all()
    )


def test_scopes_name_repeated_operators() -> None:
    net = Net("names")
    scope = Scope(net, "/a")
    x = net.input("x", ["batch"])
    assert [scope.op("Neg", x), scope.op("Neg", x), scope.op("Abs", x)] == [
        "/a/Neg_output_0",
        "/a/Neg_1_output_0",
        "/a/Abs_output_0",
    ]
