"""The loop over microbatches of which several run at the same time, of a model with
convolutions."""

from __future__ import annotations

import jax
from jax import lax

from planner.emit.runtime.files.tables import COPIES, MICROBATCHES


def over_microbatches(one, start, batch):
    """What `one` leaves after every COPIES microbatches of the batch in turn. Written out where the
    program is compiled for a CPU: XLA brings convolutions into the form of its fast kernels only
    outside loops, inside one they were measured 20 to 100 times slower.
    """
    groups = jax.tree.map(lambda x: x.reshape(-1, COPIES, *x.shape[1:]), batch)

    def loop(steps):
        return lambda start, batch: lax.scan(one, start, batch, unroll=steps)[0]

    return lax.platform_dependent(start, groups, cpu=loop(MICROBATCHES // COPIES), default=loop(1))
