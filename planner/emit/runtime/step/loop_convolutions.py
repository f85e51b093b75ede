"""The loop over microbatches of a model with convolutions."""

from __future__ import annotations

from jax import lax

from planner.emit.runtime.files.tables import MICROBATCHES, OVERLAPPED_MICROBATCHES
from planner.emit.runtime.step.loop_turns import turns_of


def over_microbatches(one, start, batch):
    """What `one` leaves after each turn of the loop over the batch's microbatches. Written out
    where the program is compiled for a CPU: XLA brings convolutions into the form of its fast
    kernels only outside loops, inside one they were measured 20 to 100 times slower."""

    def loop(steps):
        return lambda start, turns: lax.scan(one, start, turns, unroll=steps)[0]

    turns = MICROBATCHES // OVERLAPPED_MICROBATCHES
    return lax.platform_dependent(start, turns_of(batch), cpu=loop(turns), default=loop(1))
