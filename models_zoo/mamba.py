"""Mamba-2's mixer: a causal depthwise convolution and a selective state space with one scalar decay
per head.

Per head, with state h [N, P], step dt_t > 0, decay a_t = dt_t A (A < 0):   h_t = exp(a_t) h_{t-1} +
dt_t B_t x_t^T,
y_t = C_t h_t + D x_t.  This is ONNX's LinearAttention (opset 27) with C for queries, B for keys and
dt x for values. decomposed=1 spreads it out, without a loop, in chunks of Q steps, every exponent
at most 0:

    within a chunk    y_i += sum_{j <= i} exp(a_{j+1} + .. + a_i) (C_i . B_j) dt_j x_j
                      (`_within`)
    chunk's own state    s = sum_j exp(a_{j+1} + .. + a_Q) B_j dt_j x_j^T
                         (`_states`)
    state on entry    e_z = sum_{k < z} exp(sum of the a of the chunks between) s_k
                      (`_entering`)
    across chunks     y_i += exp(a_1 + .. + a_i) C_i e_z
                      (`_across`)

The sums of a are CumSum; differences are masked before Exp. The heads of a group share B and C.

What checkpoints hold as one in_proj and one conv1d is written in its parts (z, x, b, c, dt): each
is cut by heads, or not, on its own, as launchers with tensor parallelism lay it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from models_zoo.builder import Net, Scope
from models_zoo.cache import Memory, state_name
from models_zoo.layers import MASKED, linear, positions, rms_norm, silu, unit_rms
from models_zoo.spec import require

PARTS = ("z", "x", "b", "c", "dt")
"""Of in_proj, in the order of a checkpoint's rows; conv1d has the middle three."""


@dataclass(frozen=True)
class Mamba2:
    """heads of head_dim each, their states N = `state`, groups of heads with B and C of their own;
    taps of the convolution; chunk: Q, or the whole of a shorter sequence; of the operator a hint.

    norm: of the result, behind its product with the gate, before it, or none. step_least: no step
    is shorter. scales multiply what goes in, the five parts of in_proj and what comes out. cached:
    states of earlier tokens are inputs (models_zoo.cache), and sequences of any length.
    """

    hidden: int
    seq: int
    heads: int
    head_dim: int = 64
    state: int = 128
    groups: int = 1
    taps: int = 4
    chunk: int = 256
    epsilon: float = 1e-5
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    norm: Literal["after", "before", "none"] = "after"
    step_least: float = 0.0
    scales: tuple[float, ...] = (1.0,) * 7
    decomposed: bool = False
    cached: bool = False

    @property
    def inner(self) -> int:
        """Width inside."""
        return self.heads * self.head_dim

    @property
    def chunks(self) -> int:
        """Chunks of a sequence."""
        return self.seq // self.steps

    @property
    def steps(self) -> int:
        """Steps of a chunk."""
        return self.chunk if self.cached else min(self.chunk, self.seq)

    @property
    def rows(self) -> int:
        """Tokens of a sequence as reshapes spell them."""
        return -1 if self.cached else self.seq

    @property
    def lead(self) -> tuple[int, ...]:
        """Dims of heads: groups, and heads of a group."""
        return (self.heads,) if self.groups == 1 else (self.groups, self.heads // self.groups)

    @property
    def shared(self) -> tuple[int, ...]:
        """Dims of groups of B and C."""
        return (1,) if self.groups == 1 else (self.groups, 1)

    @property
    def widths(self) -> dict[str, int]:
        """Of the parts of in_proj."""
        width = self.groups * self.state
        return dict(zip(PARTS, (self.inner, self.inner, width, width, self.heads), strict=True))

    def states(self, layer: int) -> dict[str, tuple[int, ...]]:
        """What a layer keeps of earlier tokens (`Cache.states`)."""
        kept: dict[str, tuple[int, ...]] = {
            state_name("conv", layer, n): (self.widths[n], self.taps - 1)
            for n in PARTS[1:4]
            if self.taps > 1
        }
        return kept | {state_name("ssm", layer): (self.heads, self.state, self.head_dim)}


@dataclass(frozen=True)
class Masks:
    """bool [Q, Q]: column <= row; bool [chunks, chunks]: column < row."""

    seen: str
    before: str


def masks(s: Scope, c: Mamba2) -> Masks | None:
    """What all layers share, where the state space is spread out."""
    if not c.decomposed:
        return None
    pairs = [
        (s.op("Unsqueeze", index, s.ints(0)), s.op("Unsqueeze", index, s.ints(1)))
        for index in (positions(s, n) for n in (c.steps, c.chunks))
    ]
    return Masks(s.op("LessOrEqual", *pairs[0]), s.op("Less", *pairs[1]))


def check(c: Mamba2, net: Net) -> None:
    """Raises PlanError P073 for sizes that do not go together."""
    require(
        not c.decomposed or c.seq % c.steps == 0,
        f"{net.name}: seq={c.seq} is not a multiple of chunk={c.chunk}",
        f"a seq of up to {c.chunk}, or a multiple of it",
    )
    require(
        not (c.decomposed and c.cached),
        f"{net.name}: a state is kept by the operator, not by its decomposed form",
        "leave out cache, or decomposed",
    )
    require(
        c.heads % c.groups == 0,
        f"{net.name}: {c.heads} heads of the state space are not a multiple of {c.groups} groups",
    )


def mixer(s: Scope, x: str, c: Mamba2, own: Masks | None, memory: Memory | None = None) -> str:
    """[B, S, hidden] -> [B, S, hidden]; own: of `masks`; memory: where c.cached."""
    scale = dict(zip(("in", *PARTS, "out"), c.scales, strict=True))
    x = scaled(s, x, scale["in"])
    part = {
        n: scaled(s, linear(s.at(f"in_proj.{n}"), x, c.hidden, width, bias=c.in_bias), scale[n])
        for n, width in c.widths.items()
    }
    u, b, k = (
        convolve(
            s.at(f"conv1d.{n}"),
            part[n],
            (c.widths[n], c.taps),
            bias=c.conv_bias,
            act=True,
            memory=memory,
            part=n,
        )
        for n in PARTS[1:4]
    )
    step = s.op("Softplus", s.op("Add", part["dt"], s.weight("dt_bias", c.heads, std=0.5)))
    if c.step_least:
        step = s.op("Clip", step, s.f32(c.step_least))
    step = memory.only_real(s, step) if memory else step
    a = s.op("Mul", step, s.op("Neg", s.op("Exp", s.weight("A_log", c.heads, std=0.5))))
    heads = s.op("Reshape", u, s.ints(0, c.rows, c.heads, c.head_dim))
    values = s.op("Mul", heads, s.op("Unsqueeze", step, s.ints(3)))
    ends = memory.ends("ssm") if memory else ("", "")
    y = scan(s.at("scan"), values, a, (b, k), c, own, ends)
    d = s.op("Unsqueeze", s.weight("D", c.heads, std=0.1, mean=1.0), s.ints(1))
    y = s.op("Reshape", s.op("Add", y, s.op("Mul", heads, d)), s.ints(0, c.rows, c.inner))
    gate = silu(s, part["z"])
    y = y if c.norm == "before" else s.op("Mul", y, gate)
    y = y if c.norm == "none" else _norm(s.at("norm"), y, c)
    y = s.op("Mul", y, gate) if c.norm == "before" else y
    y = linear(s.at("out_proj"), y, c.inner, c.hidden, bias=c.out_bias)
    return scaled(s, y, scale["out"])


def scaled(s: Scope, x: str, scale: float) -> str:
    """x times a constant."""
    return x if scale == 1.0 else s.op("Mul", x, s.f32(scale))


def _norm(s: Scope, y: str, c: Mamba2) -> str:
    """RMSNorm of each group's features [B, S, inner]."""
    if c.groups == 1:
        return rms_norm(s, y, c.inner, epsilon=c.epsilon, decomposed=c.decomposed)
    grouped = s.op("Reshape", y, s.ints(0, c.rows, c.groups, c.inner // c.groups))
    y = s.op("Reshape", unit_rms(s, grouped, epsilon=c.epsilon), s.ints(0, c.rows, c.inner))
    return s.op("Mul", y, s.weight("weight", c.inner, std=0.1, mean=1.0))


# Many parameters: the variants of one layer, named at the call.
def convolve(
    s: Scope,
    x: str,
    sizes: tuple[int, int],
    *,
    bias: bool,
    act: bool,
    memory: Memory | None = None,
    part: str = "",
) -> str:
    """A depthwise convolution over this and earlier steps of x [B, S, channels]; its silu where
    `act`. sizes: channels, taps. memory: keeps the last rows of x, as those of a part."""
    channels, taps = sizes
    x = memory.only_real(s, x) if memory else x
    rows, before = s.op("Transpose", x, perm=[0, 2, 1]), taps - 1
    if memory and before:
        past, present = memory.ends("conv", part)
        rows, before = s.op("Concat", past, rows, axis=2), 0
        last = np.iinfo(np.int64).max
        s.op("Slice", rows, s.ints(1 - taps), s.ints(last), s.ints(2), out=present)
    operands = [rows]
    operands += [s.weight("weight", channels, 1, taps, std=taps**-0.5)]
    operands += [s.weight("bias", channels, std=0.1)] if bias else []
    y = s.op("Conv", *operands, kernel_shape=[taps], pads=[before, 0], group=channels)
    y = s.op("Transpose", y, perm=[0, 2, 1])
    return silu(s, y) if act else y


# Many parameters: the operands of the recurrence, and its sizes.
def scan(
    s: Scope,
    x: str,
    a: str,
    bk: tuple[str, str],
    c: Mamba2,
    own: Masks | None,
    ends: tuple[str, str] = ("", ""),
) -> str:
    """x [B, S, H, P] (times dt), a [B, S, H], B and C [B, S, groups N] -> y [B, S, H, P]; own: of
    `masks`; ends: names of the state before and behind the sequence, where it is kept."""
    if own:
        return _chunked(s, x, a, bk, c, own)
    keys, queries = (_repeated(s, t, c) for t in bk)
    past, present = ends
    y, _ = s.ops(
        2,
        "LinearAttention",
        queries,
        keys,
        s.op("Reshape", x, s.ints(0, c.rows, c.inner)),
        past,
        a,
        last=present,
        q_num_heads=c.heads,
        kv_num_heads=c.heads,
        update_rule="gated",
        scale=1.0,
        chunk_size=c.steps,
    )
    return s.op("Reshape", y, s.ints(0, c.rows, c.heads, c.head_dim))


def _repeated(s: Scope, x: str, c: Mamba2) -> str:
    """[B, S, groups N] -> [B, S, H N]: a group's for each of its heads."""
    if c.groups == c.heads:
        return x
    x = s.op("Reshape", x, s.ints(0, c.rows, c.groups, 1, c.state))
    x = s.op("Expand", x, s.ints(1, 1, 1, c.heads // c.groups, 1))
    return s.op("Reshape", x, s.ints(0, c.rows, c.heads * c.state))


def _chunked(s: Scope, x: str, a: str, bk: tuple[str, str], c: Mamba2, own: Masks) -> str:
    """As `scan`."""
    z, q = c.chunks, c.steps
    x = _to_chunks(s, x, (*c.lead, c.head_dim), c)  # [B, heads, z, Q, P]
    a = _to_chunks(s, a, c.lead, c)  # [B, heads, z, Q]
    b, k = (_to_chunks(s, t, (*c.shared, c.state), c) for t in bk)  # [B, groups, 1, z, Q, N]
    n = 1 + len(c.lead)
    total = s.op("CumSum", a, s.i64(n + 1))
    whole = s.op("Slice", total, s.ints(q - 1), s.ints(q), s.ints(n + 1))  # [B, heads, z, 1]
    b = s.op("Transpose", b, perm=[*range(n + 1), n + 2, n + 1])
    entering = _entering(s, _states(s, x, total, whole, b), whole, c, own.before)
    y = s.op("Add", _within(s, x, total, b, k, own.seen), _across(s, total, k, entering))
    y = s.op("Transpose", y, perm=[0, n, n + 1, *range(1, n), n + 2])
    return s.op("Reshape", y, s.ints(0, z * q, c.heads, c.head_dim))


def _to_chunks(s: Scope, x: str, dims: tuple[int, ...], c: Mamba2) -> str:
    """[B, S, ..] -> [B, dims of heads, z, Q, features]."""
    split = s.op("Reshape", x, s.ints(0, c.chunks, c.steps, *dims))
    n = len(c.lead)
    return s.op("Transpose", split, perm=[0, *range(3, 3 + n), 1, 2, *range(3 + n, 3 + len(dims))])


def _decay(s: Scope, row: str, column: str, mask: str) -> str:
    """exp(row_i - column_j) where the mask allows, else 0; row, column [.., n] -> [.., n, n]."""
    difference = s.op(
        "Sub", s.op("Unsqueeze", row, s.ints(-1)), s.op("Unsqueeze", column, s.ints(-2))
    )
    return s.op("Exp", s.op("Where", mask, difference, s.f32(MASKED)))


def _within(s: Scope, x: str, total: str, b: str, k: str, seen: str) -> str:
    return s.op("MatMul", s.op("Mul", s.op("MatMul", k, b), _decay(s, total, total, seen)), x)


def _states(s: Scope, x: str, total: str, whole: str, b: str) -> str:
    """[B, heads, z, N, P]."""
    decay = s.op("Exp", s.op("Sub", whole, total))
    return s.op("MatMul", b, s.op("Mul", x, s.op("Unsqueeze", decay, s.ints(-1))))


def _entering(s: Scope, states: str, whole: str, c: Mamba2, before: str) -> str:
    """[B, heads, z, N, P]: what each chunk starts from."""
    chunk, along = s.op("Squeeze", whole, s.ints(-1)), s.i64(1 + len(c.lead))  # [B, heads, z]
    upto, until = s.op("CumSum", chunk, along), s.op("CumSum", chunk, along, exclusive=1)
    flat = s.op("Reshape", states, s.ints(0, *c.lead, c.chunks, c.state * c.head_dim))
    entering = s.op("MatMul", _decay(s, until, upto, before), flat)
    return s.op("Reshape", entering, s.ints(0, *c.lead, c.chunks, c.state, c.head_dim))


def _across(s: Scope, total: str, k: str, entering: str) -> str:
    return s.op(
        "Mul", s.op("MatMul", k, entering), s.op("Unsqueeze", s.op("Exp", total), s.ints(-1))
    )
