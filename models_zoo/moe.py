"""Mixtral: a Llama decoder whose feed-forward is E experts, of which a softmax router picks k per token.

ONNX has no operator for sparse dispatch with gradients, so `form` chooses among three honest ways to write one; the
router is trainable in each (its weights multiply the experts' results; the choice itself has no gradient).

    dense     every expert works on every token and the weights of those not chosen are 0: the exact function of the
              model, at E/k times its feed-forward work. The default. x [B,1,S,H] times stacks [E,H,F].
    gathered  each token gathers the weights of its experts: the exact function and exact work, but S*k copies of expert
              weights in memory (as PyTorch's exporter writes it). Only sensible for small models or decoding.
    capacity  tokens are dispatched by one-hot products to C = ceil(k S capacity / E) places per expert and sequence, as
              GShard and Switch do: the work of the model times `capacity` plus the two products; tokens beyond C are
              dropped, so it equals the others only where nothing overflows. What expert parallelism needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from models_zoo import llama
from models_zoo.builder import Net, Scope
from models_zoo.layers import linear, silu
from models_zoo.spec import Family, Preset, require

_OFF_ON = np.array([0.0, 1.0], dtype=np.float32)


@dataclass(frozen=True)
class MoeConfig(llama.LlamaConfig):
    """experts per layer, `top` of them per token; `capacity` is the capacity factor of form=capacity."""

    experts: int = 8
    top: int = 2
    form: Literal["dense", "gathered", "capacity"] = "dense"
    capacity: float = 1.25


def build(c: MoeConfig, net: Net) -> None:
    """input_ids [batch, seq] -> logits [batch, seq, vocab]."""
    require(c.top <= c.experts, f"{net.name}: top={c.top} is more than experts={c.experts}")
    require(not c.mlp_bias, f"{net.name}: the experts have no biases", "leave out mlp_bias")
    forms = {"dense": _dense, "gathered": _gathered, "capacity": _capacity}
    llama.decoder(c, net, lambda s, x: forms[c.form](s.at("block_sparse_moe"), x, c))


def _route(s: Scope, x: str, c: MoeConfig) -> tuple[str, str]:
    """Normalised weights and indices of the chosen experts, each [B, S, k]."""
    share = s.op("Softmax", linear(s.at("gate"), x, c.hidden, c.experts, bias=False), axis=-1)
    value, index = s.ops(2, "TopK", share, s.ints(c.top), axis=-1)
    return s.op("Div", value, s.op("ReduceSum", value, s.ints(-1), keepdims=1)), index


def _one_hot(s: Scope, index: str, depth: int) -> str:
    """[..] -> [.., depth] float; a row of zeros where the index is depth or more."""
    return s.op("OneHot", index, s.i64(depth), s.net.constant(_OFF_ON), axis=-1)


def _stacks(s: Scope, c: MoeConfig) -> tuple[str, str, str]:
    e = s.at("experts")
    gate, up = (e.weight(f"{n}.weight", c.experts, c.hidden, c.ff, std=c.hidden**-0.5) for n in ("gate_proj", "up_proj"))
    return gate, up, e.weight("down_proj.weight", c.experts, c.ff, c.hidden, std=c.ff**-0.5)


def _swiglu(s: Scope, x: str, stacks: tuple[str, str, str]) -> str:
    """x [.., rows, H] through weights [.., H, F] and back."""
    e = s.at("experts")
    gate, up = (e.op("MatMul", x, w) for w in stacks[:2])
    return e.op("MatMul", e.op("Mul", silu(e, gate), up), stacks[2])


def _dense(s: Scope, x: str, c: MoeConfig) -> str:
    value, index = _route(s, x, c)
    chosen = s.op("Mul", _one_hot(s, index, c.experts), s.op("Unsqueeze", value, s.ints(-1)))  # [B, S, k, E]
    share = s.op("Transpose", s.op("ReduceSum", chosen, s.ints(2), keepdims=0), perm=[0, 2, 1])  # [B, E, S]
    y = _swiglu(s, s.op("Unsqueeze", x, s.ints(1)), _stacks(s, c))  # [B, E, S, H]
    return s.op("ReduceSum", s.op("Mul", y, s.op("Unsqueeze", share, s.ints(3))), s.ints(1), keepdims=0)


def _gathered(s: Scope, x: str, c: MoeConfig) -> str:
    value, index = _route(s, x, c)
    gate, up, down = (s.op("Gather", stack, index, axis=0) for stack in _stacks(s, c))  # [B, S, k, ., .]
    y = _swiglu(s, s.op("Unsqueeze", x, s.ints(2, 3)), (gate, up, down))  # [B, S, k, 1, H]
    weighted = s.op("Mul", s.op("Squeeze", y, s.ints(3)), s.op("Unsqueeze", value, s.ints(-1)))
    return s.op("ReduceSum", weighted, s.ints(2), keepdims=0)


def _capacity(s: Scope, x: str, c: MoeConfig) -> str:
    places = math.ceil(c.top * c.seq * c.capacity / c.experts)
    value, index = _route(s, x, c)
    choice = s.op("Transpose", _one_hot(s, index, c.experts), perm=[0, 2, 1, 3])  # [B, k, S, E]: first choices queue first
    queue = s.op("Reshape", choice, s.ints(0, c.top * c.seq, c.experts))
    before = s.op("CumSum", queue, s.i64(1), exclusive=1)
    place = s.op("ReduceSum", s.op("Mul", before, queue), s.ints(2), keepdims=0)  # [B, k*S]
    place = s.op("Reshape", s.op("Cast", place, to=7), s.ints(0, c.top, c.seq))
    where = _one_hot(s, place, places)  # [B, k, S, C]; beyond C: nowhere
    share = s.op("Mul", choice, s.op("Unsqueeze", s.op("Transpose", value, perm=[0, 2, 1]), s.ints(3)))
    dispatch = s.op("Einsum", choice, where, equation="bkse,bksc->bsec")
    combine = s.op("Einsum", share, where, equation="bkse,bksc->bsec")
    y = _swiglu(s, s.op("Einsum", dispatch, x, equation="bsec,bsh->bech"), _stacks(s, c))
    return s.op("Einsum", combine, y, equation="bsec,bech->bsh")


FAMILY = Family(
    "moe",
    {
        "mixtral-tiny": Preset(MoeConfig(2, 64, 4, 2, 96, 512, 16, 1e6, experts=4), "mixture of experts for tests", batch=4),
        "mixtral-8x7b": Preset(MoeConfig(32, 4096, 32, 8, 14336, 32000, 4096, 1e6), "Mixtral 8x7B, 46.7 G parameters"),
        "mixtral-8x22b": Preset(MoeConfig(56, 6144, 48, 8, 16384, 32768, 4096, 1e6), "Mixtral 8x22B, 141 G parameters"),
    },
    build,
)
