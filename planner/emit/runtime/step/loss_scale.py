"""A training step whose gradients are float16: the loss is multiplied by a scale, so that they stay
within its range, and the update divides by it. Where any gradient of any device is no finite
number the step changes nothing but the scale, which is halved; after GROWS_AFTER steps without
that it is doubled.

Whether all gradients are finite is read from their global norm, which is one sum over all devices:
they decide alike. These functions take the place of those of their names in other files.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from planner.emit.runtime.files.frame import place, say, specs_of
from planner.emit.runtime.files.tables import GRADIENTS, LOSS_SCALE
from planner.emit.runtime.step.clip import limited, update_at
from planner.emit.runtime.step.gradients_once import gradients
from planner.emit.runtime.step.reduce_shard_map import global_norm
from planner.emit.runtime.step.state_device import updated_all

SCALE = "loss scale"
GROWS_AFTER = 2000
LEAST_SCALE, MOST_SCALE = 2.0**-24, 2.0**24


def scaled(loss, frozen):
    """The loss, whose gradient is that of loss times scale; where there is no scale, its own."""
    if SCALE not in frozen:
        return loss

    @jax.custom_vjp
    def same(loss, scale):
        return loss

    same.defvjp(
        lambda loss, scale: (loss, scale),
        lambda scale, g: (g * scale.astype(g.dtype), jnp.zeros_like(scale)),
    )
    return same(loss, frozen[SCALE])


def one_step(params, state, frozen, batch, count):
    """(parameters, optimizer state, loss, global norm of the gradients, the loss scale it had)
    after one step. Steps that changed nothing are not counted."""
    scale, steady, skipped = state[SCALE]
    loss, grads = gradients(params, frozen | {SCALE: scale}, batch)
    norm = global_norm(grads) / scale
    finite = jnp.isfinite(norm)
    change = update_at(count - skipped, limited(norm) / scale)

    def unless_lost(p, gradient, state, decaying):
        new = change(p, gradient, state, decaying)
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (p, state))

    new, new_state = updated_all(params, state, grads, unless_lost)
    grows = steady + 1 >= GROWS_AFTER
    after = jnp.where(finite, jnp.where(grows, 2 * scale, scale), scale / 2)
    new_state[SCALE] = (
        jnp.clip(after, LEAST_SCALE, MOST_SCALE),
        jnp.where(finite & ~grows, steady + 1, 0),
        jnp.where(finite, skipped, skipped + 1),
    )
    return new, new_state, loss, norm, scale


def results():
    """How many numbers a step returns behind parameters and state."""
    return 3


def state_specs():
    """How what is carried from step to step beside the parameters is cut."""
    return specs_of(GRADIENTS) | {SCALE: P()}


def state_beside(mesh, about=None):
    """The loss scale, the steps since it changed, and the steps that changed nothing so far: of
    the checkpoint that a run goes on from (what it says: `about`), where that has them."""
    values = (about or {}).get("loss_scale") or [LOSS_SCALE, 0, 0]
    return {SCALE: tuple(place({"": np.float32(x)}, {"": P()}, mesh)[""] for x in values)}


def noted(state):
    """What a checkpoint says of that."""
    return {"loss_scale": [float(x) for x in state[SCALE]]}


def named(seen):
    """What a step returned behind parameters and state, by name."""
    loss, norm, scale = map(float, seen)
    skipped = not math.isfinite(norm)
    return {"loss": loss, "gradient_norm": norm, "loss_scale": scale, "skipped": skipped}


def step_text(i, seen, seconds):
    """The line of a step on the terminal."""
    row = named(seen)
    skipped = "; skipped: its gradients are not finite" if row["skipped"] else ""
    return (
        f"step {i}  loss {row['loss']:.6f}  {1e3 * seconds:.1f} ms  loss scale"
        f" {row['loss_scale']:g}{skipped}"
    )


def lost_at(i, seen, saved=None):
    """Whether step i shows that training has come to nothing, which is said."""
    row = named(seen)
    lost = row["skipped"] and row["loss_scale"] <= LEAST_SCALE
    if lost:
        say(
            f"step {i}: its gradients are not finite at any loss scale: values of the forward pass"
            " are outside of float16, or data or weights are no numbers; --float32 to see which,"
            " or plan again with --precision bf16-mixed"
        )
    return lost
