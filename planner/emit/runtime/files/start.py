"""Parameters and their optimizer state before the first step."""

from __future__ import annotations

import functools
import math

import jax

from planner.emit.runtime.files.frame import computed, initial_value, place, say, specs_of
from planner.emit.runtime.files.tables import GRADIENTS, PARAMS
from planner.emit.runtime.step.adamw import start_state
from planner.emit.runtime.step.one_step import state_beside
from planner.emit.runtime.step.state_device import state_at


def lost_at(i, seen, saved=None):
    """Whether step i shows that training has come to nothing, which is said."""
    lost = math.isnan(float(seen[0]))
    if lost:
        kept = "; no more checkpoints are saved, those before this step stay" if saved else ""
        say(
            f"step {i}: the loss is not a number, and from here on neither are the weights: a lower"
            f" --lr, --clip 1, other data, or --float32 to see whether it is rounding{kept}"
        )
    return lost


@functools.cache
def first_state(like, sharding):
    """state(master): of a parameter before the first step that keeps as much as the one called so,
    compiled once for those of a shape and cut."""
    return jax.jit(lambda master: start_state({like: master})[like], out_shardings=sharding)


def begin(args, weights, mesh):
    """(0, params, state) from stored or seeded weights, one parameter at a time in the host's
    memory."""
    params: dict = {}
    state: dict = {}
    first: dict = {}
    for key, row in PARAMS.items():
        value = {key: initial_value(key, row, args.seed, weights)}
        params |= place(computed(value), specs_of(PARAMS), mesh)
        like = first.setdefault(len(jax.eval_shape(start_state, value)[key]), key)
        state[key] = first_state(like, state_at(mesh, GRADIENTS[key][-1]))(
            place(value, specs_of(GRADIENTS), mesh)[key]
        )
    return 0, params, state | state_beside(mesh)
