"""Matrices brought near orthogonal ones by Newton-Schulz steps, from the pieces that devices have
of them (Keller Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS = (3.4445, -4.7750, 2.0315), 5
LEAST_NORM = 1e-8
TURN_ELEMENTS = 2**26
"""Elements of the matrices that are orthogonalised at a time, where one has fewer."""


def orthogonalised(x, cells):
    """What pieces [..., rows, columns] of matrices become when the whole ones are orthogonalised.
    cells: the mesh axes that cut each dim; in those before the last two every index is a matrix."""
    cut = [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in cells]
    whole, back = x.reshape(-1, *x.shape[-2:]), []
    for dim, axes in enumerate(cut[-2:], 1):
        if axes:
            whole, undo = made_whole(whole, axes, dim)
            back.append(undo)
    count, rows, columns = whole.shape
    most = max(1, TURN_ELEMENTS // (rows * columns))
    at_a_time = max(n for n in range(1, min(most, count) + 1) if count % n == 0)
    turns = whole.reshape(-1, at_a_time, rows, columns)
    whole = lax.map(newton_schulz, turns).reshape(whole.shape)
    for undo in reversed(back):
        whole = undo(whole)
    return whole.reshape(x.shape)


def made_whole(x, axes, dim):
    """(matrices that are whole along a dim that the axes cut, what makes them pieces again). Of
    several each is on one device alone, which does its work; one is on all."""
    count, size, ways = x.shape[0], x.shape[dim], lax.axis_size(axes)
    if count == 1:
        return lax.all_gather(x, axes, axis=dim, tiled=True), lambda y: lax.dynamic_slice_in_dim(
            y, lax.axis_index(axes) * size, size, dim
        )
    filled = jnp.pad(x, [(0, -count % ways), (0, 0), (0, 0)])
    return lax.all_to_all(filled, axes, 0, dim, tiled=True), lambda y: lax.all_to_all(
        y, axes, dim, 0, tiled=True
    )[:count]


def newton_schulz(x):
    """Matrices [n, rows, columns] with all their singular values brought near 1."""
    tall = x.shape[1] > x.shape[2]
    x = jnp.swapaxes(x, 1, 2) if tall else x
    norm = jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum((1, 2), keepdims=True))
    x = (x / (norm + LEAST_NORM)).astype(x.dtype)
    a, b, c = NEWTON_SCHULZ

    def one(_, x):
        gram = jnp.einsum("nij,nkj->nik", x, x)
        return a * x + (b * gram + c * (gram @ gram)) @ x

    x = lax.fori_loop(0, NEWTON_SCHULZ_STEPS, one, x)
    return jnp.swapaxes(x, 1, 2) if tall else x
