"""The gradient of max pooling, written out: each window's goes to its first largest element,
whatever strides, padding and dilation are."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

WINDOWS: dict[str, Any] = {
    "3x3 of a ResNet": ((2, 3, 8, 10), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (4, 5)),
    "uneven padding": ((1, 2, 7, 9), (3, 2), (1, 2), (0, 1, 2, 0), (1, 1), (7, 5)),
    "dilated": ((2, 2, 9, 9), (3, 2), (1, 2), (0, 0, 0, 1), (2, 3), (5, 4)),
    "gaps between windows": ((2, 2, 7, 8), (2, 2), (3, 3), (0, 0, 0, 0), (1, 1), (2, 3)),
    "one dim": ((2, 3, 11), (5,), (3,), (2, 2), (1,), (4,)),
    "three dims": ((1, 2, 4, 6, 5), (2, 2, 3), (2, 2, 1), (0, 0, 1, 0, 0, 1), (1, 1, 1), (2, 3, 5)),
    "wide, same shape": ((1, 1, 9, 9), (9, 5), (1, 1), (4, 2, 4, 2), (1, 1), (9, 9)),
    "single elements": ((1, 1, 5, 5), (1, 1), (2, 2), (0, 0, 0, 0), (1, 1), (3, 3)),
}


def largest(
    x: np.ndarray,
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    pads: tuple[int, ...],
    dilations: tuple[int, ...],
    out: tuple[int, ...],
    g: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Results, and the gradient of x, window by window."""
    y, back = np.empty(g.shape, x.dtype), np.zeros_like(x)
    for at in np.ndindex(*g.shape):
        places = [
            at[:2]
            + tuple(
                o * s - p + k * d
                for o, s, p, k, d in zip(at[2:], strides, pads, taps, dilations, strict=False)
            )
            for taps in product(*map(range, kernel))
        ]
        inside = [p for p in places if all(0 <= i < n for i, n in zip(p, x.shape, strict=True))]
        best = max(inside, key=lambda p: x[p])
        y[at] = x[best]
        back[best] += g[at]
    return y, back


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("ties", [False, True])
def test_gradients_go_to_the_first_largest_element(name: str, ties: bool) -> None:
    from planner.emit.runtime.kernels.nets import max_pool

    shape, kernel, strides, pads, dilations, out = WINDOWS[name]
    rng = np.random.default_rng(3)
    x, g = (
        rng.normal(size=shape).astype(np.float32),
        rng.normal(size=shape[:2] + out).astype(np.float32),
    )
    x = np.round(x) if ties else x
    y, pull = jax.vjp(lambda x: max_pool(x, kernel, strides, pads, dilations, out), x)
    wanted, back = largest(x, kernel, strides, pads, dilations, out, g)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_allclose(pull(g)[0], back, atol=1e-6)


def test_integers_are_pooled_and_have_no_gradient() -> None:
    from planner.emit.runtime.kernels.nets import max_pool

    x = np.arange(-8, 8, dtype=np.int8).reshape(1, 1, 4, 4)
    np.testing.assert_array_equal(
        max_pool(x, (2, 2), (2, 2), (1, 0, 0, 0), (1, 1), (2, 2)), [[[[-7, -5], [1, 3]]]]
    )


def test_positions_are_not_looked_up_before_their_gradient_is_there() -> None:
    """What is written from the operand alone could be computed in the forward pass: everything of
    the backward pass reads the gradient, or what was made of it."""
    from planner.emit.runtime.kernels.nets import max_pool

    shape, kernel, strides, pads, dilations, out = WINDOWS["3x3 of a ResNet"]
    x, g = np.zeros(shape, np.float32), np.zeros(shape[:2] + out, np.float32)
    traced = jax.make_jaxpr(
        lambda x, g: jax.vjp(lambda x: max_pool(x, kernel, strides, pads, dilations, out), x)[1](g)
    )(x, g).jaxpr
    late, early = {traced.invars[1]}, []
    for equation in traced.eqns:
        if any(v in late for v in equation.invars if not hasattr(v, "val")):
            late.update(equation.outvars)
        else:
            early.append(equation.primitive.name)
    assert (
        set(early) <= {"reduce_window_max", "reduce_window", "custom_vjp_call", "broadcast_in_dim"}
        and set(traced.outvars) <= late
    )
