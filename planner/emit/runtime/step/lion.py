"""Lion, one parameter at a time on local pieces, computed in float32: a step of one size against
the sign of a mean of gradients (Chen et al., Symbolic Discovery of Optimization Algorithms,
algorithm 2). The constants are those of optax.lion."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.frame import has_masters
from planner.emit.runtime.files.tables import STATE
from planner.emit.runtime.step.schedule import learning_rate

BETA1, BETA2, WEIGHT_DECAY = 0.9, 0.99, 1e-3


def start_state(masters):
    """One moment per parameter, and the master copy where there is one."""
    return {
        key: (jnp.zeros_like(p, dtype=STATE), *([p] if has_masters() else []))
        for key, p in masters.items()
    }


def update(p, gradient, state, count, decaying):
    """One step of Lion: (parameter in its own type, state). decaying: whether weight decay moves
    it, or its elements."""
    m, g = state[0].astype(jnp.float32), gradient.astype(jnp.float32)
    w = (state[1] if has_masters() else p).astype(jnp.float32)
    step = jnp.sign(BETA1 * m + (1 - BETA1) * g)
    w = w - learning_rate(count) * (step + WEIGHT_DECAY * decaying * w)
    m = BETA2 * m + (1 - BETA2) * g
    return w.astype(p.dtype), (m.astype(STATE), w) if has_masters() else (m.astype(STATE),)
