"""The update of a program whose repeats of a block are arrays of their own, where the optimizer
orthogonalises matrices: those of all repeats at once, so that devices divide them. Takes the place
of the function of its name."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.tables import TOGETHER
from planner.emit.runtime.step.matrices import cells_of
from planner.emit.runtime.step.pieces_shard_map import in_pieces
from planner.emit.runtime.step.state_device import updated


def orthogonalised_by(function, change):
    """`change`, with another function that orthogonalises."""

    def changed(p, gradient, state, told):
        decaying, matrices = told
        return change(p, gradient, state, (decaying, matrices and (function, matrices[1])))

    return changed


def updated_all(params, state, grads, change):
    """(parameters, optimizer state) after the step. An update is written twice: to learn what it
    wants to be orthogonalised, of which the compiler leaves the rest out, and with the answer."""
    asked: dict = {}
    answers: dict = {}

    def one(key, how):
        return updated(key, how, params[key], grads[key], state[key])

    for keys in TOGETHER:
        for key in keys:
            one(key, orthogonalised_by(lambda x, key=key: asked.setdefault(key, x), change))
        matrices = in_pieces(jnp.stack([asked[key] for key in keys]), (None, *cells_of(keys[0])))
        answers |= dict(zip(keys, matrices, strict=True))
    new = {}
    for key in params:
        own = key in answers
        how = orthogonalised_by(lambda x, key=key: answers[key], change) if own else change
        new[key] = one(key, how)
    return tuple({key: row[k] for key, row in new.items()} for k in (0, 1))
