"""Attention to a cache of latents, and products of heads with their columns of a matrix."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.kernels.kernels import of_old_and_new, query_key_products


# Many parameters: the operands and attributes of attention, and the axes of the cache.
def cached_latent_attention(
    q, rotated, latent, key, past_latent, past_key, mask, scale, axes, cap=0.0
):
    """Attention of new tokens, q [B, H, S, R], rotated [B, H, S, P], to a cache of latents [B, 1,
    T, R] and keys that rotate [B, 1, T, P], which are the same for all heads, and, causally, to
    each other. mask: of the cache's keys. axes: mesh axes over which the cache is cut along T. A
    cache in eight bits is read as such, and multiplied in the type of the new tokens.
    """
    past_latent, past_key = past_latent.astype(latent.dtype), past_key.astype(key.dtype)
    tokens = jnp.arange(q.shape[2])
    old = latent_scores(q, rotated, past_latent, past_key, mask, scale, cap)
    new = latent_scores(q, rotated, latent, key, tokens[:, None] >= tokens, scale, cap)
    return of_old_and_new(old, new, past_latent, latent, axes)[:, 0].astype(latent.dtype)


def latent_scores(q, rotated, latent, key, mask, scale, cap):
    """Masked scores [B, 1, H, S, T] in float32."""
    scores = query_key_products(q[:, None], latent) + query_key_products(rotated[:, None], key)
    scores = scores * scale
    if cap:
        scores = cap * jnp.tanh(scores / cap)
    if mask is None:
        return scores
    mask = mask.reshape(-1, 1, 1, *mask.shape[-2:])
    return jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask


def head_product(x, w, size, columns, back, transposed):
    """x [B, H, S, N] by a head's columns of w [R, H * size], or [H * size, R] where `transposed`:
    [B, H, S, R]; the other way, [B, H, S, R] to [B, H, S, N], where `back`. columns: the first of
    each head's, and the one behind the last."""
    of_heads = slice(*columns)
    if transposed:
        w, order = w.reshape(-1, size, w.shape[1])[:, of_heads], "hnr"
    else:
        w, order = w.reshape(w.shape[0], -1, size)[:, :, of_heads], "rhn"
    ends = "rn" if back else "nr"
    return jnp.einsum(f"bhs{ends[0]},{order}->bhs{ends[1]}", x, w)
