"""The optimizer's state of uneven pipeline stages in the host's memory. This function takes the
place of that of its name in another file."""

from __future__ import annotations

import jax
from jax import lax

from planner.emit.runtime.files.tables import PARTS


def update_offloaded(change, _, p, gradient, state, decaying):
    """`change` of a buffer whose state is in the host's memory: brought here and written back, a
    part of the buffer after the other."""

    def one(_, row):
        p, g, host_state, decaying = row
        new, state = change(p, g, jax.device_put(host_state, jax.memory.Space.Device), decaying)
        return None, (new, jax.device_put(state, jax.memory.Space.Host))

    rows = jax.tree.map(lambda x: x.reshape(PARTS, -1), (p, gradient, state, decaying))
    return jax.tree.map(lambda x: x.reshape(p.shape), lax.scan(one, None, rows)[1])
