"""Routed experts with a number of places: an expert takes `places` rows of each group of tokens,
first choices first, and what is beyond is dropped."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from planner.emit.runtime.collectives.exchange import alike


def experts_with_places(x, index, share, stacks, pieces, joint, sizes, how):
    """x [.., H], index and share [.., K] -> [.., H]: sum over the choices j that found a place of
    share[j] * expert[index[j]](x).

    pieces: (axis, size) of the mesh axes that cut the experts, major first; along those of `joint`
    tokens are cut too, and rows travel. sizes: (tokens of a group, places of an expert for each).
    The backward pass sends the rows again and makes the hidden activations again.
    """
    x, share, stacks = alike((x, share.astype(x.dtype), stacks))
    one = jax.checkpoint(functools.partial(placed_results, pieces, joint, sizes, how))
    return one(x.reshape(-1, x.shape[-1]), index, share, stacks).reshape(x.shape)


def placed_results(pieces, joint, sizes, how, x, index, share, stacks):
    """Results of the tokens x [T, H]. Places lie as [device, expert, group and place]."""
    (group, places), (mix, into, out_of), count = sizes, how, stacks[1].shape[0]
    devices = lax.axis_size(joint) if joint else 1
    real, token, choice = queues(
        own_experts(index.reshape(-1, group, index.shape[-1]), pieces, joint, count),
        devices * count,
        places,
    )

    def there(v):
        """What other devices' experts are sent, from their places to ours, and back."""
        v = v.reshape(devices, count, -1, *v.shape[3:])
        return lax.all_to_all(v, joint, 0, 0, tiled=True) if joint else v

    rows = there(jnp.where(real[..., None], x[token], 0))
    part = there(jnp.where(real, share.reshape(-1)[choice], 0))[..., None]
    gate, up, down, gate_bias, up_bias, down_bias = stacks

    def product(weight, bias):
        y = jnp.einsum(into, rows, weight)
        return y if bias is None else y + bias[None, :, None]

    h = mix(None if gate is None else product(gate, gate_bias), product(up, up_bias))
    y = jnp.einsum(out_of, h * part, down)
    y = there(y if down_bias is None else y + part * down_bias[None, :, None])
    back = y.reshape(*token.shape, -1)
    return jnp.zeros_like(x).at[token].add(jnp.where(real[..., None], back, 0))


def own_experts(index, pieces, joint, count):
    """Numbers of the experts [device, expert of it] among those that this device sends to; below 0
    for others. index: their numbers in the model; count: experts of a device."""
    piece, ours, to = index // count, index >= 0, index * 0
    for k, (axis, size) in enumerate(pieces):
        digit = piece // int(np.prod([n for _, n in pieces[k + 1 :]], dtype=int)) % size
        if axis in joint:
            after = joint[joint.index(axis) + 1 :]
            to = to + digit * int(np.prod([n for a, n in pieces if a in after], dtype=int))
        else:
            ours = ours & (digit == lax.axis_index(axis))
    return jnp.where(ours, to * count + index % count, -1)


def queues(ids, count, places):
    """ids [G, S, K], below 0 for none -> of each of `count` experts, of each group, of each place:
    whether a row is there, its token among G S and its choice among G S K, all [count, G, places].
    """
    groups, tokens, choices = ids.shape
    asked = jnp.where(ids < 0, count, ids).swapaxes(1, 2).reshape(groups, -1)
    order = jnp.argsort(asked, axis=1)
    first = jax.vmap(lambda v: jnp.searchsorted(v, jnp.arange(count + 1), method="compare_all"))(
        jnp.take_along_axis(asked, order, 1)
    )
    position = first[:, :-1, None] + jnp.arange(places)  # [G, count, places]
    real = position < first[:, 1:, None]
    position = jnp.minimum(position, order.shape[1] - 1).reshape(groups, -1)
    row = jnp.take_along_axis(order, position, 1).reshape(groups, count, places)
    token = row % tokens + tokens * jnp.arange(groups)[:, None, None]
    return tuple(v.swapaxes(0, 1) for v in (real, token, token * choices + row // tokens))
