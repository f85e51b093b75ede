"""Control flow: functions of bodies, run one of two, as often as is known, or until they say
stop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def settled(values, made):
    """Values in given types and varying over given mesh axes, so that both branches, and a state
    before and after an iteration, agree."""
    out = []
    for value, (dtype, axes) in zip(values, made, strict=True):
        value = jnp.asarray(value, dtype)
        missing = tuple(a for a in axes if a not in jax.typeof(value).manual_axis_type.varying)
        out.append(lax.pcast(value, missing, to="varying") if missing else value)
    return tuple(out)


def either(condition, then, other, operands, made):
    """What one of two functions makes of the operands; only that one runs."""
    ways = [lambda *x, f=f: settled(f(*x), made) for f in (then, other)]
    return lax.cond(jnp.reshape(condition, ()) != 0, *ways, *operands)


# Many parameters: the attributes of ONNX's Loop and Scan.
def iterate(
    body, trips, states, scanned, read, made, numbered, in_axes, in_reverse, out_axes, out_reverse
):
    """`trips` runs of a body(trip?, *states, *slices of scanned, *read): the last states, and what
    the others make, stacked."""
    n = len(states)

    def tick(state, row):
        results = settled(body(*row[:1] * numbered, *state, *row[1:], *read), made)
        return results[:n], results[n:]

    rows = [jnp.moveaxis(jnp.asarray(x), axis, 0) for x, axis in zip(scanned, in_axes, strict=True)]
    rows = [jnp.flip(x, 0) if back else x for x, back in zip(rows, in_reverse, strict=True)]
    state, stacked = lax.scan(
        tick, settled(states, made[:n]), (jnp.arange(trips), *rows), length=trips
    )
    stacked = [jnp.flip(y, 0) if back else y for y, back in zip(stacked, out_reverse, strict=True)]
    return *state, *(jnp.moveaxis(y, 0, axis) for y, axis in zip(stacked, out_axes, strict=True))


def until(body, limit, go, states, read, made):
    """Runs of a body(trip, *states, *read) while it says go on, at most `limit`: the last
    states."""

    def more(now):
        return now[1] if limit is None else now[1] & (now[0] < jnp.reshape(limit, ()))

    def step(now):
        goes_on, *following = body(now[0], *now[2:], *read)
        return now[0] + 1, jnp.reshape(goes_on, ()) != 0, *settled(following, made)

    first = (
        jnp.zeros((), jnp.int32),
        jnp.reshape(jnp.asarray(go), ()) != 0,
        *settled(states, made),
    )
    return lax.while_loop(more, step, first)[2:]
