"""The gated delta rule's mixer (Qwen3-Next, Qwen3.5): a causal depthwise convolution, and attention
to a state that decays and is corrected, as ONNX's LinearAttention of opset 27.

Per head, with state s [N, P]:   s = exp(g_t) s;   s += k_t (beta_t (v_t - k_t s));   y_t = N^-1/2
q_t s, queries and keys of length 1, and y normed and multiplied by silu(z). Heads of values share
those of keys in groups, which are repeated. What checkpoints hold as one projection is written in
its parts, each cut by heads on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from models_zoo.builder import Net, Scope
from models_zoo.cache import Memory, state_name
from models_zoo.layers import linear, rms_norm, silu, unit_rms
from models_zoo.mamba import convolve
from models_zoo.spec import require

LENGTH_EPSILON = 1e-6
"""Added to the square of a query's and a key's length, as in the library's l2norm."""


@dataclass(frozen=True)
class Delta:
    """heads of keys and of values, and their widths; taps of the convolution; chunk: steps that
    kernels take at once, a hint. cached: as of models_zoo.mamba."""

    hidden: int
    seq: int
    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    taps: int = 4
    chunk: int = 64
    epsilon: float = 1e-6
    decomposed: bool = False
    cached: bool = False

    @property
    def rows(self) -> int:
        """Tokens of a sequence as reshapes spell them."""
        return -1 if self.cached else self.seq

    @property
    def keys(self) -> int:
        """Width of all heads of keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all heads of values."""
        return self.value_heads * self.value_dim

    def states(self, layer: int) -> dict[str, tuple[int, ...]]:
        """What a layer keeps of earlier tokens (`Cache.states`)."""
        kept: dict[str, tuple[int, ...]] = {
            state_name("conv", layer, n): (width, self.taps - 1)
            for n, width in _widths(self)
            if self.taps > 1
        }
        shape = (self.value_heads, self.key_dim, self.value_dim)
        return kept | {state_name("recurrent", layer): shape}


def check(c: Delta, net: Net) -> None:
    """Raises PlanError P073 for sizes that do not go together."""
    require(
        c.value_heads % c.key_heads == 0,
        f"{net.name}: {c.value_heads} heads of values are not a multiple of {c.key_heads} of keys",
    )


def mixer(s: Scope, x: str, c: Delta, memory: Memory | None = None) -> str:
    """[B, S, hidden] -> [B, S, hidden]; memory: where c.cached."""
    q, k, v = (_part(s, x, n, width, c, memory) for n, width in _widths(c))
    z, b, a = (
        linear(s.at(f"in_proj_{n}"), x, c.hidden, width, bias=False)
        for n, width in (("z", c.values), ("b", c.value_heads), ("a", c.value_heads))
    )
    q, k = (_to_heads(s.at(n), y, c) for n, y in (("q", q), ("k", k)))
    step = s.op("Softplus", s.op("Add", a, s.weight("dt_bias", c.value_heads, std=0.5)))
    rate = s.op("Neg", s.op("Exp", s.weight("A_log", c.value_heads, std=0.5)))
    share = s.op("Sigmoid", b)
    if memory:  # what is not real neither decays the state nor corrects it
        step, share = (memory.only_real(s, y) for y in (step, share))
    past, present = memory.ends("recurrent") if memory else ("", "")
    y, _ = s.ops(
        2,
        "LinearAttention",
        q,
        k,
        v,
        past,
        s.op("Mul", step, rate),
        share,
        last=present,
        q_num_heads=c.value_heads,
        kv_num_heads=c.value_heads,
        update_rule="gated_delta",
        scale=c.key_dim**-0.5,
        chunk_size=c.chunk,
    )
    heads = s.ints(0, c.rows, c.value_heads, c.value_dim)
    y = s.op("Reshape", y, heads)
    y = rms_norm(s.at("norm"), y, c.value_dim, epsilon=c.epsilon, decomposed=c.decomposed)
    y = s.op("Mul", s.op("Reshape", y, s.ints(0, c.rows, c.values)), silu(s, z))
    return linear(s.at("out_proj"), y, c.values, c.hidden, bias=False)


def _widths(c: Delta) -> tuple[tuple[str, int], ...]:
    return ("q", c.keys), ("k", c.keys), ("v", c.values)


def _part(s: Scope, x: str, name: str, width: int, c: Delta, memory: Memory | None) -> str:
    """Queries, keys or values [B, S, width], behind their convolution."""
    y = linear(s.at(f"in_proj_qkv.{name}"), x, c.hidden, width, bias=False)
    convolution, sizes = s.at(f"conv1d.{name}"), (width, c.taps)
    return convolve(convolution, y, sizes, bias=False, act=True, memory=memory, part=name)


def _to_heads(s: Scope, x: str, c: Delta) -> str:
    """Queries or keys of length 1, repeated for each head of values: [B, S, heads of values *
    key_dim]."""
    x = s.op("Reshape", x, s.ints(0, c.rows, c.key_heads, c.key_dim))
    x = unit_rms(s, x, epsilon=LENGTH_EPSILON / c.key_dim)
    x = s.op("Mul", x, s.f32(c.key_dim**-0.5))
    times = c.value_heads // c.key_heads
    if times > 1:
        x = s.op("Expand", s.op("Unsqueeze", x, s.ints(3)), s.ints(1, 1, 1, times, 1))
    return s.op("Reshape", x, s.ints(0, c.rows, c.value_heads * c.key_dim))
