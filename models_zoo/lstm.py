"""Stacked LSTM over a sequence of vectors, with a linear head on every step."""

from __future__ import annotations

from dataclasses import dataclass

from models_zoo.builder import Net
from models_zoo.layers import linear
from models_zoo.spec import Family, Preset


@dataclass(frozen=True)
class LstmConfig:
    """in, hidden, out: widths."""

    layers: int
    in_: int
    hidden: int
    out: int
    seq: int


def build(c: LstmConfig, net: Net) -> None:
    """x [batch, seq, in] -> logits [batch, seq, out]. Gates are stored in ONNX's order: input,
    output, forget, cell."""
    s = net.root.at("lstm")
    x = s.op("Transpose", net.input("x", [net.batch, c.seq, c.in_]), perm=[1, 0, 2])
    for i in range(c.layers):
        layer, size_in, std = s.at(f"layers.{i}"), c.hidden if i else c.in_, c.hidden**-0.5
        w = layer.weight("weight_ih", 1, 4 * c.hidden, size_in, std=std)
        r = layer.weight("weight_hh", 1, 4 * c.hidden, c.hidden, std=std)
        steps = layer.op(
            "LSTM", x, w, r, layer.weight("bias", 1, 8 * c.hidden, std=0.1), hidden_size=c.hidden
        )
        x = layer.op("Squeeze", steps, layer.ints(1))  # [seq, 1 direction, batch, hidden]
    linear(net.root.at("head"), s.op("Transpose", x, perm=[1, 0, 2]), c.hidden, c.out, out="logits")
    net.output("logits", [net.batch, c.seq, c.out])


FAMILY = Family(
    "lstm",
    {
        "lstm-tiny": Preset(LstmConfig(2, 16, 32, 10, 12), "recurrent network for tests", batch=4),
        "lstm-1k": Preset(
            LstmConfig(4, 1024, 1024, 1024, 128), "recurrent network, 4 x 1024", batch=128
        ),
    },
    build,
)
