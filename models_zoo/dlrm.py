"""Recommendation (DLRM): a table per categorical feature, dense layers below, pairwise products,
dense layers above.

The interaction takes the D-vectors of the F tables and of the dense features, all F + 1 of them,
and keeps the products of distinct pairs. Table sizes of dlrm-criteo are the row counts of the
Criteo Terabyte set with indices capped at 40 M, as in the MLPerf benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models_zoo.builder import Net, Scope
from models_zoo.layers import linear
from models_zoo.spec import Family, Preset, require

_CRITEO = (
    "39884406-39043-17289-7420-20263-3-7120-1543-63-38532951-2953546-403346-10-2208-11938-155-4-976-14-39979771-25641295-39664984-585935-"
    "12972-108-36"
)


@dataclass(frozen=True)
class DlrmConfig:
    """rows: table sizes joined by "-". width: of every table. bottom, top: layer widths joined by
    "-"; bottom ends in width."""

    rows: str
    width: int
    bottom: str
    top: str
    dense: int = 13


def build(c: DlrmConfig, net: Net) -> None:
    """dense [batch, dense], sparse_0 .. sparse_F-1 [batch] int64 -> logits [batch, last of top]."""
    rows, bottom, top = (
        _sizes(net.name, *pair) for pair in (("rows", c.rows), ("bottom", c.bottom), ("top", c.top))
    )
    require(
        bottom[-1] == c.width,
        f"{net.name}: bottom={c.bottom} ends in {bottom[-1]}, the tables are {c.width} wide",
        f"end it in {c.width}",
    )
    s = net.root
    x = _perceptron(
        s.at("bottom"), net.input("dense", [net.batch, c.dense]), c.dense, bottom, last_relu=True
    )
    vectors = [s.op("Unsqueeze", x, s.ints(1))]
    for i, size in enumerate(rows):
        e = s.at(f"embedding.{i}")
        ids = net.input(f"sparse_{i}", [net.batch], "int64")
        row = e.op("Gather", e.weight("weight", size, c.width, std=c.width**-0.25), ids, axis=0)
        vectors.append(e.op("Unsqueeze", row, e.ints(1)))
    count = len(vectors)
    t, pairs = s.at("interaction"), np.tril_indices(count, -1)
    stack = t.op("Concat", *vectors, axis=1)
    products = t.op(
        "Reshape",
        t.op("MatMul", stack, t.op("Transpose", stack, perm=[0, 2, 1])),
        t.ints(0, count * count),
    )
    distinct = t.op(
        "Gather", products, net.constant((pairs[0] * count + pairs[1]).astype(np.int64)), axis=1
    )
    z = t.op("Concat", x, distinct, axis=1)
    _perceptron(s.at("top"), z, c.width + len(pairs[0]), top, last_relu=False, out="logits")
    net.output("logits", [net.batch, top[-1]])


def _sizes(name: str, option: str, text: str) -> list[int]:
    parts = text.split("-")
    sound = len(parts) <= 1000 and all(
        p.isascii() and p.isdigit() and len(p) <= 12 and int(p) > 0 for p in parts
    )
    require(sound, f"{name}: {option}={text!r} is not a list such as 512-256-128")
    return [int(p) for p in parts]


def _perceptron(
    s: Scope, x: str, size_in: int, sizes: list[int], *, last_relu: bool, out: str = ""
) -> str:
    for i, size in enumerate(sizes):
        last = i == len(sizes) - 1
        x = linear(s.at(f"layers.{i}"), x, size_in, size, out=out if last else "")
        if not last or last_relu:
            x = s.at(f"layers.{i}").op("Relu", x)
        size_in = size
    return x


FAMILY = Family(
    "dlrm",
    {
        "dlrm-tiny": Preset(
            DlrmConfig("100-7-33-250", 16, "32-16", "32-16-1", dense=5),
            "recommendation model for tests",
            batch=8,
        ),
        "dlrm-criteo": Preset(
            DlrmConfig(_CRITEO, 128, "512-256-128", "1024-1024-512-256-1"),
            "MLPerf recommendation model",
            batch=65536,
        ),
    },
    build,
)
