"""The update of parameters whose optimizer state lies beside them."""

from __future__ import annotations

from jax.sharding import NamedSharding

from planner.emit.runtime.collectives.exchange import local_piece
from planner.emit.runtime.files.tables import GRADIENTS
from planner.emit.runtime.step.clip import decays
from planner.emit.runtime.step.step_shard_map import collected


def state_at(mesh, spec):
    """How optimizer state that is cut as `spec` says lies between steps."""
    return NamedSharding(mesh, spec)


def updated(key, change, p, gradient, state):
    """A parameter and its state after the step. Where the optimizer's state is cut, each device
    updates its piece, and the parameter is gathered."""
    _, _, axes, dim, _ = GRADIENTS[key]
    piece, new = change(local_piece(p, axes, dim) if axes else p, gradient, state, decays(key))
    return collected(piece, p, axes, dim), new


def updated_all(params, state, grads, change):
    """(parameters, optimizer state) after the step, on local pieces."""
    new = {key: updated(key, change, p, grads[key], state[key]) for key, p in params.items()}
    return tuple({key: row[k] for key, row in new.items()} for k in (0, 1))
