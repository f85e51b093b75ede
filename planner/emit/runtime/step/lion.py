"""Lion, one parameter at a time on local pieces, in float32: a step of one size against the sign of
a mean of gradients (Chen et al., Symbolic Discovery of Optimization Algorithms, algorithm 2). The
constants are those of optax.lion."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.tables import COMPUTE
from planner.emit.runtime.step.schedule import learning_rate

BETA1, BETA2, WEIGHT_DECAY = 0.9, 0.99, 1e-3


def start_state(masters):
    """One moment per parameter, and the master copy where parameters are kept in a shorter type."""
    master = jnp.dtype(COMPUTE).itemsize < 4
    return {
        key: (jnp.zeros_like(p), p) if master else (jnp.zeros_like(p),)
        for key, p in masters.items()
    }


def update(p, gradient, state, count, decaying):
    """One step of Lion: (parameter in its own type, state). decaying: whether weight decay moves
    it, or its elements."""
    m, *master = state
    w, g = master[0] if master else p, gradient.astype(jnp.float32)
    step = jnp.sign(BETA1 * m + (1 - BETA1) * g)
    w = w - learning_rate(count) * (step + WEIGHT_DECAY * decaying * w)
    m = BETA2 * m + (1 - BETA2) * g
    return w.astype(p.dtype), (m, w) if master else (m,)
