"""LinearAttention of ONNX, as an operator of its own where its decay is one a head, and by its body
elsewhere: both are what onnxruntime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import planner.onnx_backend
from planner.reader import read_model

B, T, H, N, P = 2, 11, 3, 4, 5
SHAPES = {
    "q": (B, T, H * N),
    "k": (B, T, H * N),
    "v": (B, T, H * P),
    "decay": (B, T, H),
    "beta": (B, T, H),
    "past": (B, H, N, P),
}
KEPT = {"past": (B, H, N, P)}
STEP = {k: (s[0], 1, s[2]) for k, s in SHAPES.items() if k != "past"}
CASES: list[tuple[dict[str, Any], dict[str, tuple[int, ...]], bool]] = [
    ({"update_rule": "gated_delta", "chunk_size": 4}, {}, True),
    ({"update_rule": "gated_delta"}, {}, True),
    ({"update_rule": "gated", "chunk_size": 3, "scale": 0.7}, {}, True),
    ({"update_rule": "gated_delta"}, {"decay": (B, T, H * N)}, False),
    ({"update_rule": "gated_delta"}, {"beta": (B, T, 1)}, False),
    ({"update_rule": "delta"}, {}, False),
    ({"update_rule": "gated_delta", "chunk_size": 4}, KEPT, True),
    ({"update_rule": "gated", "chunk_size": 3}, KEPT, True),
    ({"update_rule": "gated_delta"}, KEPT | STEP, True),
    ({"update_rule": "gated", "scale": 0.7}, KEPT | STEP, True),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("attrs", "shapes", "own"), CASES)
def test_it_computes_what_onnx_says(
    attrs: dict[str, Any], shapes: dict[str, tuple[int, ...]], own: bool
) -> None:
    given = SHAPES | shapes
    rule = attrs["update_rule"]
    read = {"q", "k", "v"} | _read(rule) | shapes.keys() & {"past"}
    given = {k: s for k, s in given.items() if k in read}
    inputs = ["q", "k", "v", *(k if k in given else "" for k in ("past", "decay", "beta"))]
    node = helper.make_node(
        "LinearAttention", inputs, ["y", "state"], q_num_heads=H, kv_num_heads=H, **attrs
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in given.items()],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, (B, given["q"][1], H * P)),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, (B, H, N, P)),
        ],
    )
    model: onnx.ModelProto = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 27)], ir_version=13
    )
    rng = np.random.default_rng(0)
    feeds = {k: rng.standard_normal(s).astype(np.float32) / 2 for k, s in given.items()}
    if "decay" in feeds:
        feeds["decay"] = -np.abs(feeds["decay"])
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    found = planner.onnx_backend.run_model(model, list(feeds.values()))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    ops = {node.op for node in read_model(model, batch=B).nodes}
    assert ("LinearAttention" in ops) == own


def _read(rule: str) -> set[str]:
    """Operands that an update rule reads beside queries, keys and values."""
    return {"gated": {"decay"}, "delta": {"beta"}, "gated_delta": {"decay", "beta"}}[rule]


def test_the_inverse_is_exact_where_powers_would_overflow() -> None:
    """Equal keys: the powers of such a matrix grow like binomials, its inverse is of ones."""
    from planner.emit.runtime.kernels.linear_attention import unit_inverse

    lower = np.tril(np.ones((2, 64, 64), np.float32), -1)
    inverse = np.asarray(unit_inverse(lower))
    np.testing.assert_array_equal(
        inverse @ (lower + np.eye(64)), np.broadcast_to(np.eye(64), lower.shape)
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("groups", "heads"), [(1, 4), (2, 4), (4, 4)])
def test_its_flops_are_those_of_the_compiled_kernel(groups: int, heads: int, delta: bool) -> None:
    import jax
    import jax.numpy as jnp

    from planner.emit.runtime.kernels import linear_attention as kernel
    from planner.ops.linear_attention import Sizes
    from planner.verify.hlo.flops import dot_flops

    b, chunks, steps, n, p = 2, 8, 8, 6, 10
    t = chunks * steps
    operands = [jnp.ones((b, t, groups, n))] * 2 + [jnp.ones((b, t, heads, p))]
    operands += [jnp.ones((b, t, heads))] * (2 if delta else 1)

    def forward(*args: Any) -> Any:
        beta = args[4] if delta else None
        return kernel.linear_attention(*args[:4], beta, 1.0, steps)[0]

    text = jax.jit(forward).lower(*operands).compile().as_text()
    sizes = Sizes(b * heads, heads // groups, chunks, steps, n, p, delta)
    assert dot_flops(text) == sizes.flops
