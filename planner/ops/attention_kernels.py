"""Which kernel an emitted program runs each attention with, and why, as far as a plan tells.

    cudnn     cuDNN's flash attention, on NVIDIA GPUs from Ampere on
    splash    Splash attention, on TPUs
    blocks    blocks of queries in plain operations, whose scores pass through memory

On a ring the kernel attends to one piece of keys after the other: those of which no mask hides any,
and under a causal mask the device's own.

Programs choose when they are traced (`attention_kernel` of
planner/emit/runtime/kernels/fused_attention.py, on a ring `piece_kernel` of ring_pieces.py), by the
device they find and the operands they are given; this is the same choice made from the plan, and
tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from costmodels.hardware.device import HeadWidths
from planner.graph.ir import Graph, Node
from planner.sharding.rule import Rule, Split

BLOCKS = "blocks"
CUDNN_ALIGNED = 8
"""What the number of elements of a head is a multiple of, for cuDNN's kernel."""
CUDNN_ROWS = 2
"""What queries and keys are multiples of, for the backward pass of jax's call of that kernel:
programs add one to odd numbers of them."""
SPLASH_ROWS, SPLASH_ALIGNED = 128, 64
"""What Splash's queries, keys and elements of a head are multiples of."""


@dataclass(frozen=True)
class Chosen:
    """kernel: cudnn, splash or blocks; why: what kept a fused kernel from serving, in a few words,
    "" where one serves."""

    kernel: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kernel}: {self.why}" if self.why else self.kernel


def is_attention(node: Node) -> bool:
    """Whether a kernel is chosen for a node: of queries to keys that are all there."""
    return node.op == "Attention"


def has_mask(node: Node) -> bool:
    """Whether an Attention node has a mask beside what positions leave out."""
    return len(node.inputs) > 3 and bool(node.inputs[3])


def has_segments(node: Node) -> bool:
    """Whether the mask of an Attention node is of segments: queries see keys of their own."""
    return bool(node.attrs.get("segments", 0))


def can_balance(node: Node, graph: Graph) -> bool:
    """Whether devices of a ring may exchange halves of their positions for equal shares of the
    work: every query sees the keys up to its own position, and nothing else masks them."""
    queries, keys = graph.shapes(node.inputs[:2])
    plain = not has_mask(node) and not node.attrs.get("window", 0)
    return bool(node.attrs.get("causal", 0)) and plain and queries[2] == keys[2]


def reach_of(node: Node, graph: Graph) -> int:
    """How many positions before a query its window begins, where queries and keys are of the same
    positions and no other mask is there, so that pieces before are left out; 0 for all."""
    queries, keys = graph.shapes(node.inputs[:2])
    window: int = node.attrs.get("window", 0)  # type: ignore[assignment]
    plain = not has_mask(node) and bool(node.attrs.get("causal", 0))
    return max(window - 1, 1) if window and plain and queries[2] == keys[2] else 0


def pieces_met(rule: Rule, local: Mapping[str, int], devices: int) -> int:
    """How many pieces of keys a device meets on a ring of so many, its own among them. local: sizes
    of a device's pieces."""
    sent = next(inner for inner in rule.inner if inner.ring)
    return 1 + sent.times(devices, local)[0]


def is_balanced(rule: Rule, split: Split, mesh: Mapping[str, int]) -> bool:
    """Whether an attention runs on a balanced ring: one that can, and whose devices have as many
    queries as keys, an even number."""
    halves = [inner for inner in rule.inner if inner.halved]
    return bool(halves and split.axes("ring")) and halves[0].runs(rule.local(split, mesh))


def piece_sizes(
    node: Node, graph: Graph, rule: Rule, split: Split, mesh: Mapping[str, int]
) -> tuple[int, int]:
    """(queries, keys) that a kernel of an attention meets at a time: those of a device; around a
    ring those of a piece, on a balanced one of its halves."""
    queries, keys = (shape[2] for shape in graph.shapes(node.inputs[:2]))
    local = rule.local(split, mesh)
    rows, met = local.get("s", queries), local.get("t", keys)
    return (rows // 2, met // 2) if is_balanced(rule, split, mesh) else (rows, met)


def _masks_keys(node: Node, graph: Graph) -> bool:
    """Whether its mask says of each key whether all queries see it, or of which segment it is, for
    all heads alike."""
    mask = graph.tensors[node.inputs[3]]
    return not mask.is_float and all(n == 1 for n in mask.shape[:-1][-2:])


def _fits(width: int, kernel: str, heads: HeadWidths) -> bool:
    """Whether a kernel takes heads of so many elements of keys, with values as wide."""
    if kernel == "cudnn":
        return width <= heads.most and width % CUDNN_ALIGNED == 0
    return kernel != "splash" or width % SPLASH_ALIGNED == 0


# Many parameters: a node and where its plan puts it, and what decides besides about the device and
# the program.
def chosen(
    node: Node,
    graph: Graph,
    rule: Rule,
    split: Split,
    mesh: Mapping[str, int],
    *,
    device_kernel: str,
    head_widths: HeadWidths,
    compute: str,
    partitioned: bool,
) -> Chosen:
    """The kernel of an Attention node. mesh: axis -> size; device_kernel: the one that the device
    has, "" for none; head_widths: of the heads that it takes, of cuDNN's; compute: dtype of
    activations; partitioned: whether the compiler's partitioner places the collectives."""
    queries, keys, values = graph.shapes(node.inputs[:3])
    ring, balanced = bool(split.axes("ring")), is_balanced(rule, split, mesh)
    rows, met = piece_sizes(node, graph, rule, split, mesh)
    local = rule.local(split, mesh)
    width = prod(local[f] for f in rule.results[0][3])  # of a device's values
    masked = has_mask(node) or bool(node.attrs.get("window", 0))
    causal = bool(node.attrs.get("causal", 0))
    even = rows % CUDNN_ROWS == met % CUDNN_ROWS == 0
    latent = head_widths.as_they_are(keys[3], width) and even and not masked
    reasons = {
        "the device has no fused kernel that programs use": not device_kernel,
        "collectives are placed by the compiler": (
            partitioned and not ring and node.attrs.get("kernel") != device_kernel
        ),
        f"it computes in {compute}": compute not in ("bfloat16", "float16"),
        "its keys travel around a ring under a mask of their own": ring and masked,
        "its pieces on a ring cannot be halved": ring and causal and not balanced,
        "its scores are capped": device_kernel == "cudnn" and bool(node.attrs.get("cap", 0)),
        "its mask is not of keys alone": (
            device_kernel == "splash" and has_mask(node) and not _masks_keys(node, graph)
        ),
        "its queries are cut under a causal mask": causal and not ring and rows < queries[2],
        "its queries are cut beside segments": (
            has_segments(node) and not ring and rows < queries[2]
        ),
        "keys are shared by the whole batch": not queries[0] == keys[0] == values[0],
        "keys and values differ in width": (
            queries[3] != keys[3] or values[3] > keys[3] or (ring and width != keys[3])
        ),
        f"its heads have {queries[3]} elements": (
            not latent and not _fits(queries[3], device_kernel, head_widths)
        ),
        f"its pieces on a ring have {rows:,} queries and {met:,} keys": (
            device_kernel == "cudnn" and ring and not even
        ),
        f"a device has {rows:,} queries to {met:,} keys": (
            device_kernel == "splash" and bool(rows % SPLASH_ROWS or met % SPLASH_ROWS)
        ),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    return Chosen(BLOCKS, why) if why else Chosen(device_kernel)
