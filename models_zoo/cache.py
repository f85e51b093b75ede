"""Decoders with a cache of keys and values, in the form exporters of transformers write
(text-generation-with-past).

    input_ids, position_ids [batch, sequence_length]           attention_mask [batch,
        total_sequence_length], 1 = a real token
    past_key_values.I.key, .value [batch, kv_heads, past_sequence_length, head_dim]
    logits [batch, sequence_length, vocab]                     present.I.key, .value [batch,
        kv_heads, total_sequence_length, head_dim]

total = past + sequence. An empty past makes it the pass over the prompts, a sequence of one token a
step of generation. Latent attention keeps past_key_values.I.latent, which keys and values of all
heads are made of, and .rotary_key, which all heads share: one head each.

Layers without attention keep states of a constant size, under the names of onnx-community's exports
of such models (Granite 4.0, LFM2, Qwen3.5):

    past_conv.I[.PART], present_conv.I[.PART]  [batch, channels, taps - 1], the last rows that a
        convolution read; a PART where the projection before it is written in parts
    past_ssm.I, past_recurrent.I, present_..   [batch, heads, keys, values], of a state space, of
        the gated delta rule: as ONNX's LinearAttention has them

Those exports keep one row of a convolution more, which nothing reads, and a state space's values
before its keys. Empty states are zeros. A token that is not real changes no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from models_zoo.builder import Net, Scope
from models_zoo.layers import positions_from

SEQUENCE, PAST, TOTAL = "sequence_length", "past_sequence_length", "total_sequence_length"


@dataclass
class Cache:
    """The inputs of a cached decoder and what is derived from them once. layers: those that attend
    to keys; parts: name -> (heads, features) of what each of them keeps; states: name -> shape of
    a sequence's state. allowed: bool [batch, 1, sequence, total], True = attend. Without layers
    that attend there are neither positions nor `allowed`."""

    net: Net
    layers: Sequence[int]
    parts: Mapping[str, tuple[int, int]]
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ids: str = field(init=False)
    position: str = field(init=False, default="")
    allowed: str = field(init=False, default="")
    _key: str = field(init=False)
    _query: str = field(init=False)

    def __post_init__(self) -> None:
        net = self.net
        self.ids = net.input("input_ids", [net.batch, SEQUENCE], "int64")
        mask = net.input("attention_mask", [net.batch, TOTAL], "int64")
        if self.layers:
            self.position = net.input("position_ids", [net.batch, SEQUENCE], "int64")
        for i in self.layers:
            for part, (heads, width) in self.parts.items():
                net.input(f"past_key_values.{i}.{part}", [net.batch, heads, PAST, width])
        for name, shape in self.states.items():
            net.input(f"past_{name}", [net.batch, *shape])
        if self.layers:
            self.allowed = self._mask(net.root.at("mask"), mask)

    def _mask(self, s: Scope, mask: str) -> str:
        """Key t of the total is seen by token p of the sequence where it is real and t <= past +
        p."""
        first = f"past_key_values.{self.layers[0]}.{next(iter(self.parts))}"
        past = s.op("Gather", s.op("Shape", first), s.i64(2), axis=0)
        total = s.op("Gather", s.op("Shape", mask), s.i64(1), axis=0)
        self._key = s.op("Unsqueeze", positions_from(s, s.i64(0), total), s.ints(0))
        self._query = s.op("Unsqueeze", positions_from(s, past, total), s.ints(1))
        causal = s.op("LessOrEqual", self._key, self._query)
        real = s.op("Unsqueeze", s.op("Cast", mask, to=9), s.ints(1, 2))
        return s.op("And", s.op("Unsqueeze", causal, s.ints(0, 1)), real)

    @cached_property
    def real(self) -> str:
        """Which of the new tokens are real, float [batch, sequence, 1]: 1, else 0."""
        s = self.net.root.at("real")
        tokens = s.op("Gather", s.op("Shape", self.ids), s.ints(1), axis=0)
        last = np.iinfo(np.int64).max
        new = s.op("Slice", "attention_mask", s.op("Neg", tokens), s.ints(last), s.ints(1))
        return s.op("Unsqueeze", s.op("Cast", new, to=1), s.ints(2))

    def within(self, window: int) -> str:
        """`allowed`, of the last `window` tokens alone."""
        s = self.net.root.at("mask")
        near = s.op("Greater", self._key, s.op("Sub", self._query, s.i64(window)))
        return s.op("And", self.allowed, s.op("Unsqueeze", near, s.ints(0, 1)))

    def in_chunk(self, chunk: int) -> str:
        """`allowed`, of a token's own chunk of so many alone; counted from the first real token."""
        s = self.net.root.at("mask")
        so_far = s.op("Sub", s.op("CumSum", "attention_mask", s.i64(1)), s.i64(1))
        keys, rows = (s.op("Div", x, s.i64(chunk)) for x in (so_far, self.position))
        rows, keys = (s.op("Unsqueeze", rows, s.ints(1, 3)), s.op("Unsqueeze", keys, s.ints(1, 2)))
        same = s.op("Equal", rows, keys)
        return s.op("And", self.allowed, same)

    def extend(self, s: Scope, k: str, v: str, layer: int) -> tuple[str, str]:
        """What the layer keeps of its two parts so far with the new ones [batch, heads, sequence,
        features] behind them."""
        return tuple(  # type: ignore[return-value]
            s.op(
                "Concat",
                f"past_key_values.{layer}.{part}",
                new,
                out=f"present.{layer}.{part}",
                axis=2,
            )
            for part, new in zip(self.parts, (k, v), strict=True)
        )

    def outputs(self) -> None:
        """Declare what is kept with the new tokens'."""
        for i in self.layers:
            for part, (heads, width) in self.parts.items():
                self.net.output(f"present.{i}.{part}", [self.net.batch, heads, TOTAL, width])
        for name, shape in self.states.items():
            self.net.output(f"present_{name}", [self.net.batch, *shape])


@dataclass(frozen=True)
class Memory:
    """What a layer keeps beside keys and values."""

    cache: Cache
    layer: int

    def ends(self, kind: str, part: str = "") -> tuple[str, str]:
        """Names of a state's input and output. kind: "conv", "ssm" or "recurrent"."""
        name = state_name(kind, self.layer, part)
        assert name in self.cache.states
        return f"past_{name}", f"present_{name}"

    def only_real(self, s: Scope, x: str) -> str:
        """x [batch, sequence, features], zeros for tokens that are not real."""
        return s.op("Mul", x, self.cache.real)


def state_name(kind: str, layer: int, part: str = "") -> str:
    """A key of `Cache.states`."""
    return f"{kind}.{layer}.{part}" if part else f"{kind}.{layer}"


def keys_and_values(heads: int, width: int) -> Mapping[str, tuple[int, int]]:
    """`Cache.parts` of attention to keys and values."""
    return {"key": (heads, width), "value": (heads, width)}
