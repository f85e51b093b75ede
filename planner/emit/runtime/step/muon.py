"""Muon: steps along orthogonalised momentum (Keller Jordan, "Muon: an optimizer for hidden layers
in neural networks", 2024), as large as AdamW's and with decoupled weight decay (Liu et al., "Muon
is Scalable for LLM Training", 2025, whose factor of the steps and decay these are; the other
constants are those of optax.contrib.muon). What is not in ORTHOGONALISED takes AdamW's update. One
parameter at a time on local pieces, in float32 but for the products of matrices."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.frame import has_masters
from planner.emit.runtime.files.tables import COMPUTE, ORTHOGONALISED, STATE
from planner.emit.runtime.step.schedule import learning_rate

MOMENTUM, BETA1, BETA2, EPSILON, WEIGHT_DECAY = 0.95, 0.9, 0.999, 1e-8, 0.1
STEP_RMS = 0.2
"""The root mean square of the elements of a step: about that of AdamW's."""


def start_state(masters):
    """One moment of matrices that are orthogonalised, two of all else, and the master copy where
    there is one."""

    def start(p, moments):
        zeros = [jnp.zeros_like(p, dtype=STATE) for _ in range(moments)]
        return (*zeros, p) if has_masters() else tuple(zeros)

    return {key: start(p, 1 if key in ORTHOGONALISED else 2) for key, p in masters.items()}


def update(p, gradient, state, count, decaying):
    """One step of Muon, or of AdamW: (parameter in its own type, state). decaying: (whether weight
    decay moves it, what orthogonalises its matrices and their larger extent, None where it has
    none)."""
    decaying, matrices = decaying
    *moments, w = (x.astype(jnp.float32) for x in (state if has_masters() else (*state, p)))
    g = gradient.astype(jnp.float32)
    kept: tuple = ()
    if matrices is None:
        m = BETA1 * moments[0] + (1 - BETA1) * g
        v = BETA2 * moments[1] + (1 - BETA2) * jnp.square(g)
        kept, step = (m, v), (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPSILON)
    else:
        m = MOMENTUM * moments[0] + (1 - MOMENTUM) * g
        ahead = MOMENTUM * m / (1 - MOMENTUM ** (count + 1))
        ahead = ahead + (1 - MOMENTUM) * g / (1 - MOMENTUM**count)
        orthogonalise, longer = matrices
        step = orthogonalise(ahead.astype(multiplied_in())).astype(jnp.float32)
        kept, step = (m,), STEP_RMS * longer**0.5 * step
    w = w - learning_rate(count) * (step + WEIGHT_DECAY * decaying * w)
    kept = tuple(x.astype(STATE) for x in kept)
    return w.astype(p.dtype), (*kept, w) if has_masters() else kept


def multiplied_in():
    """The type in which matrices are sent and multiplied: bfloat16, but in programs in float32."""
    return jnp.float32 if jnp.dtype(COMPUTE).itemsize == 4 else jnp.bfloat16
