"""AdamW, one parameter at a time on local pieces, computed in float32."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.frame import has_masters
from planner.emit.runtime.files.tables import STATE
from planner.emit.runtime.step.schedule import learning_rate

BETA1, BETA2, EPSILON, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01


def start_state(masters):
    """Two moments per parameter, and the master copy where there is one."""

    def start(p):
        moments = jnp.zeros_like(p, dtype=STATE), jnp.zeros_like(p, dtype=STATE)
        return (*moments, p) if has_masters() else moments

    return {key: start(p) for key, p in masters.items()}


def update(p, gradient, state, count, decaying):
    """One step of AdamW: (parameter in its own type, state). decaying: whether weight decay moves
    it, or its elements."""
    (m, v, *_), g = (x.astype(jnp.float32) for x in state), gradient.astype(jnp.float32)
    w = (state[2] if has_masters() else p).astype(jnp.float32)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * jnp.square(g)
    step = (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPSILON)
    w = w - learning_rate(count) * (step + WEIGHT_DECAY * decaying * w)
    moments = m.astype(STATE), v.astype(STATE)
    return w.astype(p.dtype), (*moments, w) if has_masters() else moments
