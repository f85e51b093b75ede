"""The learning rate of a step, from its number: nothing is kept, so that a resumed run goes on
where it was."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.tables import (
    END_FRACTION,
    LEARNING_RATE,
    SCHEDULE,
    STEPS,
    WARMUP_STEPS,
)


def learning_rate(count):
    """The learning rate of step `count`, the first being 1: up in a line to LEARNING_RATE in step
    WARMUP_STEPS, from there as SCHEDULE says, to END_FRACTION of it in step STEPS."""
    if SCHEDULE == "constant" and not WARMUP_STEPS:
        return LEARNING_RATE
    done = jnp.clip((count - WARMUP_STEPS) / max(STEPS - WARMUP_STEPS, 1), 0, 1)
    falling = (1 + jnp.cos(jnp.pi * done)) / 2 if SCHEDULE == "cosine" else 1 - done
    part = END_FRACTION + (1 - END_FRACTION) * falling if SCHEDULE != "constant" else 1.0
    return LEARNING_RATE * part * jnp.minimum(count / max(WARMUP_STEPS, 1), 1)
