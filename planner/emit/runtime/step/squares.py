"""Sums of squares of gradients, each element counted once."""

from __future__ import annotations

import math

import jax.numpy as jnp

from planner.emit.runtime.files.tables import GRADIENTS, MESH


def copies(key):
    """How many devices have the same piece of a parameter's gradient."""
    cut = [cell if isinstance(cell, tuple) else (cell,) for cell in GRADIENTS[key][-1]]
    return math.prod(n for axis, n in MESH.items() if not any(axis in axes for axes in cut))


def squares(gradient):
    """The sum of squares of an array, in float32."""
    return jnp.square(gradient.astype(jnp.float32)).sum()


def sum_of_squares(key, gradient):
    """The sum of squares of a device's piece of a gradient."""
    return squares(gradient)
