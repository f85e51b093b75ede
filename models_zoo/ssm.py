"""Mamba-2: blocks of `models_zoo.mamba`'s mixer alone."""

from __future__ import annotations

from dataclasses import dataclass

from models_zoo import mamba
from models_zoo.builder import Net
from models_zoo.cache import SEQUENCE, Cache, Memory
from models_zoo.layers import embedding, language_head, rms_norm
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class SsmConfig:
    """inner width = 2 hidden, in heads of head_dim; state: N; taps: of the convolution; chunk: Q;
    groups: of heads that share B and C. cache: states of earlier tokens are inputs
    (models_zoo.cache)."""

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
    groups: int = 1
    cache: bool = False

    @property
    def may_cache(self) -> bool:
        """Whether the model is also written with its states as inputs."""
        return not self.decomposed

    @property
    def mixer(self) -> mamba.Mamba2:
        """A block's mixer."""
        return mamba.Mamba2(
            hidden=self.hidden,
            seq=self.seq,
            heads=2 * self.hidden // self.head_dim,
            head_dim=self.head_dim,
            state=self.state,
            groups=self.groups,
            taps=self.taps,
            chunk=self.chunk,
            epsilon=self.epsilon,
            decomposed=self.decomposed,
            cached=self.cache,
        )


def build(c: SsmConfig, net: Net) -> None:
    """input_ids [batch, seq] -> logits [batch, seq, vocab]."""
    require(
        2 * c.hidden % c.head_dim == 0,
        f"{net.name}: 2*hidden={2 * c.hidden} is not a multiple of head_dim={c.head_dim}",
    )
    mamba.check(c.mixer, net)
    s, layers = net.root.at("backbone"), range(c.layers)
    states = {k: shape for i in layers for k, shape in c.mixer.states(i).items()}
    cache = Cache(net, (), {}, states) if c.cache else None
    ids = cache.ids if cache else net.input("input_ids", [net.batch, c.seq], "int64")
    x, table = embedding(s.at("embeddings"), ids, c.vocab, c.hidden)
    masks = mamba.masks(s.at("mask"), c.mixer)
    for i in layers:
        layer = s.at(f"layers.{i}")
        h = rms_norm(layer.at("norm"), x, c.hidden, epsilon=c.epsilon, decomposed=c.decomposed)
        memory = Memory(cache, i) if cache else None
        x = layer.op("Add", x, mamba.mixer(layer.at("mixer"), h, c.mixer, masks, memory))
    x = rms_norm(s.at("norm_f"), x, c.hidden, epsilon=c.epsilon, decomposed=c.decomposed)
    language_head(net.root.at("lm_head"), x, c.hidden, c.vocab, table if c.tied else "")
    net.output("logits", [net.batch, SEQUENCE if cache else c.seq, c.vocab])
    if cache:
        cache.outputs()


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
