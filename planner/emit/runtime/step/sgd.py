"""Plain gradient descent, one parameter at a time on local pieces, in float32."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.frame import has_masters
from planner.emit.runtime.step.schedule import learning_rate


def start_state(masters):
    """The master copy where there is one, else nothing."""
    return {key: (p,) if has_masters() else () for key, p in masters.items()}


def update(p, gradient, state, count, decaying):
    """One step of plain gradient descent: (parameter in its own type, state)."""
    w = (state[0] if state else p) - learning_rate(count) * gradient.astype(jnp.float32)
    return w.astype(p.dtype), (w,) if state else ()
