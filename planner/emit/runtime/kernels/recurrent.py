"""Recurrent layers in all of ONNX's forms, on local pieces: x [S, B, I], w [D, G*H, I], r [D, G*H,
H]; y [S, D, B, H], last states [D, B, H]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def activation(name, x):
    """An activation of a recurrent layer, by its ONNX name in lower case."""
    known = {
        "relu": jax.nn.relu,
        "tanh": jnp.tanh,
        "sigmoid": jax.nn.sigmoid,
        "softsign": jax.nn.soft_sign,
        "softplus": jax.nn.softplus,
        "affine": lambda h: h,
        "hardsigmoid": lambda h: jnp.clip(0.2 * h + 0.5, 0, 1),
        "elu": jax.nn.elu,
        "leakyrelu": lambda h: jax.nn.leaky_relu(h, 0.01),
    }
    return known[name](x)


def recurrence(x, gates, states, lengths, backwards, tick):
    """`tick(states, gates of one step) -> states` along the sequence; y is the first state.

    Where a sample's length is over, its states stay and y is zero. Backwards, each sample runs from
    its own end.
    """
    steps = x.shape[0]
    times = jnp.arange(steps)
    if lengths is not None and backwards:
        order = jnp.where(times[:, None] < lengths, lengths - 1 - times[:, None], times[:, None])
        gates = jnp.take_along_axis(gates, order[..., None], 0)
    elif backwards:
        gates = gates[::-1]

    def step(held, now):
        k, g = now
        new = tick(held, g)
        if lengths is None:
            return new, new[0]
        live = (k < lengths)[:, None]
        return tuple(jnp.where(live, n, h) for n, h in zip(new, held, strict=True)), jnp.where(
            live, new[0], 0
        )

    zero = gates[0, :, :1] * 0
    held, y = lax.scan(step, tuple(s + zero for s in states), (times, gates))
    if lengths is not None and backwards:
        y = jnp.take_along_axis(y, order[..., None], 0)
    elif backwards:
        y = y[::-1]
    return (y, *held)


def directions(run, direction):
    """`run(k, backwards)` for each direction, results stacked: y along dim 1, states along dim
    0."""
    ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    results = [run(k, backwards) for k, backwards in enumerate(ways)]
    y, *states = zip(*results, strict=True)
    return jnp.stack(y, 1), *(jnp.stack(s) for s in states)


def bounded(x, clip):
    """x within [-clip, clip]."""
    return x if clip is None else jnp.clip(x, -clip, clip)


# Many parameters: the operands and attributes of ONNX's RNN.
def rnn(x, w, r, b, lengths, h0, direction, names, clip):
    """Elman network: h' = f(x w + h r + b)."""
    hidden = r.shape[2]

    def run(k, backwards):
        gates = jnp.einsum("sbi,gi->sbg", x, w[k]) + (
            0 if b is None else b[k, :hidden] + b[k, hidden:]
        )
        first = jnp.zeros((x.shape[1], hidden), x.dtype) if h0 is None else h0[k]
        return recurrence(
            x,
            gates,
            (first,),
            lengths,
            backwards,
            lambda held, g: (activation(names[k], bounded(g + held[0] @ r[k].T, clip)),),
        )

    return directions(run, direction)


# Many parameters: the operands and attributes of ONNX's GRU.
def gru(x, w, r, b, lengths, h0, direction, names, clip, reset_after):
    """Gated recurrent unit, gates z, r, h: h' = (1 - z) n + z h; the reset gate acts before or
    after the recurrent product."""
    hidden = r.shape[2]

    def run(k, backwards):
        f, g = names[2 * k : 2 * k + 2]
        own, back = (
            (0, jnp.zeros(3 * hidden, x.dtype))
            if b is None
            else (b[k, : 3 * hidden], b[k, 3 * hidden :])
        )
        gates = jnp.einsum("sbi,gi->sbg", x, w[k]) + own
        first = jnp.zeros((x.shape[1], hidden), x.dtype) if h0 is None else h0[k]
        both, last = r[k, : 2 * hidden], r[k, 2 * hidden :]

        def tick(held, t):
            (h,) = held
            z, reset = (
                activation(f, bounded(v, clip))
                for v in jnp.split(t[:, : 2 * hidden] + h @ both.T + back[: 2 * hidden], 2, -1)
            )
            old = (
                reset * (h @ last.T + back[2 * hidden :])
                if reset_after
                else (reset * h) @ last.T + back[2 * hidden :]
            )
            n = activation(g, bounded(t[:, 2 * hidden :] + old, clip))
            return ((1 - z) * n + z * h,)

        return recurrence(x, gates, (first,), lengths, backwards, tick)

    return directions(run, direction)


# Many parameters: the operands and attributes of ONNX's LSTM.
def lstm_full(x, w, r, b, lengths, h0, c0, p, direction, names, clip):
    """LSTM (gates i, o, f, c) with sequence lengths, peepholes p [D, 3H] (i, o, f), other
    activations or a bound."""
    hidden = r.shape[2]

    def run(k, backwards):
        f, g, h_ = names[3 * k : 3 * k + 3]
        gates = jnp.einsum("sbi,gi->sbg", x, w[k]) + (
            0 if b is None else b[k, : 4 * hidden] + b[k, 4 * hidden :]
        )
        zero = jnp.zeros((x.shape[1], hidden), x.dtype)
        pi, po, pf = jnp.split(jnp.zeros(3 * hidden, x.dtype) if p is None else p[k], 3)

        def tick(held, t):
            h, c = held
            i, o, forget, n = jnp.split(t + h @ r[k].T, 4, -1)
            new = activation(f, bounded(forget + pf * c, clip)) * c + activation(
                f, bounded(i + pi * c, clip)
            ) * activation(g, bounded(n, clip))
            return activation(f, bounded(o + po * new, clip)) * activation(h_, new), new

        return recurrence(
            x,
            gates,
            (zero if h0 is None else h0[k], zero if c0 is None else c0[k]),
            lengths,
            backwards,
            tick,
        )

    return directions(run, direction)
