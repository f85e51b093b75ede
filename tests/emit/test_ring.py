"""Attention on a ring: results of pieces put together, halves that change places for equal work, and
the fused kernels that attend to pieces."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")
jnp = jax.numpy

from costmodels.hardware.device import load_device  # noqa: E402
from planner.emit.runtime.kernels import ring, ring_pieces  # noqa: E402
from planner.emit.runtime.kernels.kernels import attention  # noqa: E402
from planner.emit.runtime.kernels.ring import (  # noqa: E402
    balanced,
    balanced_ring_attention,
    halves_met,
    in_order,
    ring_attention,
)
from planner.emit.runtime.kernels.ring_pieces import joined_results, piece_kernel  # noqa: E402
from planner.graph.ir import Graph, Node, Tensor  # noqa: E402
from planner.ops import OPERATORS  # noqa: E402
from planner.ops.attention_kernels import Chosen, chosen, is_balanced, pieces_met  # noqa: E402
from planner.ops.attention_pairs import Positions, around_ring  # noqa: E402
from planner.sharding.rule import Split  # noqa: E402
from tests.emit.test_fused_attention import H100, V5P, mesh_of  # noqa: E402

SCALE = 0.3


def some(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 2**16), st.booleans())
@settings(max_examples=50, deadline=None)
def test_results_over_pieces_are_those_over_all_keys(
    widths: list[int], seed: int, hidden: bool
) -> None:
    """Put together in any order, pieces of which a row sees nothing included, and rows that see no
    key at all: these give zeros."""
    rng = np.random.default_rng(seed)
    keys = sum(widths)
    scores = rng.normal(scale=20, size=(3, keys)).astype(np.float32)
    if hidden:
        scores[rng.random(scores.shape) < 0.7] = -np.inf
    values = rng.normal(size=(keys, 2)).astype(np.float32)

    def over(part: slice) -> tuple[Any, Any]:
        s = scores[:, part].astype(np.float64)
        top = np.where((m := s.max(-1, initial=-np.inf)) == -np.inf, 0, m)
        p = np.exp(s - top[:, None])
        norm = p.sum(-1)
        with np.errstate(divide="ignore"):
            total = top + np.log(norm)
        out = p @ values[part] / np.where(norm == 0, 1, norm)[:, None]
        return jnp.asarray(out, jnp.float32), jnp.asarray(total, jnp.float32)

    ends = np.cumsum(widths)
    pieces = [over(slice(b - n, b)) for b, n in zip(ends, widths, strict=True)]
    rng.shuffle(pieces)
    found = functools.reduce(joined_results, pieces)
    for one, other in zip(found, over(slice(0, keys)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("devices", [2, 3, 4, 5, 8])
def test_a_balanced_ring_meets_every_pair_once_and_shares_them_equally(devices: int) -> None:
    """Of 2 halves of 3 positions a device; numbers of positions travel as keys do."""
    half = 3
    at = jnp.arange(devices * 2 * half).reshape(devices, 1, 1, 2 * half)

    def place(x: Any) -> Any:
        there = balanced(x, "ring", 2)
        return there, in_order(there, "ring", 2)

    halves, back = jax.vmap(place, axis_name="ring")(at)
    np.testing.assert_array_equal(back, at)
    own = np.asarray(halves).reshape(devices, -1)
    assert (np.diff(own) > 0).all(), "the earlier half comes first"
    met = [(q, k) for mine in own for q in mine for k in mine if k <= q]
    for i in range(1, devices):
        steps = jax.vmap(lambda _, i=i: halves_met(i, half, "ring"), axis_name="ring")(at)
        for r in range(devices):
            other, before = own[(r - i) % devices], len(met)
            for rows, keys in steps:
                a, b = (int(jnp.broadcast_to(x, (devices,))[r]) for x in (rows, keys))
                met += [(q, k) for q in own[r, a : a + half] for k in other[b : b + half]]
            assert len(met) - before == 2 * half * half
    positions = range(devices * 2 * half)
    assert sorted(met) == [(q, k) for q in positions for k in positions if k <= q]


@given(st.integers(2, 64), st.integers(1, 4096))
def test_a_device_of_a_balanced_ring_has_its_part_of_the_causal_pairs(
    devices: int, half: int
) -> None:
    rows = 2 * half
    met = around_ring(rows, rows, devices, True)
    own = sum(one.often * one.positions.pairs(one.queries, one.keys) for one in met)
    assert own * devices == Positions(True).pairs(devices * rows, devices * rows)
    whole = around_ring(rows, rows, devices, False)
    assert sum(one.computed_pairs for one in whole) == devices * rows * rows


def gradients(kernel: Any, operands: Any, devices: int) -> Any:
    """Loss and gradients of a kernel of operands cut along positions over so many devices."""
    mesh = jax.make_mesh((devices,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, None, "ring")

    def step(*operands: Any) -> Any:
        def loss(*operands: Any) -> Any:
            out = kernel(*operands)
            weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
            return jnp.sum(jnp.sin(out) * weights), out

        (_, out), found = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*operands)
        return out, found

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec))(*operands)


def unsharded(operands: Any, devices: int, causal: bool) -> Any:
    """The same of the whole, whose loss weighs every device's rows alike."""

    def loss(*operands: Any) -> Any:
        out = attention(*operands, None, SCALE, causal, False, 0)
        parts = jnp.split(out, devices, 2)
        weights = jnp.cos(jnp.arange(parts[0].size, dtype=jnp.float32)).reshape(parts[0].shape)
        return sum(jnp.sum(jnp.sin(part) * weights) for part in parts), out

    (_, out), found = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*operands)
    return out, found


def agree(one: Any, other: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_rings_equal_the_unsharded_program(devices: int, groups: int, causal: bool) -> None:
    """Results and gradients, of as many heads of keys as of queries and of fewer."""
    heads = (4, groups, groups)
    q, k, v = (some(2, h, 6 * devices, 8, seed=i) for i, h in enumerate(heads))

    def kernel(q: Any, k: Any, v: Any) -> Any:
        if causal:
            return balanced_ring_attention(q, k, v, SCALE, "ring")
        return ring_attention(q, k, v, None, SCALE, False, 0, "ring")

    agree(gradients(kernel, (q, k, v), devices), unsharded((q, k, v), devices, causal))


@pytest.mark.parametrize("causal", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_ring_saved_by_name_is_not_gone_around_again(causal: bool) -> None:
    """Under a policy that saves the name a checkpointed ring sends what one that is not wrapped
    does; under another it goes around twice. Numbers are those of the whole."""
    operands = tuple(some(1, h, 24, 8, seed=i) for i, h in enumerate((4, 2, 2)))

    def kernel(q: Any, k: Any, v: Any) -> Any:
        if causal:
            return balanced_ring_attention(q, k, v, SCALE, "ring", name="context")
        return ring_attention(q, k, v, None, SCALE, False, 0, "ring", name="context")

    def wrapped(*names: str) -> Any:
        saved = jax.checkpoint_policies.save_only_these_names(*names)
        return jax.checkpoint(kernel, policy=saved)

    def sends(kernel: Any) -> int:
        text = jax.jit(lambda *x: gradients(kernel, x, 4)).lower(*operands).compile().as_text()
        found: int = text.count(" collective-permute(") + text.count("collective-permute-start(")
        return found

    assert sends(wrapped("context")) == sends(kernel)
    if causal:  # compilers make one of both runs of the other, of as few pieces
        assert sends(kernel) < sends(wrapped("other"))
    agree(gradients(wrapped("context"), operands, 4), unsharded(operands, 4, causal))


@pytest.mark.slow
def test_long_pieces_come_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_pieces, "QUERY_BLOCK", 4)
    operands = tuple(some(1, h, 64, 8, seed=i) for i, h in enumerate((4, 2, 2)))
    found = gradients(lambda *x: balanced_ring_attention(*x, SCALE, "ring"), operands, 2)
    agree(found, unsharded(operands, 2, True))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_splash_attends_to_pieces(
    causal: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In plain operations, under shard_map with its types checked."""
    monkeypatch.setattr(ring, "piece_kernel", lambda *_: "splash")
    for name in ("splash_piece", "splash_gradients"):
        plain = functools.partial(getattr(ring_pieces, name), interpret=True)
        monkeypatch.setattr(ring_pieces, name, plain)
    operands = tuple(some(1, h, 512, 64, seed=i) / 4 for i, h in enumerate((2, groups, groups)))

    def kernel(q: Any, k: Any, v: Any) -> Any:
        if causal:
            return balanced_ring_attention(q, k, v, SCALE, "ring")
        return ring_attention(q, k, v, None, SCALE, False, 0, "ring")

    agree(gradients(kernel, operands, 2), unsharded(operands, 2, causal), 1e-4)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_cudnn_is_given_the_logarithms_over_all_keys(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN itself runs on GPUs alone: plain functions stand in for jax's two, of operands as these
    have them."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    def scores(q: Any, k: Any, scale: float, mask: Any) -> Any:
        k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
        s = jnp.einsum("bshd,bthd->bhst", q, k) * scale
        hidden = jnp.triu(jnp.ones(s.shape[-2:], bool), 1)
        return jnp.where(hidden, -jnp.inf, s) if mask == fused.MaskType.CAUSAL else s

    def weighed(p: Any, v: Any) -> Any:
        return jnp.einsum("bhst,bthd->bshd", p, jnp.repeat(v, p.shape[1] // v.shape[2], 2))

    def forward(q: Any, k: Any, v: Any, *, scale: float, mask_type: Any, return_residual: bool):  # type: ignore[no-untyped-def]
        assert return_residual
        s = scores(q, k, scale, mask_type)
        return weighed(jax.nn.softmax(s, -1), v), jax.nn.logsumexp(s, -1)

    def backward(*given: Any) -> Any:
        scale, _, dropout, variadic, mask, layout, window, _, _, kept, g = given
        assert (dropout, variadic, layout, window) == (0.0, (False, False), 0, None)
        q, k, v, *absent, total, out = kept
        assert len(absent) == 7 and all(x.size == 0 for x in absent)
        inner = jnp.sum(g * out, -1).swapaxes(1, 2)

        def weights(q: Any, k: Any, v: Any) -> Any:
            p = jnp.exp(scores(q, k, scale, mask) - total[..., None])
            return weighed(p, v), jnp.sum(p, -1)

        return *jax.vjp(weights, q, k, v)[1]((g, -inner)), *[None] * 7

    monkeypatch.setattr(fused, "dot_product_attention", forward)
    monkeypatch.setattr(fused, "_dot_product_attention_bwd_rule", backward)
    monkeypatch.setattr(ring, "piece_kernel", lambda *_: "cudnn")
    operands = tuple(some(2, h, 24, 8, seed=i) for i, h in enumerate((4, 2, 2)))

    def kernel(q: Any, k: Any, v: Any) -> Any:
        if causal:
            return balanced_ring_attention(q, k, v, SCALE, "ring")
        return ring_attention(q, k, v, None, SCALE, False, 0, "ring")

    agree(gradients(kernel, operands, 4), unsharded(operands, 4, causal))


def test_pieces_that_no_kernel_takes_are_the_blocks_(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax._src.cudnn.fused_attention_stablehlo as fused

    q, k, v = (jax.ShapeDtypeStruct((2, h, 512, 128), jnp.bfloat16) for h in (4, 2, 2))
    with jax.sharding.use_abstract_mesh(mesh_of(H100)):
        assert piece_kernel(q, k, v, 256, 512) == "cudnn"
        assert piece_kernel(q, k, v, 255, 512) == piece_kernel(q, k, v, 256, 511) == "blocks"
        monkeypatch.delattr(fused, "_dot_product_attention_bwd_rule")
        assert piece_kernel(q, k, v, 256, 512) == "blocks"
    with jax.sharding.use_abstract_mesh(mesh_of(V5P)):
        assert piece_kernel(q, k, v, 256, 256) == "splash"
        assert piece_kernel(q, k, v, 192, 192) == "blocks"


def planned(
    positions: int, split: dict[str, list[str]], device: str = "h100-sxm", **attributes: Any
) -> tuple[Chosen, bool, types.SimpleNamespace]:
    """(kernel, whether its ring is balanced, node and rule) of an attention on a mesh of 4 x 2."""
    mask, jit = attributes.pop("mask", False), attributes.pop("jit", False)
    tensors = {
        n: Tensor(n, (2, h, positions, 128), "float32")
        for n, h in (("q", 4), ("k", 2), ("v", 2), ("o", 4))
    }
    names = ["q", "k", "v"]
    if mask:
        tensors["m"] = Tensor("m", (2, 1, 1, positions), "bool")
        names.append("m")
    node = Node(
        "n", "Attention", tuple(names), ("o",), {"scale": 0.1, "causal": 1, "guard": 0} | attributes
    )
    graph = Graph("g", (node,), tensors, tuple(names), ("o",))
    rule, mesh, chip = OPERATORS["Attention"].rule(node, graph), {"a": 4, "b": 2}, device
    figures = load_device(chip)
    kernel = chosen(
        node,
        graph,
        rule,
        Split.of(split),
        mesh,
        device_kernel=figures.attention_kernel,
        head_widths=figures.head_widths,
        compute="bfloat16",
        partitioned=jit,
    )
    return kernel, is_balanced(rule, Split.of(split), mesh), types.SimpleNamespace(rule=rule)


RING = {"ring": ["a"]}


@pytest.mark.parametrize(
    ("positions", "split", "options", "kernel", "even"),
    [
        (4096, RING, {}, "cudnn", True),
        (4096, RING, {"jit": True}, "cudnn", True),
        (4096, {"ring": ["a", "b"]}, {}, "cudnn", True),
        (4096, RING, {"causal": 0}, "cudnn", False),
        (4096, RING, {"device": "tpu-v5p"}, "splash", True),
        (768, RING, {"device": "tpu-v5p"}, "blocks: a device has 96 queries to 96 keys", True),
        (12, RING, {}, "blocks: its pieces on a ring cannot be halved", False),
        (24, RING, {}, "blocks: its pieces on a ring have 3 queries and 3 keys", True),
        (12, RING, {"causal": 0}, "blocks: its pieces on a ring have 3 queries and 3 keys", False),
        (
            4096,
            {"ring": ["a"], "s": ["b"]},
            {},
            "blocks: its pieces on a ring cannot be halved",
            False,
        ),
        (
            4096,
            RING,
            {"mask": True},
            "blocks: its keys travel around a ring under a mask of their own",
            False,
        ),
        (
            4096,
            RING,
            {"window": 64},
            "blocks: its keys travel around a ring under a mask of their own",
            False,
        ),
    ],
    ids=str,
)
def test_plans_say_which_kernel_attends_to_pieces(
    positions: int, split: dict[str, list[str]], options: dict[str, Any], kernel: str, even: bool
) -> None:
    found, is_even, _ = planned(positions, split, **options)
    assert (str(found), is_even) == (kernel, even)


@pytest.mark.parametrize(
    ("window", "met"), [(0, 4), (1, 2), (2, 2), (1025, 2), (1026, 3), (2049, 3), (4096, 4)]
)
def test_a_window_ends_the_way_of_keys(window: int, met: int) -> None:
    """Pieces of 1,024 positions: those that begin before a window of a device's first query are
    not sent, but where other axes cut the queries as well or a mask is there besides."""
    _, _, made = planned(4096, RING, window=window)
    local = {"s": 1024, "t": 1024}
    assert pieces_met(made.rule, local, 4) == met
    assert pieces_met(made.rule, {"s": 512, "t": 1024}, 4) == 4
    _, _, masked = planned(4096, RING, window=window, mask=True)
    assert pieces_met(masked.rule, local, 4) == 4
    gradients = [inner for inner in made.rule.inner if inner.backward and not inner.forward]
    assert [inner.times(4, local)[1] for inner in gradients if not inner.halved] == [
        *[met - 1, 1] * 2
    ]


def test_halves_change_places_where_they_can() -> None:
    """Queries, keys, values and the result forward; backward these again, and four gradients."""
    *_, made = planned(4096, RING)
    halves = [inner for inner in made.rule.inner if inner.halved]
    assert sum(inner.forward for inner in halves) == 4
    assert sum(inner.backward for inner in halves) == 8
    for local, runs in (
        ({"s": 8, "t": 8}, True),
        ({"s": 7, "t": 7}, False),
        ({"s": 4, "t": 8}, False),
    ):
        assert all(inner.runs(local) == runs for inner in halves)
    sizes = {"b": 2, "g": 2, "r": 2, "s": 8, "t": 8, "d": 16, "e": 16}
    one = 2 * 2 * 2 * 8 * 16
    assert [inner.payload_bytes(sizes, 4, 2) for inner in halves] == [
        one,
        one // 2,
        one // 2,
        one,
        one // 2,
        one // 2,
        one,
        one,
    ]
    *_, masked = planned(4096, RING, mask=True)
    assert not any(inner.halved for inner in masked.rule.inner)
