"""Vision transformer: patches by a strided convolution, a class token, pre-norm blocks with GELU, a
linear head."""

from __future__ import annotations

from dataclasses import dataclass

from models_zoo.builder import Net, Scope
from models_zoo.layers import Masking, layer_norm, linear, self_attention
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class VitConfig:
    """image and patch: sides in pixels."""

    layers: int
    hidden: int
    heads: int
    ff: int
    image: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000
    epsilon: float = 1e-6
    decomposed: bool = False

    @property
    def rows(self) -> int:
        """Patches and the class token."""
        return (self.image // self.patch) ** 2 + 1


def build(c: VitConfig, net: Net) -> None:
    """pixel_values [batch, channels, image, image] -> logits [batch, classes]."""
    require(
        c.hidden % c.heads == 0,
        f"{net.name}: hidden={c.hidden} is not a multiple of heads={c.heads}",
    )
    require(c.image >= c.patch, f"{net.name}: image={c.image} is smaller than patch={c.patch}")
    x = _embed(net, net.input("pixel_values", [net.batch, c.channels, c.image, c.image]), c)
    for i in range(c.layers):
        x = _block(net.root.at(f"vit/encoder/layer.{i}"), x, c)
    s = net.root.at("vit")
    x = layer_norm(s.at("layernorm"), x, c.hidden, c.epsilon)
    first = s.op("Squeeze", s.op("Slice", x, s.ints(0), s.ints(1), s.ints(1)), s.ints(1))
    linear(net.root.at("classifier"), first, c.hidden, c.classes, out="logits")
    net.output("logits", [net.batch, c.classes])


def _embed(net: Net, pixels: str, c: VitConfig) -> str:
    """Patches [B, rows - 1, H], the class token before them, and the position table added."""
    s = net.root.at("vit/embeddings")
    p = s.at("patch_embeddings/projection")
    w = p.weight(
        "weight", c.hidden, c.channels, c.patch, c.patch, std=(c.channels * c.patch**2) ** -0.5
    )
    grid = p.op(
        "Conv",
        pixels,
        w,
        p.weight("bias", c.hidden, std=0.1),
        kernel_shape=[c.patch] * 2,
        strides=[c.patch] * 2,
    )
    patches = s.op(
        "Transpose", s.op("Reshape", grid, s.ints(0, c.hidden, c.rows - 1)), perm=[0, 2, 1]
    )
    token = s.weight("cls_token", 1, 1, c.hidden, std=1.0)
    if isinstance(net.batch, int):
        shape = s.ints(net.batch, 1, c.hidden)
    else:
        shape = s.op("Concat", s.op("Shape", pixels, start=0, end=1), s.ints(1, c.hidden), axis=0)
    x = s.op("Concat", s.op("Expand", token, shape), patches, axis=1)
    return s.op("Add", x, s.weight("position_embeddings", 1, c.rows, c.hidden, std=0.5))


def _block(s: Scope, x: str, c: VitConfig) -> str:
    names = ("attention/query", "attention/key", "attention/value", "output/dense")
    h = layer_norm(s.at("layernorm_before"), x, c.hidden, c.epsilon)
    h = self_attention(
        s.at("attention"),
        h,
        c.rows,
        c.hidden,
        c.heads,
        names=names,
        mask=Masking(),
        decomposed=c.decomposed,
    )
    x = s.op("Add", x, h)
    h = linear(
        s.at("intermediate/dense"),
        layer_norm(s.at("layernorm_after"), x, c.hidden, c.epsilon),
        c.hidden,
        c.ff,
    )
    h = s.at("intermediate").op("Gelu", h)
    return s.op("Add", x, linear(s.at("output/dense"), h, c.ff, c.hidden))


FAMILY = Family(
    "vit",
    {
        "vit-tiny": Preset(
            VitConfig(2, 64, 4, 128, image=32, patch=8, classes=10),
            "vision transformer for tests",
            batch=4,
        ),
        "vit-b16": Preset(VitConfig(12, 768, 12, 3072), "ViT-B/16", batch=256),
        "vit-l16": Preset(VitConfig(24, 1024, 16, 4096), "ViT-L/16", batch=256),
        "vit-h14": Preset(VitConfig(32, 1280, 16, 5120, patch=14), "ViT-H/14", batch=256),
    },
    build,
)
