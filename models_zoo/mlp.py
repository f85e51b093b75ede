"""Multi-layer perceptron: in -> hidden -> ... -> hidden -> out, ReLU between.

With mean=1 it is the `mlp` net of the MindSpore comparison: ReLU after the last layer as well, and
a second output, the mean over everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from models_zoo.builder import Net
from models_zoo.layers import linear
from models_zoo.spec import Family, Preset


@dataclass(frozen=True)
class MlpConfig:
    """`layers` counts the matrices."""

    layers: int = 4
    hidden: int = 1024
    in_: int = 1024
    out: int = 1024
    mean: bool = False


def build(c: MlpConfig, net: Net) -> None:
    """input x [batch, in]; output logits [batch, out] (and mean [])."""
    s = net.root
    x = net.input("x", [net.batch, c.in_])
    for i in range(c.layers):
        last = i == c.layers - 1
        size_in, size_out = c.in_ if i == 0 else c.hidden, c.out if last else c.hidden
        layer = s.at(f"layers.{i}")
        x = linear(
            layer.at("linear"), x, size_in, size_out, out="logits" if last and not c.mean else ""
        )
        if not last or c.mean:
            x = layer.op("Relu", x, out="logits" if last else "")
    net.output("logits", [net.batch, c.out])
    if c.mean:
        s.op("ReduceMean", x, s.ints(0, 1), keepdims=0, out="mean")
        net.output("mean", [])


FAMILY = Family(
    "mlp",
    {
        "mlp": Preset(MlpConfig(), "multi-layer perceptron, 4 x 1024", batch=1024),
        "mlp-tiny": Preset(
            MlpConfig(layers=3, hidden=64, in_=32, out=16),
            "perceptron for tests: 32-64-64-16",
            batch=8,
        ),
        "mlp-mindspore": Preset(
            MlpConfig(layers=32, hidden=4096, in_=4096, out=4096, mean=True),
            "MindSpore comparison: layers of 4096, 65536 rows",
            batch=65536,
        ),
    },
    build,
)
