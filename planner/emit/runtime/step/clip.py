"""Clipping of gradients by their global norm, and which parameters weight decay moves."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.tables import CLIP_NORM, NO_DECAY, NORM_LOGGED
from planner.emit.runtime.step.adamw import update
from planner.emit.runtime.step.reduce_shard_map import global_norm


def measures_norm():
    """Whether a step also returns the global norm of its gradients, as they are before clipping."""
    return CLIP_NORM > 0 or NORM_LOGGED


def clipping(grads):
    """(what gradients are multiplied by, their global norm) such that the norm of all together is
    at most CLIP_NORM; without the norm where nobody asks for it."""
    if not measures_norm():
        return (1.0,)
    norm = global_norm(grads)
    return limited(norm), norm


def limited(norm):
    """What gradients of this norm are multiplied by, so that it is at most CLIP_NORM."""
    return jnp.where(norm < CLIP_NORM, 1.0, CLIP_NORM / norm) if CLIP_NORM else 1.0


def decays(key):
    """Whether weight decay moves a parameter."""
    return key not in NO_DECAY


def update_at(count, factor):
    """change(parameter, gradient before clipping, state, whether it decays): `update` in this
    step."""

    def change(p, gradient, state, decaying):
        return update(p, gradient.astype(jnp.float32) * factor, state, count, decaying)

    return change
