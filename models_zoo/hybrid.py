"""Decoders whose layers differ in what mixes tokens: attention, a state space (`models_zoo.mamba`),
both side by side, a short convolution, or the gated delta rule (`models_zoo.delta`).

A layer is what mixes tokens and a feed-forward, dense or experts, each behind a norm (Bamba,
Granite 4, Falcon-H1, LFM2,
Qwen3-Next), or one of these alone (Nemotron-H). The rest is Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from models_zoo import delta, llama, mamba, moe
from models_zoo.builder import Net, Scope
from models_zoo.cache import Memory, state_name
from models_zoo.layers import linear
from models_zoo.spec import Family, Preset, require

KINDS = {
    "M": "a state space",
    "*": "attention",
    "H": "both side by side",
    "C": "a short convolution",
    "D": "the gated delta rule",
    "-": "a feed-forward alone",
    "E": "experts alone",
}
"""Letters of `HybridConfig.kinds`."""
_NAMES = {"M": "mamba", "C": "conv", "D": "linear_attn"}


@dataclass(frozen=True)
class HybridConfig(moe.MoeConfig):
    """kinds: a letter (KINDS) a layer, begun anew where there are more layers. alone: a layer has
    one branch. sparse_layers: feed-forwards behind dense_layers are experts. ssm, delta_rule: of
    the state space and the delta rule; their seq, hidden and decomposed are this record's.
    conv_taps, conv_bias: of short convolutions.

    attention_in, attention_out, gate_scale, down_scale multiply what attention reads and makes,
    the gate before its activation, and the feed-forward's result (Falcon-H1).
    """

    kinds: str = "M*"
    alone: bool = False
    sparse_layers: bool = False
    ssm: mamba.Mamba2 | None = None
    delta_rule: delta.Delta | None = None
    conv_taps: int = 3
    conv_bias: bool = False
    attention_in: float = 1.0
    attention_out: float = 1.0
    gate_scale: float = 1.0
    down_scale: float = 1.0

    @property
    def may_cache(self) -> bool:
        """Whether the model is also written with keys, values and states as inputs."""
        return super().may_cache and not self.decomposed

    @property
    def keeping(self) -> Sequence[int]:
        """The layers that keep keys and values."""
        return [i for i in range(self.layers) if self.kind(i) in "*H"]

    @property
    def states(self) -> Mapping[str, tuple[int, ...]]:
        """What layers keep beside those (`Cache.states`)."""
        kept: dict[str, tuple[int, ...]] = {}
        for i in range(self.layers):
            if self.kind(i) in "MH":
                kept |= self.space.states(i)
            elif self.kind(i) == "D":
                kept |= self.rule.states(i)
            elif self.kind(i) == "C" and self.conv_taps > 1:
                kept[state_name("conv", i)] = (self.hidden, self.conv_taps - 1)
        return kept

    @property
    def period(self) -> int:
        """After how many layers they are alike again."""
        return len(self.kinds)

    @property
    def space(self) -> mamba.Mamba2:
        """The state space of a layer."""
        base = self.ssm or mamba.Mamba2(self.hidden, self.seq, 2 * self.hidden // 64)
        return replace(base, **self._shared)

    @property
    def rule(self) -> delta.Delta:
        """The delta rule of a layer."""
        base = self.delta_rule or delta.Delta(self.hidden, self.seq)
        return replace(base, **self._shared)

    @property
    def _shared(self) -> dict[str, Any]:
        """Fields of this record that the state space and the delta rule have too."""
        return {
            "hidden": self.hidden,
            "seq": self.seq,
            "decomposed": self.decomposed,
            "cached": self.cache,
        }

    def kind(self, layer: int) -> str:
        """A layer's letter."""
        return self.kinds[layer % len(self.kinds)]

    def sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        behind = self.sparse_layers and layer >= self.dense_layers
        return self.kind(layer) == "E" if self.alone else behind


def build(c: HybridConfig, net: Net) -> None:
    """input_ids [batch, seq] -> logits [batch, seq, vocab]."""
    _check(c, net)
    layers = range(c.layers)
    if any(c.sparse(i) for i in layers):
        moe.checked(c, net)
    masks: mamba.Masks | None = None
    if any(c.kind(i) in "MH" for i in layers):
        mamba.check(c.space, net)
        masks = mamba.masks(net.root.at("model/mask"), c.space)
    if any(c.kind(i) == "D" for i in layers):
        delta.check(c.rule, net)

    # Many parameters: those of llama.Layer.
    def layer(
        i: int, s: Scope, x: str, attention: llama.Attend, feed: llama.Attend, memory: Memory | None
    ) -> str:
        others = _others(c, masks, memory)
        if c.alone:
            return _alone(i, s, x, c, {"*": attention, **others}, feed)
        kind = c.kind(i)
        mixers = {"*": _with_scales(attention, c), **others}
        name = _NAMES.get(kind, "self_attn")
        mixer = _both(mixers) if kind == "H" else llama.within(name, mixers[kind])
        return llama.block(s, x, c, mixer, feed)

    llama.decoder(c, net, feed=lambda i, s, x: _feed(i, s, x, c), layer=layer)


def _check(c: HybridConfig, net: Net) -> None:
    """Raises PlanError P073 for layers that cannot be written."""
    known = "M*C-E" if c.alone else "M*HCD"
    odd = sorted(set(c.kinds) - set(known))
    require(bool(c.kinds), f"{net.name}: kinds is empty", f"letters of {known}")
    require(not odd, f"{net.name}: kinds has {', '.join(odd)}", f"letters of {known}")
    require(
        not (c.cache and c.decomposed),
        f"{net.name}: a state is kept by the operator, not by its decomposed form",
        "leave out cache, or decomposed",
    )


def _others(
    c: HybridConfig, own: mamba.Masks | None, memory: Memory | None
) -> Mapping[str, llama.Attend]:
    """What mixes tokens beside attention, by letter."""
    return {
        "M": lambda s, x: mamba.mixer(s, x, c.space, own, memory),
        "C": lambda s, x: _short(s, x, c, memory),
        "D": lambda s, x: delta.mixer(s, x, c.rule, memory),
    }


def _both(mixers: Mapping[str, llama.Attend]) -> llama.Attend:
    """The sum of a state space and attention, of the same rows."""
    space, attention = llama.within("mamba", mixers["M"]), llama.within("self_attn", mixers["*"])
    return lambda s, x: s.op("Add", space(s, x), attention(s, x))


def _with_scales(attention: llama.Attend, c: HybridConfig) -> llama.Attend:
    return lambda s, x: mamba.scaled(
        s, attention(s, mamba.scaled(s, x, c.attention_in)), c.attention_out
    )


# Many parameters: a layer, what it may be made of, and its configuration.
def _alone(
    i: int,
    s: Scope,
    x: str,
    c: HybridConfig,
    mixers: Mapping[str, llama.Attend],
    feed: llama.Attend,
) -> str:
    """A layer of one branch."""
    h, m = llama.norm(s.at("norm"), x, c), s.at("mixer")
    y = mixers[c.kind(i)](m, h) if c.kind(i) in mixers else feed(m, h)
    return s.op("Add", x, y)


def _feed(i: int, s: Scope, x: str, c: HybridConfig) -> str:
    """A layer's feed-forward; s: its layer's module, or its own where it is the layer's one."""
    if c.sparse(i):
        name = "mlp" if "D" in c.kinds else "block_sparse_moe"
        return moe.mixture(s if c.alone else s.at(name), x, c)
    m, width = s if c.alone else s.at("mlp"), c.dense_ff or c.ff
    if c.plain_mlp:
        return llama.plain(m, x, c, width)
    return mamba.scaled(m, llama.gated(m, x, c, width, scale=c.gate_scale), c.down_scale)


def _short(s: Scope, x: str, c: HybridConfig, memory: Memory | None) -> str:
    """LFM2's convolution: out(c * convolved(b * x)), b, c and x parts of one projection of the
    rows."""
    b, k, u = (
        linear(s.at(f"in_proj.{n}"), x, c.hidden, c.hidden, bias=c.conv_bias)
        for n in ("b", "c", "x")
    )
    at, sizes, bu = s.at("conv"), (c.hidden, c.conv_taps), s.op("Mul", b, u)
    y = mamba.convolve(at, bu, sizes, bias=c.conv_bias, act=False, memory=memory)
    return linear(s.at("out_proj"), s.op("Mul", k, y), c.hidden, c.hidden, bias=c.conv_bias)


FAMILY = Family(
    "hybrid",
    {
        "hybrid-tiny": Preset(
            HybridConfig(
                4,
                64,
                4,
                2,
                96,
                512,
                16,
                kinds="MM*M",
                ssm=mamba.Mamba2(64, 16, 8, head_dim=16, state=8, groups=2, chunk=8),
            ),
            "state spaces and attention for tests",
            batch=4,
        ),
        "granite-4.0-h-micro": Preset(
            HybridConfig(
                40,
                2048,
                32,
                8,
                8192,
                100352,
                4096,
                tied=True,
                bare_every=1,
                kinds="MMMMM*MMMMMMMMM*MMMMMMMMM*MMMMMMMMM*MMMM",
                ssm=mamba.Mamba2(2048, 4096, 64),
            ),
            "Granite 4.0 H",
        ),
        "nemotron-3-nano-30b-a3b": Preset(
            HybridConfig(
                52,
                2688,
                32,
                2,
                1856,
                131072,
                4096,
                head_dim=128,
                act="relu2",
                plain_mlp=True,
                bare_every=1,
                experts=128,
                top=6,
                expert_ff=1856,
                shared_ff=3712,
                scoring="sigmoid",
                kinds="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                alone=True,
                ssm=mamba.Mamba2(2688, 4096, 64, groups=8, chunk=128, step_least=0.001),
            ),
            "Nemotron 3 Nano",
        ),
        "qwen3-next-80b-a3b": Preset(
            HybridConfig(
                48,
                2048,
                16,
                2,
                5632,
                151936,
                4096,
                theta=1e7,
                epsilon=1e-6,
                head_dim=256,
                rotary_dim=64,
                qk_norm=True,
                attention_gate=True,
                experts=512,
                top=10,
                expert_ff=512,
                shared_ff=512,
                shared_gate=True,
                kinds="DDD*",
                sparse_layers=True,
                delta_rule=delta.Delta(2048, 4096),
            ),
            "Qwen3-Next",
        ),
    },
    build,
)
