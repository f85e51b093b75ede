"""Attention to a state that decays and is corrected along the sequence (the gated delta rule)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


# Many parameters: the operands and attributes of the operator.
def linear_attention(q, k, v, decay, beta, scale, chunk):
    """Per head, with state s [N, P]: s = exp(decay) s, then s += k (beta (v - k s)), y = scale q s
    (without beta s += k v), and the last states; q, k [B, T, G, N], v [B, T, H, P], decay, beta [B,
    T, H], where H / G heads in a row share the queries and keys of a group.

    In chunks, all at once: what the steps of a chunk correct of one another is a product with the
    inverse of a triangular matrix. In a loop states pass from chunk to chunk, and nothing else. The
    backward pass makes all of it again.
    """

    @jax.checkpoint
    def run(q, k, v, decay, beta):
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
        left = remaining(total)
        since, until = jnp.exp(total)[..., None], jnp.exp(total[..., -1:] - total)[..., None]
        turned = None
        if beta is None:
            own = times("zbgdn,zbgrdp->zbgrnp", keys, new * until)
        else:
            share = parts(beta, groups, each).astype(jnp.float32)[..., None]
            alike = jnp.einsum("zbgcn,zbgdn->zbgcd", keys, keys, preferred_element_type=share.dtype)
            alike = alike[:, :, :, None] * left * share
            inverse = unit_inverse(jnp.tril(alike, -1))
            new = times("zbgrcd,zbgrdp->zbgrcp", inverse, new * share)
            each_keys = keys[:, :, :, None]
            state_keys = times("zbgrcd,zbgrdn->zbgrcn", inverse, each_keys * share * since)
            own = times("zbgrdn,zbgrdp->zbgrnp", each_keys * until, new)
            turned = times("zbgrdn,zbgrdm->zbgrnm", each_keys * until, state_keys)

        def step(state, chunk):
            own, turned, whole = chunk
            own = own if turned is None else own - times("bgrnm,bgrmp->bgrnp", turned, state)
            return state * whole + own, state.astype(v.dtype)

        empty = (own[0] * 0).astype(jnp.float32)
        state, entering = lax.scan(step, empty, (own, turned, since[..., -1:, :]), unroll=4)
        if beta is not None:
            new = new - times("zbgrcn,zbgrnp->zbgrcp", state_keys, entering)
        scores = times("zbgcn,zbgdn->zbgcd", queries, keys)[:, :, :, None] * left
        y = times("zbgcn,zbgrnp->zbgrcp", queries, entering) * since
        y = jnp.moveaxis(y + times("zbgrcd,zbgrdp->zbgrcp", scores, new), (0, 4), (1, 2))
        y = y.astype(v.dtype).reshape(y.shape[0], -1, *v.shape[2:])[:, : q.shape[1]]
        return y, state.reshape(state.shape[0], -1, *state.shape[3:]).astype(v.dtype)

    return run(q, k, v, decay, beta)


def remaining(total):
    """What is left of step j at step i, exp(total_i - total_j); 0 where i comes before j."""
    at = jnp.arange(total.shape[-1])
    between = total[..., :, None] - total[..., None, :]
    return jnp.exp(jnp.where(at[:, None] >= at, between, -jnp.inf))


def unit_inverse(lower):
    """(1 + lower)^-1 of strictly lower triangular matrices [.., n, n], by blocks of 1, 2, 4 ..
    rows: of two blocks that are done, the corner between them is - (second) corner (first)."""
    n = lower.shape[-1]
    at, rows = jnp.arange(n), 1
    done = jnp.broadcast_to(jnp.eye(n, dtype=lower.dtype), lower.shape)
    while rows < n:
        row, column = at[:, None] // rows, at // rows
        corner = jnp.where((row % 2 == 1) & (column == row - 1), lower, 0)
        done = done - (corner if rows == 1 else done @ (corner @ done))
        rows *= 2
    return done
