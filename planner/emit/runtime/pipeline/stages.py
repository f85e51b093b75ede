"""What programs with pipeline stages share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.files.tables import MESH, MICROBATCHES


def microbatch_of(batch, m):
    """Microbatch m of a batch; in a bubble, one there is."""
    number = jnp.clip(m, 0, MICROBATCHES - 1)
    return {key: lax.dynamic_index_in_dim(x, number, keepdims=False) for key, x in batch.items()}


def zeros_of(shapes):
    """Zeros of traced shapes, differing between the devices that those do and between stages."""

    def zeros(s):
        axes = tuple(a for a in MESH if a == "stage" or a in s.manual_axis_type.varying)
        return lax.pcast(jnp.zeros(s.shape, s.dtype), axes, to="varying")

    return jax.tree.map(zeros, shapes)


def beside(known):
    """(own, again): what of a traced backward pass is not among the leaves `known`, parameters that
    are read where they are; and, once one has been traced, the backward pass of such again."""
    form: list = []

    def own(pull):
        leaves, tree = jax.tree.flatten(pull)
        places = [next((k for k, p in enumerate(known) if p is leaf), None) for leaf in leaves]
        form[:] = tree, places
        return [leaf for leaf, k in zip(leaves, places, strict=True) if k is None]

    def again(saved):
        rest = iter(saved)
        leaves = [next(rest) if k is None else known[k] for k in form[1]]
        return jax.tree.unflatten(form[0], leaves)

    return own, again


def pick(here, one, other):
    """One tree or another, by what holds on this device."""
    return jax.tree.map(lambda a, b: jnp.where(here, a, b), one, other)
