"""Diffusion U-Net with cross-attention, as in Stable Diffusion 1: long skips between the ways down
and up.

Each level of the way down has `per_level` residual blocks (each followed by a transformer block but
on the last level) and, but on the last level, a stride-2 convolution; every result is kept as a
skip, and the way up (per_level + 1 blocks per level) concatenates one to each block's input. Time
enters every residual block as a channel bias.

onnx infers no shape for GroupNormalization, nor a symbolic dim through Resize, so these results are
declared in value_info; decomposed=1 spreads GroupNormalization and attention out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models_zoo.builder import Net, Scope
from models_zoo.layers import (
    Masking,
    angles,
    attend,
    layer_norm,
    linear,
    merge_heads,
    silu,
    split_heads,
)
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class UnetConfig:
    """widths: channels of each level, joined by "-". side: height and width of the latent. text_*:
    the conditioning."""

    widths: str
    side: int
    heads: int
    text_rows: int
    text_width: int
    per_level: int = 2
    channels: int = 4
    groups: int = 32
    decomposed: bool = False


def build(c: UnetConfig, net: Net) -> None:
    """latent [batch, channels, side, side], timestep [batch], encoder_hidden_states [batch,
    text_rows, text_width] -> sample."""
    widths = _widths(c, net.name)
    x = net.input("latent", [net.batch, c.channels, c.side, c.side])
    steps = net.input("timestep", [net.batch])
    text = net.input("encoder_hidden_states", [net.batch, c.text_rows, c.text_width])
    s, side = net.root, c.side
    time = _time(s.at("time_embedding"), steps, widths[0])
    cond = _Conditions(c, time, 4 * widths[0], text)
    x, width = _conv(s.at("conv_in"), x, c.channels, widths[0], 3), widths[0]
    skips = [(x, width)]
    for level, size in enumerate(widths):
        down, last = s.at(f"down_blocks.{level}"), level == len(widths) - 1
        for i in range(c.per_level):
            x = _stage(down, i, x, width, size, side, cond, attention=not last)
            width = size
            skips.append((x, width))
        if not last:
            x = _conv(down.at("downsamplers.0/conv"), x, width, width, 3, stride=2)
            side //= 2
            skips.append((x, width))
    mid = s.at("mid_block")
    x = _residual(mid.at("resnets.0"), x, width, width, side, cond)
    x = _transformer(mid.at("attentions.0"), x, width, side, cond)
    x = _residual(mid.at("resnets.1"), x, width, width, side, cond)
    for level, size in enumerate(reversed(widths)):
        up, last = s.at(f"up_blocks.{level}"), level == len(widths) - 1
        for i in range(c.per_level + 1):
            skip, skip_width = skips.pop()
            x = up.op("Concat", x, skip, axis=1)
            x = _stage(up, i, x, width + skip_width, size, side, cond, attention=level > 0)
            width = size
        if not last:
            side *= 2
            x = _upsample(up.at("upsamplers.0"), x, width, side)
    x = silu(s.at("conv_norm_out"), _group_norm(s.at("conv_norm_out"), x, width, side, c))
    _conv(s.at("conv_out"), x, width, c.channels, 3, out="sample")
    net.output("sample", [net.batch, c.channels, c.side, c.side])


@dataclass(frozen=True)
class _Conditions:
    """What every block sees: the configuration, the time embedding [B, time_width], the text [B,
    text_rows, text_width]."""

    c: UnetConfig
    time: str
    time_width: int
    text: str


def _widths(c: UnetConfig, name: str) -> list[int]:
    parts = c.widths.split("-")
    sound = len(parts) <= 8 and all(
        p.isascii() and p.isdigit() and 0 < int(p) <= 10**6 for p in parts
    )
    require(sound, f"{name}: widths={c.widths!r} is not a list such as 320-640-1280-1280")
    widths = [int(p) for p in parts]
    for width in widths:
        require(
            width % c.groups == 0 and width % c.heads == 0,
            f"{name}: width {width} is not a multiple of groups={c.groups} and heads={c.heads}",
        )
    require(widths[0] % 2 == 0, f"{name}: the first width must be even, {widths[0]} given")
    halvings = 2 ** (len(widths) - 1)
    require(
        c.side % halvings == 0,
        f"{name}: side={c.side} is not a multiple of {halvings}, which {len(widths)} levels halve",
    )
    return widths


def _conv(
    s: Scope, x: str, size_in: int, size_out: int, kernel: int, *, stride: int = 1, out: str = ""
) -> str:
    w = s.weight("weight", size_out, size_in, kernel, kernel, std=(size_in * kernel**2) ** -0.5)
    bias = s.weight("bias", size_out, std=0.1)
    return s.op(
        "Conv",
        x,
        w,
        bias,
        kernel_shape=[kernel] * 2,
        strides=[stride] * 2,
        pads=[kernel // 2] * 4,
        out=out,
    )


def _group_norm(
    s: Scope, x: str, width: int, side: int, c: UnetConfig, epsilon: float = 1e-5
) -> str:
    """The operator, or InstanceNormalization of the groups as exporters before opset 21 spread it
    out."""
    scale, bias = s.weight("weight", width, std=0.1, mean=1.0), s.weight("bias", width, std=0.1)
    if not c.decomposed:
        y = s.op("GroupNormalization", x, scale, bias, num_groups=c.groups, epsilon=epsilon)
        return s.net.declare(y, [s.net.batch, width, side, side])
    one, zero = (s.net.constant(np.full(c.groups, value, np.float32)) for value in (1.0, 0.0))
    groups = s.op("Reshape", x, s.ints(0, c.groups, -1))
    y = s.op(
        "Reshape",
        s.op("InstanceNormalization", groups, one, zero, epsilon=epsilon),
        s.ints(0, width, side, side),
    )
    y = s.op("Mul", y, s.op("Unsqueeze", scale, s.ints(1, 2)))
    return s.op("Add", y, s.op("Unsqueeze", bias, s.ints(1, 2)))


def _time(s: Scope, steps: str, width: int) -> str:
    """Sinusoids of the step through two dense layers -> [B, 4 width]."""
    angle = angles(s, steps, width // 2, 10000.0)
    h = s.op("Concat", s.op("Cos", angle), s.op("Sin", angle), axis=1)
    h = silu(s, linear(s.at("linear_1"), h, width, 4 * width))
    return linear(s.at("linear_2"), h, 4 * width, 4 * width)


def _stage(
    s: Scope,
    i: int,
    x: str,
    size_in: int,
    size_out: int,
    side: int,
    cond: _Conditions,
    *,
    attention: bool,
) -> str:
    x = _residual(s.at(f"resnets.{i}"), x, size_in, size_out, side, cond)
    return _transformer(s.at(f"attentions.{i}"), x, size_out, side, cond) if attention else x


def _residual(s: Scope, x: str, size_in: int, size_out: int, side: int, cond: _Conditions) -> str:
    h = _conv(
        s.at("conv1"),
        silu(s, _group_norm(s.at("norm1"), x, size_in, side, cond.c)),
        size_in,
        size_out,
        3,
    )
    t = s.at("time_emb_proj")
    bias = linear(t, silu(t, cond.time), cond.time_width, size_out)
    h = s.op("Add", h, t.op("Unsqueeze", bias, t.ints(2, 3)))
    h = _conv(
        s.at("conv2"),
        silu(s, _group_norm(s.at("norm2"), h, size_out, side, cond.c)),
        size_out,
        size_out,
        3,
    )
    return s.op(
        "Add",
        x if size_in == size_out else _conv(s.at("conv_shortcut"), x, size_in, size_out, 1),
        h,
    )


def _transformer(s: Scope, x: str, width: int, side: int, cond: _Conditions) -> str:
    """Pixels as rows: self-attention, attention to the text, gated feed-forward, between 1x1
    convolutions."""
    c, block = cond.c, s.at("transformer_blocks.0")
    h = _conv(s.at("proj_in"), _group_norm(s.at("norm"), x, width, side, c, 1e-6), width, width, 1)
    h = s.op("Reshape", s.op("Transpose", h, perm=[0, 2, 3, 1]), s.ints(0, side * side, width))
    n = layer_norm(block.at("norm1"), h, width)
    h = block.op(
        "Add", h, _attention(block.at("attn1"), n, n, (side * side, side * side), (width, width), c)
    )
    n = layer_norm(block.at("norm2"), h, width)
    h = block.op(
        "Add",
        h,
        _attention(
            block.at("attn2"), n, cond.text, (side * side, c.text_rows), (width, c.text_width), c
        ),
    )
    h = block.op("Add", h, _gated(block.at("ff"), layer_norm(block.at("norm3"), h, width), width))
    h = s.op("Transpose", s.op("Reshape", h, s.ints(0, side, side, width)), perm=[0, 3, 1, 2])
    return s.op("Add", _conv(s.at("proj_out"), h, width, width, 1), x)


def _attention(
    s: Scope, x: str, memory: str, rows: tuple[int, int], widths: tuple[int, int], c: UnetConfig
) -> str:
    width, dim = widths[0], widths[0] // c.heads
    q = split_heads(
        s.at("to_q"), linear(s.at("to_q"), x, width, width, bias=False), rows[0], c.heads, dim
    )
    k, v = (
        split_heads(
            s.at(n), linear(s.at(n), memory, widths[1], width, bias=False), rows[1], c.heads, dim
        )
        for n in ("to_k", "to_v")
    )
    context = attend(s, q, k, v, scale=dim**-0.5, mask=Masking(), decomposed=c.decomposed)
    return linear(s.at("to_out.0"), merge_heads(s, context, rows[0], width), width, width)


def _gated(s: Scope, x: str, width: int) -> str:
    """GEGLU: half of the first layer gates the other half."""
    g = s.at("net.0")
    value, gate = g.ops(
        2, "Split", linear(g.at("proj"), x, width, 8 * width), axis=-1, num_outputs=2
    )
    return linear(s.at("net.2"), g.op("Mul", value, g.op("Gelu", gate)), 4 * width, width)


def _upsample(s: Scope, x: str, width: int, side: int) -> str:
    """Each pixel four times, then a convolution; to [B, width, side, side]."""
    scales = s.net.constant(np.array([1, 1, 2, 2], dtype=np.float32))
    x = s.op(
        "Resize",
        x,
        "",
        scales,
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    s.net.declare(x, [s.net.batch, width, side, side])
    return _conv(s.at("conv"), x, width, width, 3)


FAMILY = Family(
    "unet",
    {
        "unet-tiny": Preset(
            UnetConfig("16-32", 8, 2, 6, 24, per_level=1, groups=8),
            "diffusion U-Net for tests",
            batch=4,
        ),
        "unet-sd15": Preset(
            UnetConfig("320-640-1280-1280", 64, 8, 77, 768), "Stable Diffusion 1.5 U-Net", batch=64
        ),
    },
    build,
)
