"""The loop over microbatches of a model with convolutions."""

from __future__ import annotations

from jax import lax

from planner.emit.runtime.files.tables import MICROBATCHES


def over_microbatches(one, start, batch):
    """What `one` leaves after each microbatch of the batch in turn. Written out where the program
    is compiled for a CPU: XLA brings convolutions into the form of its fast kernels only outside
    loops, inside one they were measured 20 to 100 times slower."""

    def loop(steps):
        return lambda start, batch: lax.scan(one, start, batch, unroll=steps)[0]

    return lax.platform_dependent(start, batch, cpu=loop(MICROBATCHES), default=loop(1))
