"""A transformation of optax in an optimizer's place: the program's TRANSFORM, one parameter at a
time on local pieces, in float32. What it keeps has to be like its parameter, element by element, or
count steps (scale_by_adam, scale_by_lion, trace ...); the learning rate, its schedule, clipping and
weight decay are the program's."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planner.emit.runtime.files.frame import has_masters
from planner.emit.runtime.files.tables import STATE, TRANSFORM
from planner.emit.runtime.step.schedule import learning_rate

WEIGHT_DECAY = 0.01


def kept_of(p):
    """(whether it is a moment, else a count of steps) of what TRANSFORM keeps of a parameter, and
    how these lie in its state."""
    like = jax.ShapeDtypeStruct(p.shape, jnp.float32)
    leaves, tree = jax.tree.flatten(jax.eval_shape(TRANSFORM.init, like))
    for leaf in leaves:
        if leaf.shape != p.shape and (leaf.shape or leaf.dtype != jnp.int32):
            raise SystemExit(
                f"TRANSFORM keeps {leaf.dtype}{list(leaf.shape)} of a parameter {list(p.shape)}:"
                " only what is like the parameter, or counts steps, can be cut as the plan cuts it"
            )
    return [leaf.dtype != jnp.int32 for leaf in leaves], tree


def start_state(masters):
    """What TRANSFORM keeps of each parameter, and the master copy where there is one."""

    def start(p):
        kept = jax.tree.leaves(TRANSFORM.init(p.astype(jnp.float32)))
        kinds, _ = kept_of(p)
        moments = tuple(x.astype(STATE) for x, moment in zip(kept, kinds, strict=True) if moment)
        return (*moments, p) if has_masters() else moments

    return {key: start(p) for key, p in masters.items()}


def update(p, gradient, state, count, decaying):
    """One step: (parameter in its own type, state). decaying: whether weight decay moves it, or its
    elements."""
    kinds, tree = kept_of(p)
    moments = iter(x.astype(jnp.float32) for x in state)
    before = (count - 1).astype(jnp.int32)
    kept = jax.tree.unflatten(tree, [next(moments) if moment else before for moment in kinds])
    w = (state[-1] if has_masters() else p).astype(jnp.float32)
    step, kept = TRANSFORM.update(gradient.astype(jnp.float32), kept, w)
    w = w - learning_rate(count) * (step + WEIGHT_DECAY * decaying * w)
    after = zip(jax.tree.leaves(kept), kinds, strict=True)
    new = tuple(x.astype(STATE) for x, moment in after if moment)
    return w.astype(p.dtype), (*new, w) if has_masters() else new
