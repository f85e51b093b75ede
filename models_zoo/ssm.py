"""Mamba-2: blocks of a causal depthwise convolution and a selective state space with one scalar
decay per head.

Per head, with state h [N, P], step dt_t > 0, decay a_t = dt_t A (A < 0):   h_t = exp(a_t) h_{t-1} +
dt_t B_t x_t^T,
y_t = C_t h_t + D x_t.  Written without a loop, in chunks of Q steps, every exponent at most 0:

    within a chunk    y_i += sum_{j <= i} exp(a_{j+1} + .. + a_i) (C_i . B_j) dt_j x_j
                      (`_within`)
    chunk's own state    s = sum_j exp(a_{j+1} + .. + a_Q) B_j dt_j x_j^T
                         (`_states`)
    state on entry    e_z = sum_{k < z} exp(sum of the a of the chunks between) s_k
                      (`_entering`)
    across chunks     y_i += exp(a_1 + .. + a_i) C_i e_z
                      (`_across`)

The sums of a are CumSum; differences are masked before Exp. B and C are shared by all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from models_zoo.builder import Net, Scope
from models_zoo.layers import MASKED, embedding, language_head, linear, positions, rms_norm, silu
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class SsmConfig:
    """inner width = 2 hidden, in heads of head_dim; state: N; taps: of the convolution; chunk:
    Q."""

    layers: int
    hidden: int
    vocab: int
    seq: int
    state: int = 128
    head_dim: int = 64
    chunk: int = 256
    taps: int = 4
    epsilon: float = 1e-5
    decomposed: bool = False
    tied: bool = True

    @property
    def inner(self) -> int:
        """Width inside a block."""
        return 2 * self.hidden

    @property
    def heads(self) -> int:
        """Heads of a block."""
        return self.inner // self.head_dim

    @property
    def chunks(self) -> int:
        """Chunks of a sequence."""
        return self.seq // self.steps

    @property
    def steps(self) -> int:
        """Steps of a chunk: `chunk`, or the whole of a shorter sequence."""
        return min(self.chunk, self.seq)


def build(c: SsmConfig, net: Net) -> None:
    """input_ids [batch, seq] -> logits [batch, seq, vocab]."""
    require(
        c.inner % c.head_dim == 0,
        f"{net.name}: 2*hidden={c.inner} is not a multiple of head_dim={c.head_dim}",
    )
    require(c.seq % c.steps == 0, f"{net.name}: seq={c.seq} is not a multiple of chunk={c.chunk}")
    s = net.root.at("backbone")
    x, table = embedding(
        s.at("embeddings"), net.input("input_ids", [net.batch, c.seq], "int64"), c.vocab, c.hidden
    )
    seen, before = _masks(s.at("mask"), c)
    for i in range(c.layers):
        layer = s.at(f"layers.{i}")
        h = rms_norm(layer.at("norm"), x, c.hidden, epsilon=c.epsilon, decomposed=c.decomposed)
        x = layer.op("Add", x, _mixer(layer.at("mixer"), h, c, seen, before))
    x = rms_norm(s.at("norm_f"), x, c.hidden, epsilon=c.epsilon, decomposed=c.decomposed)
    language_head(net.root.at("lm_head"), x, c.hidden, c.vocab, table if c.tied else "")
    net.output("logits", [net.batch, c.seq, c.vocab])


def _masks(s: Scope, c: SsmConfig) -> tuple[str, str]:
    """bool [Q, Q]: column <= row; bool [chunks, chunks]: column < row."""
    pairs = [
        (s.op("Unsqueeze", index, s.ints(0)), s.op("Unsqueeze", index, s.ints(1)))
        for index in (positions(s, n) for n in (c.steps, c.chunks))
    ]
    return s.op("LessOrEqual", *pairs[0]), s.op("Less", *pairs[1])


def _mixer(s: Scope, x: str, c: SsmConfig, seen: str, before: str) -> str:
    """One block, [B, S, hidden] -> [B, S, hidden]."""
    mixed = c.inner + 2 * c.state
    packed = linear(s.at("in_proj"), x, c.hidden, c.inner + mixed + c.heads, bias=False)
    gate, xbc, step = s.ops(3, "Split", packed, s.ints(c.inner, mixed, c.heads), axis=-1)
    u, b, k = s.ops(
        3,
        "Split",
        _convolve(s.at("conv1d"), xbc, mixed, c),
        s.ints(c.inner, c.state, c.state),
        axis=-1,
    )
    step = s.op("Softplus", s.op("Add", step, s.weight("dt_bias", c.heads, std=0.5)))  # [B, S, H]
    a = s.op("Mul", step, s.op("Neg", s.op("Exp", s.weight("A_log", c.heads, std=0.5))))
    heads = s.op("Reshape", u, s.ints(0, c.seq, c.heads, c.head_dim))
    y = _scan(
        s.at("scan"),
        s.op("Mul", heads, s.op("Unsqueeze", step, s.ints(3))),
        a,
        b,
        k,
        c,
        seen,
        before,
    )
    skip = s.op(
        "Mul", heads, s.op("Unsqueeze", s.weight("D", c.heads, std=0.1, mean=1.0), s.ints(1))
    )
    y = s.op("Reshape", s.op("Add", y, skip), s.ints(0, c.seq, c.inner))
    y = rms_norm(
        s.at("norm"),
        s.op("Mul", y, silu(s, gate)),
        c.inner,
        epsilon=c.epsilon,
        decomposed=c.decomposed,
    )
    return linear(s.at("out_proj"), y, c.inner, c.hidden, bias=False)


def _convolve(s: Scope, x: str, channels: int, c: SsmConfig) -> str:
    """silu of a depthwise convolution over this and earlier steps, [B, S, channels]."""
    w, bias = (
        s.weight("weight", channels, 1, c.taps, std=c.taps**-0.5),
        s.weight("bias", channels, std=0.1),
    )
    y = s.op(
        "Conv",
        s.op("Transpose", x, perm=[0, 2, 1]),
        w,
        bias,
        kernel_shape=[c.taps],
        pads=[c.taps - 1, 0],
        group=channels,
    )
    return silu(s, s.op("Transpose", y, perm=[0, 2, 1]))


def _scan(s: Scope, x: str, a: str, b: str, k: str, c: SsmConfig, seen: str, before: str) -> str:
    """x [B, S, H, P] (times dt), a [B, S, H], b and k (C of the text) [B, S, N] -> y [B, S, H,
    P]."""
    z, q = c.chunks, c.steps
    x = s.op(
        "Transpose", s.op("Reshape", x, s.ints(0, z, q, c.heads, c.head_dim)), perm=[0, 3, 1, 2, 4]
    )  # [B, H, z, Q, P]
    a = s.op(
        "Transpose", s.op("Reshape", a, s.ints(0, z, q, c.heads)), perm=[0, 3, 1, 2]
    )  # [B, H, z, Q]
    b, k = (s.op("Reshape", t, s.ints(0, 1, z, q, c.state)) for t in (b, k))  # [B, 1, z, Q, N]
    total = s.op("CumSum", a, s.i64(3))
    whole = s.op("Slice", total, s.ints(q - 1), s.ints(q), s.ints(3))  # [B, H, z, 1]
    b = s.op("Transpose", b, perm=[0, 1, 2, 4, 3])
    entering = _entering(s, _states(s, x, total, whole, b), whole, c, before)
    y = s.op("Add", _within(s, x, total, b, k, seen), _across(s, total, k, entering))
    return s.op(
        "Reshape", s.op("Transpose", y, perm=[0, 2, 3, 1, 4]), s.ints(0, c.seq, c.heads, c.head_dim)
    )


def _decay(s: Scope, row: str, column: str, mask: str) -> str:
    """exp(row_i - column_j) where the mask allows, else 0; row, column [.., n] -> [.., n, n]."""
    difference = s.op(
        "Sub", s.op("Unsqueeze", row, s.ints(-1)), s.op("Unsqueeze", column, s.ints(-2))
    )
    return s.op("Exp", s.op("Where", mask, difference, s.f32(MASKED)))


def _within(s: Scope, x: str, total: str, b: str, k: str, seen: str) -> str:
    return s.op("MatMul", s.op("Mul", s.op("MatMul", k, b), _decay(s, total, total, seen)), x)


def _states(s: Scope, x: str, total: str, whole: str, b: str) -> str:
    """[B, H, z, N, P]."""
    left = s.op("Exp", s.op("Sub", whole, total))
    return s.op("MatMul", b, s.op("Mul", x, s.op("Unsqueeze", left, s.ints(4))))


def _entering(s: Scope, states: str, whole: str, c: SsmConfig, before: str) -> str:
    """[B, H, z, N, P]: what each chunk starts from."""
    chunk = s.op("Squeeze", whole, s.ints(3))  # [B, H, z]
    upto, until = s.op("CumSum", chunk, s.i64(2)), s.op("CumSum", chunk, s.i64(2), exclusive=1)
    flat = s.op("Reshape", states, s.ints(0, c.heads, c.chunks, c.state * c.head_dim))
    entering = s.op("MatMul", _decay(s, until, upto, before), flat)
    return s.op("Reshape", entering, s.ints(0, c.heads, c.chunks, c.state, c.head_dim))


def _across(s: Scope, total: str, k: str, entering: str) -> str:
    return s.op(
        "Mul", s.op("MatMul", k, entering), s.op("Unsqueeze", s.op("Exp", total), s.ints(4))
    )


FAMILY = Family(
    "ssm",
    {
        "ssm-tiny": Preset(
            SsmConfig(2, 32, 512, 24, state=8, head_dim=16, chunk=8),
            "state-space model for tests",
            batch=4,
        ),
        "mamba2-130m": Preset(SsmConfig(24, 768, 50288, 2048), "Mamba-2"),
        "mamba2-2.7b": Preset(SsmConfig(64, 2560, 50288, 2048), "Mamba-2"),
    },
    build,
)
