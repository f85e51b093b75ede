"""A Llama decoder whose feed-forward is E experts, of which a router picks k per token: Mixtral,
Qwen MoE; `models_zoo.deepseek` builds on it.

What all tokens share: the first `dense_layers` layers have a plain feed-forward, and of those
behind them all but each `sparse_every`-th (Llama 4); `shared_ff` is one more beside the routed
experts, with a sigmoid gate of its own where shared_gate=1.
scoring=sigmoid picks by score plus a bias per expert that is balanced outside of the gradient
(DeepSeek V3) and weighs by the score alone; softmax-biased does the same with a softmax (ERNIE
4.5), sigmoid-plain has no such bias. scoring=sparse-mixer (Phi-3.5-MoE) weighs the k-th choice by
its part of a softmax over what is left and near enough to it. groups: only experts of
the `group_top` best of so many groups are picked; a group's score is its best expert's (softmax) or
the sum of its best two (sigmoid).

ONNX has no operator for sparse dispatch with gradients, so `form` chooses among three honest ways
to write one; the router is trainable in each (its weights multiply the experts' results; the choice
itself has no gradient).

    dense     every expert works on every token and the weights of those not chosen are 0: the exact
              function of the model, at E/k times its feed-forward work. The default. x [B,1,S,H]
              times stacks [E,H,F].
    gathered  each token gathers the weights of its experts: the exact function and exact work, but
              S*k copies of expert weights in memory (as PyTorch's exporter writes it). Only
              sensible for small models or decoding.
    capacity  tokens are dispatched by one-hot products to C = ceil(k S capacity / E) places per
              expert and sequence, as GShard and Switch do: the work of the model times `capacity`
              plus the two products; tokens beyond C are dropped, so it equals the others only where
              nothing overflows. What expert parallelism needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from models_zoo import llama
from models_zoo.builder import Net, Scope
from models_zoo.layers import MASKED, activation, linear
from models_zoo.spec import Family, Preset, require

_OFF_ON = np.array([0.0, 1.0], dtype=np.float32)


@dataclass(frozen=True)
class MoeConfig(llama.LlamaConfig):
    """experts per layer, `top` of them per token; `capacity` is the capacity factor of
    form=capacity.

    expert_ff: width of a routed expert, by default ff; dense_ff: of a layer without experts,
    likewise. normalise: the chosen weights sum to 1 (times `scaling`). router_bias, expert_bias:
    biases on those products. limit: gate and up are bounded, the gate g becomes g sigmoid(alpha g)
    and 1 is added to up (GPT-OSS), 0 for none of this. plain_mlp: experts, and the feed-forward
    beside them, have no gate, and their activation may be relu2 (Nemotron 3).
    """

    experts: int = 8
    top: int = 2
    form: Literal["dense", "gathered", "capacity"] = "dense"
    capacity: float = 1.25
    expert_ff: int | None = None
    dense_layers: int = 0
    shared_ff: int = 0
    shared_gate: bool = False
    normalise: bool = True
    scaling: float = 1.0
    scoring: Literal["softmax", "softmax-biased", "sigmoid", "sigmoid-plain", "sparse-mixer"] = (
        "softmax"
    )
    groups: int = 1
    group_top: int = 1
    sparse_every: int = 1
    dense_ff: int | None = None
    router_bias: bool = False
    expert_bias: bool = False
    limit: float = 0.0
    alpha: float = 1.702
    near: float = 0.02

    @property
    def expert_width(self) -> int:
        """Width of a routed expert."""
        return self.expert_ff or self.ff

    def sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer >= self.dense_layers and (layer + 1) % self.sparse_every == 0

    @property
    def idle(self) -> int:
        """Parameters of experts that a token does not pass."""
        expert_parameters = (2 if self.plain_mlp else 3) * self.hidden * self.expert_width
        if self.expert_bias:
            expert_parameters += 2 * self.expert_width + self.hidden
        sparse = sum(self.sparse(i) for i in range(self.layers))
        return sparse * (self.experts - self.top) * expert_parameters


def build(c: MoeConfig, net: Net) -> None:
    """input_ids [batch, seq] -> logits [batch, seq, vocab]."""
    checked(c, net)
    llama.decoder(c, net, feed=lambda i, s, x: feed(i, s, x, c))


def checked(c: MoeConfig, net: Net) -> None:
    """Raises PlanError P073 for sizes that do not go together."""
    require(c.top <= c.experts, f"{net.name}: top={c.top} is more than experts={c.experts}")
    require(
        c.act in ("silu", "gelu-tanh") or (c.plain_mlp and c.act in ("relu", "relu2")),
        f"{net.name}: experts with the activation {c.act}",
        "act=silu",
    )
    require(not c.mlp_bias, f"{net.name}: the experts have no biases", "leave out mlp_bias")
    require(
        not (c.plain_mlp and (c.limit or c.expert_bias)),
        f"{net.name}: experts without gates have neither biases nor bounds",
        "leave out limit and expert_bias",
    )
    require(
        c.dense_layers <= c.layers,
        f"{net.name}: dense_layers={c.dense_layers} is more than layers={c.layers}",
    )
    require(
        c.scoring not in ("softmax-biased", "sparse-mixer") or c.groups == 1,
        f"{net.name}: scoring={c.scoring} knows no groups",
        "groups=1",
    )
    require(
        c.scoring != "sparse-mixer" or (c.scaling == 1.0 and not c.normalise),
        f"{net.name}: weights of scoring=sparse-mixer stay as they are",
        "normalise=0, scaling=1",
    )
    require(
        c.experts % c.groups == 0,
        f"{net.name}: experts={c.experts} is not a multiple of groups={c.groups}",
    )
    inside = c.group_top * (c.experts // c.groups)
    require(
        c.group_top <= c.groups,
        f"{net.name}: group_top={c.group_top} is more than groups={c.groups}",
    )
    require(
        c.top <= inside,
        f"{net.name}: top={c.top} is more than the {inside} experts of {c.group_top} groups",
    )
    require(
        c.groups == 1 or c.scoring == "softmax" or c.experts // c.groups >= 2,
        f"{net.name}: groups={c.groups} of one expert have no best two",
    )


def feed(i: int, s: Scope, x: str, c: MoeConfig) -> str:
    """Layer i's feed-forward: [B, S, H] -> [B, S, H]."""
    if not c.sparse(i):
        return llama.mlp(s.at("mlp"), x, c, c.dense_ff or c.ff)
    m = s.at(
        "mlp" if c.expert_ff else "block_sparse_moe"
    )  # as Qwen and DeepSeek call it, and as Mixtral does
    return mixture(m, x, c)


Chosen = tuple[str, str]
"""Weights and indices of the chosen experts, each [B, S, k]."""


def mixture(m: Scope, x: str, c: MoeConfig) -> str:
    """Experts, and what all tokens share beside them: [B, S, H] -> [B, S, H]."""
    routed = experts(m, x, c, _route(m, x, c))
    if not c.shared_ff:
        return routed
    shared = llama.mlp(m.at("shared_experts"), x, c, c.shared_ff)
    if c.shared_gate:
        g = m.at("shared_expert_gate")
        shared = g.op("Mul", shared, g.op("Sigmoid", linear(g, x, c.hidden, 1, bias=False)))
    return m.op("Add", routed, shared)


def experts(m: Scope, x: str, c: MoeConfig, chosen: Chosen) -> str:
    """The sum of the chosen experts' results: [B, S, H] -> [B, S, H]."""
    return {"dense": _dense, "gathered": _gathered, "capacity": _capacity}[c.form](m, x, c, chosen)


def _route(s: Scope, x: str, c: MoeConfig) -> Chosen:
    """The experts of each token."""
    g = s.at("gate")
    logits = linear(g, x, c.hidden, c.experts, bias=c.router_bias)
    if c.scoring == "sparse-mixer":
        return _sparse_mixer(s, logits, c)
    by_sigmoid = c.scoring in ("sigmoid", "sigmoid-plain")
    scores = s.op("Sigmoid", logits) if by_sigmoid else s.op("Softmax", logits, axis=-1)
    biased = (
        s.op("Add", scores, g.weight("e_score_correction_bias", c.experts, std=0.01))
        if c.scoring in ("sigmoid", "softmax-biased")
        else scores
    )
    value, index = s.ops(
        2, "TopK", _best_groups(s, biased, c) if c.groups > 1 else biased, s.ints(c.top), axis=-1
    )
    if biased != scores:
        value = s.op("GatherElements", scores, index, axis=-1)
    if c.normalise:
        value = s.op("Div", value, s.op("ReduceSum", value, s.ints(-1), keepdims=1))
    return (s.op("Mul", value, s.f32(c.scaling)) if c.scaling != 1.0 else value), index


def _sparse_mixer(s: Scope, logits: str, c: MoeConfig) -> Chosen:
    """As `_route`, of SparseMixer without its draws: behind the best so far the next best, weighed
    by a softmax over those left that are away from it by `near` of the larger size at most."""
    best, index = s.ops(2, "TopK", logits, s.ints(c.top), axis=-1)
    size, open_logits, weights = s.op("Abs", logits), logits, list[str]()
    for k, best_so_far in enumerate(s.ops(c.top, "Split", best, s.ints(*[1] * c.top), axis=-1)):
        far = s.op("Div", s.op("Sub", best_so_far, logits), s.op("Max", size, best_so_far))
        near = s.op("Where", s.op("Greater", far, s.f32(c.near)), s.f32(MASKED), open_logits)
        chosen = s.op("Slice", index, s.ints(k), s.ints(k + 1), s.ints(-1))
        share = s.op("Softmax", near, axis=-1)
        weights.append(s.op("GatherElements", share, chosen, axis=-1))
        taken = s.op("Squeeze", _one_hot(s, chosen, c.experts), s.ints(-2))
        open_logits = s.op("Where", s.op("Cast", taken, to=9), s.f32(MASKED), open_logits)
    return s.op("Concat", *weights, axis=-1), index


def _best_groups(s: Scope, scores: str, c: MoeConfig) -> str:
    """Scores [B, S, E], those outside of the best groups times 0."""
    split = s.op("Reshape", scores, s.ints(0, 0, c.groups, c.experts // c.groups))
    best, _ = s.ops(2, "TopK", split, s.ints(1 if c.scoring == "softmax" else 2), axis=-1)
    _, chosen = s.ops(
        2, "TopK", s.op("ReduceSum", best, s.ints(-1), keepdims=0), s.ints(c.group_top), axis=-1
    )
    mask = s.op("ReduceSum", _one_hot(s, chosen, c.groups), s.ints(2), keepdims=0)  # [B, S, groups]
    return s.op(
        "Reshape", s.op("Mul", split, s.op("Unsqueeze", mask, s.ints(3))), s.ints(0, 0, c.experts)
    )


def _one_hot(s: Scope, index: str, depth: int) -> str:
    """[..] -> [.., depth] float; a row of zeros where the index is depth or more."""
    return s.op("OneHot", index, s.i64(depth), s.net.constant(_OFF_ON), axis=-1)


@dataclass(frozen=True)
class _Stacks:
    """Weights [E, in, out] of gate (where there is one), up and down, and their biases [E, out]
    ("" without)."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]


def _stacks(s: Scope, c: MoeConfig) -> _Stacks:
    e, (hidden, width) = s.at("experts"), (c.hidden, c.expert_width)
    sizes = [("up_proj", hidden, width), ("down_proj", width, hidden)]
    if not c.plain_mlp:
        sizes.insert(0, ("gate_proj", hidden, width))
    return _Stacks(
        tuple(e.weight(f"{n}.weight", c.experts, a, b, std=a**-0.5) for n, a, b in sizes),
        tuple(
            e.weight(f"{n}.bias", c.experts, b, std=0.1) if c.expert_bias else ""
            for n, _, b in sizes
        ),
    )


def _swiglu(s: Scope, x: str, stacks: _Stacks, c: MoeConfig) -> str:
    """x [.., rows, H] through weights [.., H, F] and back; biases [.., 1, F] and [.., 1, H]."""
    e = s.at("experts")

    def product(x: str, k: int) -> str:
        y = e.op("MatMul", x, stacks.weights[k])
        return e.op("Add", y, stacks.biases[k]) if stacks.biases[k] else y

    if c.plain_mlp:
        return product(activation(e, product(x, 0), c.act), 1)
    gate, up = product(x, 0), product(x, 1)
    if not c.limit:
        return product(e.op("Mul", activation(e, gate, c.act), up), 2)
    high, low = e.f32(c.limit), e.f32(-c.limit)
    gate, up = e.op("Clip", gate, "", high), e.op("Clip", up, low, high)
    gate = e.op("Mul", gate, e.op("Sigmoid", e.op("Mul", gate, e.f32(c.alpha))))
    return product(e.op("Mul", e.op("Add", up, e.f32(1.0)), gate), 2)


def _of_all(s: Scope, c: MoeConfig) -> _Stacks:
    """The stacks as products with all experts [.., E, rows, .] take them."""
    e, stacks = s.at("experts"), _stacks(s, c)
    biases = (e.op("Unsqueeze", b, e.ints(1)) if b else "" for b in stacks.biases)
    return _Stacks(stacks.weights, tuple(biases))


def _dense(s: Scope, x: str, c: MoeConfig, chosen: Chosen) -> str:
    value, index = chosen
    weighed = s.op(
        "Mul", _one_hot(s, index, c.experts), s.op("Unsqueeze", value, s.ints(-1))
    )  # [B, S, k, E]
    share = s.op(
        "Transpose", s.op("ReduceSum", weighed, s.ints(2), keepdims=0), perm=[0, 2, 1]
    )  # [B, E, S]
    y = _swiglu(s, s.op("Unsqueeze", x, s.ints(1)), _of_all(s, c), c)  # [B, E, S, H]
    return s.op(
        "ReduceSum", s.op("Mul", y, s.op("Unsqueeze", share, s.ints(3))), s.ints(1), keepdims=0
    )


def _gathered(s: Scope, x: str, c: MoeConfig, chosen: Chosen) -> str:
    value, index = chosen
    stacks = _stacks(s, c)
    weights = tuple(s.op("Gather", w, index, axis=0) for w in stacks.weights)  # [B, S, k, ., .]
    biases = tuple(
        s.op("Unsqueeze", s.op("Gather", b, index, axis=0), s.ints(3)) if b else ""
        for b in stacks.biases
    )
    y = _swiglu(s, s.op("Unsqueeze", x, s.ints(2, 3)), _Stacks(weights, biases), c)
    # y [B, S, k, 1, H]
    weighted = s.op("Mul", s.op("Squeeze", y, s.ints(3)), s.op("Unsqueeze", value, s.ints(-1)))
    return s.op("ReduceSum", weighted, s.ints(2), keepdims=0)


def _capacity(s: Scope, x: str, c: MoeConfig, chosen: Chosen) -> str:
    places = math.ceil(c.top * c.seq * c.capacity / c.experts)
    value, index = chosen
    choice = s.op(
        "Transpose", _one_hot(s, index, c.experts), perm=[0, 2, 1, 3]
    )  # [B, k, S, E]: first choices queue first
    queue = s.op("Reshape", choice, s.ints(0, c.top * c.seq, c.experts))
    before = s.op("CumSum", queue, s.i64(1), exclusive=1)
    place = s.op("ReduceSum", s.op("Mul", before, queue), s.ints(2), keepdims=0)  # [B, k*S]
    place = s.op("Reshape", s.op("Cast", place, to=7), s.ints(0, c.top, c.seq))
    where = _one_hot(s, place, places)  # [B, k, S, C]; beyond C: nowhere
    share = s.op(
        "Mul", choice, s.op("Unsqueeze", s.op("Transpose", value, perm=[0, 2, 1]), s.ints(3))
    )
    dispatch = s.op("Einsum", choice, where, equation="bkse,bksc->bsec")
    combine = s.op("Einsum", share, where, equation="bkse,bksc->bsec")
    y = _swiglu(s, s.op("Einsum", dispatch, x, equation="bsec,bsh->bech"), _of_all(s, c), c)
    return s.op("Einsum", combine, y, equation="bsec,bech->bsh")


FAMILY = Family(
    "moe",
    {
        "mixtral-tiny": Preset(
            MoeConfig(2, 64, 4, 2, 96, 512, 16, 1e6, experts=4),
            "mixture of experts for tests",
            batch=4,
        ),
        "mixtral-8x7b": Preset(MoeConfig(32, 4096, 32, 8, 14336, 32000, 4096, 1e6), "Mixtral 8x7B"),
        "mixtral-8x22b": Preset(
            MoeConfig(56, 6144, 48, 8, 16384, 32768, 4096, 1e6), "Mixtral 8x22B"
        ),
    },
    build,
)
