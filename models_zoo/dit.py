"""Diffusion transformer (DiT): patches of a latent, blocks whose norms are shifted, scaled and
gated by step and class (adaLN-Zero).

With c = time(t) + table[class] and six vectors per block from one dense layer on silu(c):

    x += gate1 * attention(norm(x) (1 + scale1) + shift1)      x += gate2 * mlp(norm(x) (1 + scale2)
        + shift2)

The norms have no parameters of their own; they are spread out, as ONNX's operator wants a scale.
The position table is a parameter that is not trained. learned_sigma: the result has a second half
of channels for the variance.
"""

from __future__ import annotations

from dataclasses import dataclass

from models_zoo.builder import Net, Scope
from models_zoo.layers import Masking, angles, embedding, linear, self_attention, silu, unit_layer
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class DitConfig:
    """side: height and width of the latent; patch: side of a patch; classes: with one row more, for
    no class."""

    layers: int
    hidden: int
    heads: int
    patch: int = 2
    side: int = 32
    channels: int = 4
    classes: int = 1000
    ff: int | None = None
    frequencies: int = 256
    learned_sigma: bool = True
    epsilon: float = 1e-6
    decomposed: bool = False

    @property
    def rows(self) -> int:
        """Patches."""
        return (self.side // self.patch) ** 2


def build(c: DitConfig, net: Net) -> None:
    """latent [batch, channels, side, side], timestep [batch], class_labels [batch] int64 -> sample
    [batch, channels (twice), side, side]."""
    require(
        c.hidden % c.heads == 0,
        f"{net.name}: hidden={c.hidden} is not a multiple of heads={c.heads}",
    )
    require(
        c.side % c.patch == 0, f"{net.name}: side={c.side} is not a multiple of patch={c.patch}"
    )
    require(c.frequencies % 2 == 0, f"{net.name}: frequencies={c.frequencies} is not even")
    s, out = net.root, c.channels * (2 if c.learned_sigma else 1)
    latent = net.input("latent", [net.batch, c.channels, c.side, c.side])
    steps, labels = (
        net.input("timestep", [net.batch]),
        net.input("class_labels", [net.batch], "int64"),
    )
    condition = silu(
        s.at("condition"),
        s.op(
            "Add",
            _time(s.at("t_embedder"), steps, c),
            embedding(s.at("y_embedder"), labels, c.classes + 1, c.hidden)[0],
        ),
    )
    x = _patches(s.at("x_embedder"), latent, c)
    for i in range(c.layers):
        x = _block(s.at(f"blocks.{i}"), x, condition, c)
    f, grid = s.at("final_layer"), c.side // c.patch
    shift, scale = _vectors(f.at("adaLN_modulation"), condition, 2, c)
    x = linear(f.at("linear"), _modulated(f, x, shift, scale, c), c.hidden, c.patch**2 * out)
    x = s.op(
        "Transpose",
        s.op("Reshape", x, s.ints(0, grid, grid, c.patch, c.patch, out)),
        perm=[0, 5, 1, 3, 2, 4],
    )
    s.op("Reshape", x, s.ints(0, out, c.side, c.side), out="sample")
    net.output("sample", [net.batch, out, c.side, c.side])


def _patches(s: Scope, latent: str, c: DitConfig) -> str:
    """[B, rows, hidden], with the position table added."""
    w = s.weight(
        "proj/weight", c.hidden, c.channels, c.patch, c.patch, std=(c.channels * c.patch**2) ** -0.5
    )
    grid = s.op(
        "Conv",
        latent,
        w,
        s.weight("proj/bias", c.hidden, std=0.1),
        kernel_shape=[c.patch] * 2,
        strides=[c.patch] * 2,
    )
    x = s.op("Transpose", s.op("Reshape", grid, s.ints(0, c.hidden, c.rows)), perm=[0, 2, 1])
    return s.op("Add", x, s.weight("pos_embed", 1, c.rows, c.hidden, std=0.5))


def _time(s: Scope, steps: str, c: DitConfig) -> str:
    """Sinusoids of the step through two dense layers -> [B, hidden]."""
    angle = angles(s, steps, c.frequencies // 2, 10000.0)
    h = linear(
        s.at("mlp.0"),
        s.op("Concat", s.op("Cos", angle), s.op("Sin", angle), axis=1),
        c.frequencies,
        c.hidden,
    )
    return linear(s.at("mlp.2"), silu(s, h), c.hidden, c.hidden)


def _vectors(s: Scope, condition: str, count: int, c: DitConfig) -> tuple[str, ...]:
    """`count` vectors of the condition, each [B, 1, hidden]."""
    packed = s.op("Unsqueeze", linear(s, condition, c.hidden, count * c.hidden), s.ints(1))
    return s.ops(count, "Split", packed, s.ints(*[c.hidden] * count), axis=-1)


def _modulated(s: Scope, x: str, shift: str, scale: str, c: DitConfig) -> str:
    """norm(x) (1 + scale) + shift."""
    normed = unit_layer(s, x, epsilon=c.epsilon)
    return s.op("Add", s.op("Mul", normed, s.op("Add", scale, s.f32(1.0))), shift)


def _block(s: Scope, x: str, condition: str, c: DitConfig) -> str:
    shift1, scale1, gate1, shift2, scale2, gate2 = _vectors(
        s.at("adaLN_modulation"), condition, 6, c
    )
    a, m, names = s.at("attn"), s.at("mlp"), ("q", "k", "v", "proj")
    h = _modulated(s.at("norm1"), x, shift1, scale1, c)
    h = self_attention(
        a, h, c.rows, c.hidden, c.heads, names=names, mask=Masking(), decomposed=c.decomposed
    )
    x = s.op("Add", x, s.op("Mul", h, gate1))
    width = c.ff or 4 * c.hidden
    h = m.op(
        "Gelu",
        linear(m.at("fc1"), _modulated(s.at("norm2"), x, shift2, scale2, c), c.hidden, width),
        approximate="tanh",
    )
    return s.op("Add", x, s.op("Mul", linear(m.at("fc2"), h, width, c.hidden), gate2))


FAMILY = Family(
    "dit",
    {
        "dit-tiny": Preset(
            DitConfig(2, 64, 4, side=8, classes=10, frequencies=32),
            "diffusion transformer for tests",
            batch=4,
        ),
        "dit-s-2": Preset(DitConfig(12, 384, 6), "DiT-S/2 at 256 x 256", batch=256),
        "dit-b-2": Preset(DitConfig(12, 768, 12), "DiT-B/2 at 256 x 256", batch=256),
        "dit-l-2": Preset(DitConfig(24, 1024, 16), "DiT-L/2 at 256 x 256", batch=256),
        "dit-xl-2": Preset(DitConfig(28, 1152, 16), "DiT-XL/2 at 256 x 256", batch=256),
    },
    build,
)
