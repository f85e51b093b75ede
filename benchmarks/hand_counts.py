"""Communication counted by hand, from the sizes of a model and the papers' descriptions alone:
nothing of the planner is read here.

Payload bytes of one device and optimizer step, by (kind, axes); float32, `data` = d devices,
`model` = t. With B rows of S tokens in a microbatch, H wide, an activation is A = 4 B/d S H bytes,
and one number for every token T = 4 B/d S.

    Megatron (Shoeybi et al. 2019), L layers, m microbatches: two all-reduces of A forward and two
    backward a layer (q, k, v read one copy of their operand, gate and up too), one forward behind
    the vocabulary-parallel table, one backward before the head: m (4L + 2) A. The
    vocabulary-parallel loss: maximum, sum of exponentials and the label's logit, 3T forward.
    Gradients: every parameter's piece once over data, a table that is also the head once. Sequence
    parallel (Korthikanti et al. 2022): every such all-reduce becomes a reduce-scatter and, on the
    other side of the norm, an all-gather, with A as the payload of each; what is applied to pieces
    of the sequence (norms, late biases) is summed over model too. Columns and rows in turn (an
    MLP): an all-reduce behind each row-parallel product, and one of the gradient before each
    column-parallel one but the first, whose operand needs none.

The loss itself is one number over data. A table of learned positions is read by every row of the
batch: its S rows are one value of S x H, whose gradient is summed over data in each microbatch; cut
by sequence, each piece is summed and the pieces gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

Counts = dict[tuple[str, str], int]
FLOAT = 4


@dataclass(frozen=True)
class Sizes:
    """A transformer. kv: width of keys and values. gated: SwiGLU (gate and up); positions: rows of
    a learned table (0: rotary); bias: on every product but the head; norm: vectors of a norm
    (RMSNorm 1, LayerNorm 2); tied: the head is the token table.
    """

    layers: int
    hidden: int
    kv: int
    ff: int
    vocab: int
    seq: int
    gated: bool
    positions: int
    bias: bool
    norm: int
    tied: bool


GPT = Sizes(
    layers=2,
    hidden=64,
    kv=64,
    ff=256,
    vocab=512,
    seq=16,
    gated=False,
    positions=16,
    bias=True,
    norm=2,
    tied=True,
)
LLAMA = Sizes(
    layers=2,
    hidden=64,
    kv=64,
    ff=176,
    vocab=512,
    seq=16,
    gated=True,
    positions=0,
    bias=False,
    norm=1,
    tied=False,
)
MLP = (32, 64, 64, 16)
"""Widths of an MLP's layers, input first."""


def transformer(
    s: Sizes, batch: int, data: int, model: int, microbatches: int = 1, *, sequence: bool = False
) -> Counts:
    """Megatron's bytes for one device, without recomputation and with whole optimizer state. batch:
    rows of one microbatch, all devices."""
    token = FLOAT * batch // data * s.seq
    activation = token * s.hidden
    layer = 2 * s.hidden * s.hidden + 2 * s.hidden * s.kv + (3 if s.gated else 2) * s.hidden * s.ff
    early = (
        s.hidden + 2 * s.kv + s.ff if s.bias else 0
    )  # biases of column-parallel products: cut as their columns
    late = (
        2 * s.hidden if s.bias else 0
    ) + 2 * s.norm * s.hidden  # biases behind a sum over model, and norms: whole on every device
    tables = s.vocab * s.hidden * (1 if s.tied else 2)
    cut = (s.layers * (layer + early) + tables) // model
    whole = s.layers * late + s.norm * s.hidden
    moved = microbatches * (4 * s.layers + 2) * activation
    rows = microbatches * FLOAT * s.seq * s.hidden if s.positions else 0
    loss = microbatches * FLOAT
    if not sequence:
        return {
            ("all-reduce", "model"): moved + microbatches * 3 * token,
            ("all-reduce", "data"): FLOAT * (cut + whole) + rows + loss,
        }
    return {
        ("reduce-scatter", "model"): moved,
        ("all-gather", "model"): moved + rows,
        ("all-reduce", "model"): microbatches * 3 * token,
        ("all-reduce", "data"): FLOAT * cut + rows // model + loss,
        ("all-reduce", "data+model"): FLOAT * whole,
    }


def perceptron(
    widths: tuple[int, ...], batch: int, data: int, model: int, microbatches: int = 1
) -> Counts:
    """Alternately column- and row-parallel layers with biases, the classes of the loss cut where
    the last layer is column-parallel."""
    layers = list(zip(widths, widths[1:], strict=False))
    rows = FLOAT * batch // data
    behind = sum(n for _, n in layers[1::2])
    before = sum(k for k, _ in layers[2::2])
    loss = 3 if len(layers) % 2 else 0
    columns, late = layers[::2], layers[1::2]
    parameters = sum((k * n + n) // model for k, n in columns) + sum(
        k * n // model + n for k, n in late
    )
    return {
        ("all-reduce", "model"): microbatches * rows * (behind + before + loss),
        ("all-reduce", "data"): FLOAT * (parameters + microbatches),
    }
