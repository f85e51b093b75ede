"""AdamW, one parameter at a time on local pieces, in float32."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.tables import COMPUTE
from planner.emit.runtime.step.schedule import learning_rate

BETA1, BETA2, EPSILON, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01


def start_state(masters):
    """Two moments per parameter, and the master copy where parameters are stored in a shorter
    type."""
    master = jnp.dtype(COMPUTE).itemsize < 4
    return {
        key: (
            (jnp.zeros_like(p), jnp.zeros_like(p), p)
            if master
            else (jnp.zeros_like(p), jnp.zeros_like(p))
        )
        for key, p in masters.items()
    }


def update(p, gradient, state, count, decaying):
    """One step of AdamW: (parameter in its own type, state). decaying: whether weight decay moves
    it, or its elements."""
    m, v, *master = state
    w, g = master[0] if master else p, gradient.astype(jnp.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * jnp.square(g)
    step = (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPSILON)
    w = w - learning_rate(count) * (step + WEIGHT_DECAY * decaying * w)
    return w.astype(p.dtype), (m, v, w) if master else (m, v)
