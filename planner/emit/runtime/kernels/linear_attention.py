"""Attention to a state that decays and is corrected along the sequence (the gated delta rule)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


# Many parameters: the operands and attributes of the operator.
def linear_attention(q, k, v, decay, beta, scale, chunk, past=None, kept=False):
    """Per head, with state s [N, P]: s = exp(decay) s, then s += k (beta (v - k s)), y = scale q s
    (without beta s += k v), and the last states; q, k [B, T, G, N], v [B, T, H, P], decay, beta [B,
    T, H], where H / G heads in a row share the queries and keys of a group. past: the states before
    the first step [B, H, N, P], else zeros. kept: states are [B, H, P, N], and the last ones
    float32, else as v.

    A step alone is the recurrence as it is written. In chunks, all at once: what the steps of a
    chunk correct of one another is a product with the inverse of a triangular matrix. In a loop
    states pass from chunk to chunk, and nothing else. The backward pass makes all of it again.
    """
    if past is not None and q.shape[1] == 1:
        return state_step(q, k, v, decay, beta, scale, past, kept)

    @jax.checkpoint
    def run(q, k, v, decay, beta, past):
        steps, groups = min(chunk, q.shape[1]), q.shape[2]
        short, each = -q.shape[1] % steps, v.shape[2] // groups

        def parts(x, *heads):
            """[B, T, heads, ..] -> [chunks, B, *heads, steps, ..]."""
            x = jnp.pad(x, ((0, 0), (0, short), *[(0, 0)] * (x.ndim - 2)))
            x = x.reshape(x.shape[0], -1, steps, *heads, *x.shape[3:])
            return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))

        def times(text, a, b):
            """In the type of v, as are the gradients, whose products would else be slow ones."""
            return jnp.einsum(text, a.astype(v.dtype), b.astype(v.dtype))

        queries, keys, new = parts(q * scale, groups), parts(k, groups), parts(v, groups, each)
        total = jnp.cumsum(parts(decay, groups, each).astype(jnp.float32), -1)
        decayed = remaining(total)
        since, until = jnp.exp(total)[..., None], jnp.exp(total[..., -1:] - total)[..., None]
        turned = None
        if beta is None:
            added = times("zbgdn,zbgrdp->zbgrnp", keys, new * until)
        else:
            share = parts(beta, groups, each).astype(jnp.float32)[..., None]
            new, state_keys, turned = corrected(times, keys, new, share, decayed, (since, until))
            added = times("zbgrdn,zbgrdp->zbgrnp", keys[:, :, :, None] * until, new)

        def step(state, chunk):
            added, turned, whole = chunk
            added = added if turned is None else added - times("bgrnm,bgrmp->bgrnp", turned, state)
            return state * whole + added, state.astype(v.dtype)

        first = (added[0] * 0).astype(jnp.float32)
        if past is not None:
            first += (past.swapaxes(2, 3) if kept else past).reshape(first.shape)
        state, entering = lax.scan(step, first, (added, turned, since[..., -1:, :]), unroll=4)
        if beta is not None:
            new = new - times("zbgrcn,zbgrnp->zbgrcp", state_keys, entering)
        scores = times("zbgcn,zbgdn->zbgcd", queries, keys)[:, :, :, None] * decayed
        y = times("zbgcn,zbgrnp->zbgrcp", queries, entering) * since
        y = jnp.moveaxis(y + times("zbgrcd,zbgrdp->zbgrcp", scores, new), (0, 4), (1, 2))
        y = y.astype(v.dtype).reshape(y.shape[0], -1, *v.shape[2:])[:, : q.shape[1]]
        state = state.reshape(state.shape[0], -1, *state.shape[3:])
        return y, state.swapaxes(2, 3) if kept else state.astype(v.dtype)

    return run(q, k, v, decay, beta, past)


def corrected(times, keys, new, share, decayed, passing):
    """What the steps of a chunk correct of one another: their values, the keys by which they read
    the state that enters, and what they turn it by. times: a product; passing: what is left of the
    state at each step, and of each step at the last."""
    since, until = passing
    alike = jnp.einsum("zbgcn,zbgdn->zbgcd", keys, keys, preferred_element_type=share.dtype)
    alike = alike[:, :, :, None] * decayed * share
    inverse = unit_inverse(jnp.tril(alike, -1))
    new = times("zbgrcd,zbgrdp->zbgrcp", inverse, new * share)
    each_keys = keys[:, :, :, None]
    state_keys = times("zbgrcd,zbgrdn->zbgrcn", inverse, each_keys * share * since)
    turned = times("zbgrdn,zbgrdm->zbgrnm", each_keys * until, state_keys)
    return new, state_keys, turned


# Many parameters: as of linear_attention.
def state_step(q, k, v, decay, beta, scale, past, kept):
    """`linear_attention` of one step: states are read and written in float32, each element by
    itself, and nothing is multiplied as matrices. Sums run over their last dim. States that are
    kept lie in the order of their dims: compilers would turn all of them around before a loop over
    steps, and keep both."""
    b, _, groups, n = q.shape
    lying = lambda x: with_layout_constraint(x, Layout((0, 1, 2, 3)))  # noqa: E731
    state = lying(past) if kept else past.swapaxes(2, 3)
    state = state.astype(jnp.float32).reshape(b, groups, -1, v.shape[3], n)
    q, k = (x.astype(jnp.float32)[:, 0, :, None, None, :] for x in (q, k))
    decay, new = (
        x.astype(jnp.float32)[:, 0].reshape(*state.shape[:3], *x.shape[3:]) for x in (decay, v)
    )
    state = state * jnp.exp(decay)[..., None, None]
    if beta is None:
        state = state + k * new[..., None]
        y = jnp.sum(q * state, -1)
    else:
        share = beta.astype(jnp.float32)[:, 0].reshape(*state.shape[:3], 1)
        # Both sums of the old states in one kernel of their own: one that also wrote new ones could
        # not write where it reads, and compilers would copy the old ones.
        zero = jnp.float32(0)
        both = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
        sums = lax.reduce((k * state, q * state), (zero, zero), both, (4,))
        of_keys, of_queries = lax.optimization_barrier(sums)
        new = share * (new - of_keys)
        state = state + k * new[..., None]
        y = of_queries + jnp.sum(q * k, -1) * new
    y = (scale * y).astype(v.dtype).reshape(v.shape)
    state = state.reshape(b, -1, v.shape[3], n)
    return y, lying(state) if kept else state.swapaxes(2, 3).astype(v.dtype)


def remaining(total):
    """What is left of step j at step i, exp(total_i - total_j); 0 where i comes before j."""
    steps = jnp.arange(total.shape[-1])
    between = total[..., :, None] - total[..., None, :]
    return jnp.exp(jnp.where(steps[:, None] >= steps, between, -jnp.inf))


def unit_inverse(lower):
    """(1 + lower)^-1 of strictly lower triangular matrices [.., n, n], by blocks of 1, 2, 4 ..
    rows: of two blocks that are done, the corner between them is - (second) corner (first)."""
    n = lower.shape[-1]
    index, rows = jnp.arange(n), 1
    done = jnp.broadcast_to(jnp.eye(n, dtype=lower.dtype), lower.shape)
    while rows < n:
        row, column = index[:, None] // rows, index // rows
        corner = jnp.where((row % 2 == 1) & (column == row - 1), lower, 0)
        done = done - (corner if rows == 1 else done @ (corner @ done))
        rows *= 2
    return done
