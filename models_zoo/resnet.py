"""Residual convolution networks, with the stride in the 3x3 convolution and BatchNormalization live
or frozen.

training=1 writes BatchNormalization with training_mode=1 and its three outputs (batch statistics,
and the running mean and variance updated from them); training=0 uses the running ones. Running
statistics are initializers, not parameters. mean=1 is the MindSpore comparison's net, operator for
operator: the pooling is a ReduceMean, and the mean of the logits is a second output "mean".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models_zoo.builder import Net, Scope
from models_zoo.layers import linear
from models_zoo.spec import Family, Preset, require


@dataclass(frozen=True)
class ResnetConfig:
    """blocks: residual blocks of each stage, joined by "-". width: channels of the first stage;
    each stage doubles them."""

    blocks: str
    block: Literal["basic", "bottleneck"] = "bottleneck"
    width: int = 64
    image: int = 224
    classes: int = 1000
    training: bool = False
    mean: bool = False

    @property
    def expansion(self) -> int:
        """Channels out of a block over those of its 3x3 convolution."""
        return 4 if self.block == "bottleneck" else 1


def build(c: ResnetConfig, net: Net) -> None:
    """pixel_values [batch, 3, image, image] -> logits [batch, classes] (and mean [])."""
    counts = c.blocks.split("-")
    sound = len(counts) <= 8 and all(
        n.isascii() and n.isdigit() and 0 < int(n) <= 1000 for n in counts
    )
    require(
        sound,
        f"{net.name}: blocks={c.blocks!r} is not a list such as 3-4-6-3",
        "one to eight stages of 1 to 1000 blocks",
    )
    smallest = 2 ** (len(counts) + 1)
    require(
        c.image >= smallest,
        f"{net.name}: image={c.image} is smaller than {smallest}, which {len(counts)} stages halve"
        " to 1",
    )
    s = net.root
    x = net.input("pixel_values", [net.batch, 3, c.image, c.image])
    x = s.at("stem").op("Relu", _conv_norm(s.at("stem"), x, (3, c.width), 7, 2, c))
    x = s.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = c.width
    for stage, count in enumerate(counts):
        width = c.width * 2**stage
        for i in range(int(count)):
            stride = 2 if stage and not i else 1
            x = _block(s.at(f"layer{stage + 1}/{i}"), x, (channels, width), stride, c)
            channels = width * c.expansion
    x = (
        s.op("ReduceMean", x, s.ints(2, 3), keepdims=0)
        if c.mean
        else s.op("Flatten", s.op("GlobalAveragePool", x), axis=1)
    )
    linear(s.at("fc"), x, channels, c.classes, out="logits")
    net.output("logits", [net.batch, c.classes])
    if c.mean:
        s.op("ReduceMean", "logits", s.ints(0, 1), keepdims=0, out="mean")
        net.output("mean", [])


def _conv_norm(
    s: Scope, x: str, channels: tuple[int, int], kernel: int, stride: int, c: ResnetConfig
) -> str:
    size_in, size_out = channels
    w = s.at("conv").weight(
        "weight", size_out, size_in, kernel, kernel, std=(2 / (size_in * kernel**2)) ** 0.5
    )
    y = s.op("Conv", x, w, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4)
    n = s.at("bn")
    scale, bias = (
        n.weight("weight", size_out, std=0.1, mean=1.0),
        n.weight("bias", size_out, std=0.1),
    )
    statistics = (
        n.weight("running_mean", size_out, std=0.1),
        n.weight("running_var", size_out, std=0.1, mean=1.0),
    )
    mode = int(c.training)
    return s.ops(
        3 if mode else 1,
        "BatchNormalization",
        y,
        scale,
        bias,
        *statistics,
        epsilon=1e-5,
        momentum=0.9,
        training_mode=mode,
    )[0]


def _block(s: Scope, x: str, channels: tuple[int, int], stride: int, c: ResnetConfig) -> str:
    size_in, width = channels
    size_out = width * c.expansion
    if c.block == "bottleneck":
        y = s.at("conv1").op("Relu", _conv_norm(s.at("conv1"), x, (size_in, width), 1, 1, c))
        y = s.at("conv2").op("Relu", _conv_norm(s.at("conv2"), y, (width, width), 3, stride, c))
        y = _conv_norm(s.at("conv3"), y, (width, size_out), 1, 1, c)
    else:
        y = s.at("conv1").op("Relu", _conv_norm(s.at("conv1"), x, (size_in, width), 3, stride, c))
        y = _conv_norm(s.at("conv2"), y, (width, width), 3, 1, c)
    if stride != 1 or size_in != size_out:
        x = _conv_norm(s.at("downsample"), x, (size_in, size_out), 1, stride, c)
    return s.op("Relu", s.op("Add", y, x))


FAMILY = Family(
    "resnet",
    {
        "resnet-tiny": Preset(
            ResnetConfig("1-1", "basic", width=8, image=32, classes=10),
            "residual network for tests",
            batch=8,
        ),
        "resnet18": Preset(ResnetConfig("2-2-2-2", "basic"), "ResNet-18", batch=256),
        "resnet50": Preset(ResnetConfig("3-4-6-3"), "ResNet-50", batch=256),
        "resnet101": Preset(ResnetConfig("3-4-23-3"), "ResNet-101", batch=256),
        "resnet152": Preset(ResnetConfig("3-8-36-3"), "ResNet-152", batch=256),
        "resnet50-mindspore": Preset(
            ResnetConfig("3-4-6-3", classes=1024, training=True, mean=True),
            "MindSpore comparison: live norms, 1024 classes",
            batch=1024,
        ),
    },
    build,
)
