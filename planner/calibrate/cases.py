"""What is measured, and the samples that come back.

A case is a small kernel or collective that every device runs at once, again and again, each time on
what it made the time before. Devices that share something (virtual devices a host's cores, a node's
GPUs its switch) are measured sharing it.

    kind                  shape                     flops    size_bytes (of one device)
    matmul                m, k, k of a type         2 m k^2  operands and result
    stream                one array, x -> a x + b   0        read and written once
    reduce                one array -> a number     0        read once
    tiny                  8 x 8 product             0        none that counts: what starting a
                          kernel takes
    attention             rows tokens, heads of     of causal attention; with `backward` of
                          edge elements             both passes, else of the forward pass
    a collective's kind   payload over a group      0        payload as costmodels.collectives
                          counts it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from costmodels.collectives import COMPILED

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAIN_DTYPE = {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}
"""The type whose products make the curve of efficiency; other types are measured as a multiple of
its rate."""
KIB, MIB = 2**10, 2**20
ATTENTION_TOKENS, ATTENTION_HIDDEN = 16384, 2048
"""Of a case of attention: tokens of all sequences, and heads times their elements."""
LENGTHS = (512, 2048, 8192)
"""Tokens of a sequence of these cases."""
BACKWARD_PRODUCTS = 2.5
"""FLOPs of cuDNN's backward pass, as a multiple of its forward pass."""


@dataclass(frozen=True)
class Case:
    """One thing to measure (module docstring). edge: k of a product; rows: its m. members, stride:
    of a collective's group: devices 0, stride, ... . backward: of attention, both passes."""

    kind: str
    dtype: str = "float32"
    size_bytes: int = 0
    rows: int = 0
    edge: int = 0
    members: int = 1
    stride: int = 1
    backward: bool = False

    @property
    def heads(self) -> int:
        """Heads of attention."""
        return ATTENTION_HIDDEN // self.edge

    @property
    def flops(self) -> float:
        """FLOPs of one run on one device."""
        if self.kind == "attention":
            forward = 2.0 * ATTENTION_TOKENS * self.heads * self.edge * (self.rows + 1)
            return (1 + BACKWARD_PRODUCTS) * forward if self.backward else forward
        return 2.0 * self.rows * self.edge**2


def attention(width: int, tokens: int, backward: bool) -> Case:
    """Causal attention over sequences of so many tokens. Bytes: operands and results of a forward
    pass, and the backward pass's, which reads the result and its gradient too."""
    one = ITEM_BYTES["bfloat16"] * ATTENTION_TOKENS * ATTENTION_HIDDEN
    statistics = 4 * ATTENTION_TOKENS * (ATTENTION_HIDDEN // width)
    size = 4 * one + statistics + (8 * one + statistics if backward else 0)
    return Case("attention", "bfloat16", size, tokens, width, backward=backward)


@dataclass(frozen=True)
class Sample:
    """A case with what it took: seconds of one run (planner.calibrate.worker.summary), and half the
    distance between the quartiles of the rounds as a fraction."""

    case: Case
    time_s: float
    spread: float
    rounds: int

    def to_json(self) -> dict[str, Any]:
        """For the file between two processes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        """What `to_json` wrote."""
        return cls(Case(**data["case"]), data["time_s"], data["spread"], data["rounds"])


def groups(devices: int, node_size: int) -> list[tuple[int, int]]:
    """(members, stride) of the groups that are measured: powers of two of neighbours inside a node,
    then one device of each node, then all of several nodes.

    Groups of one span only: how spans are put together is the model's."""
    pairs = []
    n = 2
    while n <= min(devices, node_size):
        if node_size % n == 0:
            pairs.append((n, 1))
        n *= 2
    if node_size > 1 and (node_size, 1) not in pairs and node_size <= devices:
        pairs.append((node_size, 1))
    nodes = devices // node_size
    n = 2
    while n <= nodes:
        if nodes % n == 0:
            pairs.append((n, node_size))
        n *= 2
    return pairs


def cases(devices: int, node_size: int, kind: str, quick: bool) -> list[Case]:
    """Everything that is measured on `devices` of a kind (cpu, gpu, tpu). Virtual devices of a host
    get sizes that a host can work through."""
    host = kind == "cpu"
    main, other = MAIN_DTYPE[kind], "bfloat16" if host else "float32"
    edges: tuple[int, ...] = (
        (32, 64, 128, 256, 512) if host else (128, 256, 512, 1024, 2048, 4096, 8192)
    )
    sizes: tuple[int, ...] = (
        (64 * KIB, 256 * KIB, MIB, 4 * MIB) if host else (MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    )
    payloads: tuple[int, ...] = (
        (4 * KIB, 64 * KIB, MIB, 4 * MIB) if host else (16 * KIB, MIB, 16 * MIB, 128 * MIB)
    )
    if quick:
        edges, sizes, payloads = edges[::2], sizes[::2], payloads[::2]
    listed = [Case("tiny")]
    products = (
        [(main, e, e) for e in edges]
        + ([] if quick else [(main, 4 * e, e) for e in edges[:-1]])
        + [(other, e, e) for e in edges[1:-1]]
    )
    listed += [Case("matmul", t, ITEM_BYTES[t] * (2 * m * k + k * k), m, k) for t, m, k in products]
    listed += [Case("stream", "float32", 2 * n) for n in sizes]
    listed += [Case("reduce", "float32", n) for n in sizes]
    if kind == "gpu":
        widths, lengths = ((64, 128), (1024, 8192)) if quick else ((64, 128, 256), LENGTHS)
        listed += [attention(w, s, b) for w in widths for s in lengths for b in (False, True)]
    if devices > 1:
        listed += [
            Case(k, "float32", n, members=m, stride=s)
            for k in COMPILED
            for m, s in groups(devices, node_size)
            for n in payloads
        ]
    return listed
