"""Kernels that keep little for their backward pass: the loss over blocks of rows, attention that
makes its scores again."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from planner.emit.runtime.collectives.exchange import lean, no_gathers
from planner.emit.runtime.kernels.kernels import (
    LOSS_ROWS,
    LOSS_VALUES,
    attention,
    attention_rows,
    cross_entropy,
    layer_norm,
    row_blocks,
    take_shard,
)
from planner.ops import loss


def plain(logits, labels):
    """The textbook's mean cross-entropy."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits, -1), labels[..., None], -1))


def test_blocks_are_equal_and_small():
    assert (LOSS_ROWS, LOSS_VALUES) == (loss.LOSS_ROWS, loss.LOSS_VALUES)  # memory is priced by it
    for rows in (1, 511, 512, 513, 1024, 1536, 3 * 1024, 8192):
        for classes in (1000, 50257, 128256, 512_000):
            blocks = row_blocks(rows, classes)
            assert rows % blocks == 0
            assert rows // blocks <= max(LOSS_ROWS, min(rows / 8, LOSS_VALUES / classes))
    assert row_blocks(2048, 8192) == 4 and row_blocks(16384, 25129) == 8
    assert row_blocks(8192, 128256) == 16
    assert row_blocks(1021, 10**6) == 1  # a prime: as one


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("classes", "beyond"), [(24, 0), (21, 0), (24, 3), (21, 2)])
def test_loss_in_blocks_and_with_cut_classes_is_the_textbook_s(classes, beyond):
    """2 x 4 devices, rows over data and classes over model (the last piece padded with 21 classes),
    three blocks of rows a device; with logits of padding behind each piece, whatever they are."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(6, LOSS_ROWS, classes)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, classes, (6, LOSS_ROWS)), jnp.int32)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    piece = -(-classes // 4)

    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data", None, "model"), P("data")), out_specs=P()
    )
    def loss(x, y):
        x = jnp.pad(x, ((0, 0), (0, 0), (0, beyond)), constant_values=9)
        valid = (classes, piece) if classes % 4 or beyond else None
        return jax.lax.psum(
            cross_entropy(
                x,
                y,
                2,
                ("model",),
                jax.lax.axis_index("model") * piece,
                valid,
                None,
                labels.size,
                True,
            ),
            "data",
        )

    padded = jnp.pad(logits, ((0, 0), (0, 0), (0, 4 * piece - classes)))
    value, grad = jax.jit(jax.value_and_grad(loss))(padded, labels)
    want, want_grad = jax.value_and_grad(plain)(logits, labels)
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    np.testing.assert_allclose(grad[..., :classes], want_grad, rtol=1e-4, atol=1e-9)
    assert not np.any(np.asarray(grad[..., classes:]))


def test_loss_leaves_rows_out_and_takes_classes_anywhere():
    """Classes in dim 1, half of the rows padding."""
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(4, 7, LOSS_ROWS)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 7, (4, LOSS_ROWS)), jnp.int32)
    real = (jnp.arange(4) < 2)[:, None]
    value, grad = jax.value_and_grad(
        lambda x: cross_entropy(x, labels, 1, (), 0, None, real, 2 * LOSS_ROWS, True)
    )(logits)
    want, want_grad = jax.value_and_grad(lambda x: plain(jnp.moveaxis(x[:2], 1, -1), labels[:2]))(
        logits
    )
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-4, atol=1e-9)


def test_a_cut_table_is_looked_up_without_a_masked_copy():
    """21 rows over 4 devices, the last piece padded by rows that are not zero: values and gradients
    of the whole table, padding untouched."""
    rng = np.random.default_rng(3)
    table = jnp.asarray(rng.normal(size=(24, 5)), jnp.float32)
    ids, g = (
        jnp.asarray(rng.integers(-21, 21, (3, 4)), jnp.int32),
        jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32),
    )
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P("model"), P()), out_specs=P())
    def rows(piece, ids):
        return jax.lax.psum(take_shard(piece, ids, 0, jax.lax.axis_index("model") * 6, 21), "model")

    want, pull = jax.vjp(lambda t: t[ids], table[:21])
    found, pull_found = jax.vjp(lambda t: rows(t, ids), table)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_allclose(pull_found(g)[0][:21], pull(g)[0], rtol=1e-6)
    assert not np.any(np.asarray(pull_found(g)[0][21:]))
    assert not np.any(
        np.asarray(rows(table, jnp.full((3, 4), 22)))
    )  # beyond the table: nobody's row, not that of the padding


def saved_bytes(function, *operands):
    """Bytes of the largest array between the forward and the backward pass."""
    kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], *operands))
    return max(x.size * x.dtype.itemsize for x in kept if x.dtype != jax.dtypes.float0)


def test_no_float32_copy_of_logits_is_kept():
    logits, labels = (
        jnp.zeros((2 * LOSS_ROWS, 64), jnp.bfloat16),
        jnp.zeros((2 * LOSS_ROWS,), jnp.int32),
    )
    assert (
        saved_bytes(lambda x: cross_entropy(x, labels, 1, (), 0, None, None, 4, True), logits)
        == logits.nbytes
    )


def test_norms_and_activations_keep_their_operands_whatever_is_said_around_them():
    """The policy of functions that gather weights keeps everything but gathers."""
    x, scale = jnp.zeros((4, 64)), jnp.ones((64,))

    def block(x):
        return lean(lambda x: jax.nn.gelu(layer_norm(x, scale, scale, (1,), 1e-5)))(x)

    for function in (block, jax.checkpoint(block, policy=no_gathers)):
        kept = jax.tree.leaves(jax.eval_shape(lambda x, f=function: jax.vjp(f, x)[1], x))
        assert sum(k.size for k in kept) <= x.size + scale.size + 2


@pytest.mark.parametrize("queries", [256, 2048, 3072])
def test_no_scores_are_kept(queries):
    q = jnp.zeros((1, 2, queries, 4))
    assert (
        saved_bytes(lambda q, k, v: attention(q, k, v, None, 1.0, True, False, 0), q, q, q)
        == q.nbytes
    )


def test_attention_that_recomputes_has_the_same_gradients():
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(2, h, 16, 8)), jnp.float32) for h in (4, 2, 2))
    bias = jnp.asarray(rng.normal(size=(1, 4, 16, 16)), jnp.float32)
    flags = (0.3, True, False, 0)
    got, want = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a, *flags))), argnums=(0, 1, 2, 3)))(
            q, k, v, bias
        )
        for f in (attention, attention_rows)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_attention_multiplies_in_its_operands_type_both_ways():
    """bfloat16 programs have no product with a float32 operand: forward and backward, whole and in
    blocks of queries; and the gradient is near float32's."""
    rng = np.random.default_rng(3)
    for rows in (16, 2048):
        wide = [
            jnp.asarray(rng.normal(size=(1, heads, rows, 8)), jnp.float32) for heads in (2, 1, 1)
        ]

        def total(q, k, v):
            return jnp.sum(
                jnp.square(
                    attention(q, k, v, None, 8**-0.5, True, False, 0)[:, :, :16].astype(jnp.float32)
                )
            )

        grads = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
        narrow = [x.astype(jnp.bfloat16) for x in wide]
        products = [
            line for line in grads.lower(*narrow).as_text().splitlines() if "dot_general" in line
        ]
        assert len(products) >= 6
        for line in products:
            operands = line.split(" : ")[-1].split("->")[0]
            assert operands.count("bf16") == 2, line
        for got, want in zip(grads(*narrow), grads(*wide), strict=True):
            scale = float(jnp.max(jnp.abs(want)))
            np.testing.assert_allclose(np.asarray(got, np.float32) / scale, want / scale, atol=0.03)
