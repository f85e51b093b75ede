"""What an operator says of its own cost where the usual formulas do not fit.

`Pieces` is what a price asks about; `Reads` and `Product` are answers about the backward pass. An
operator's entry in the table (`planner.ops.base.Operator`) names functions over these records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import prod

import numpy as np

from costmodels.hardware.device import AttentionPass, HeadWidths
from planner.graph.ir import Graph, Node
from planner.sharding.layout import local_shape
from planner.sharding.rule import Rule, Split

Slots = frozenset[int]


@dataclass(frozen=True)
class Reads:
    """Operand slots whose values the gradient needs, and whether it needs what only the kernel
    knows (its result, row sums)."""

    slots: Slots = frozenset()
    inside: bool = False

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """The slots, ascending."""
        return tuple(sorted(self.slots))


def bilinear(present: Slots, trained: Slots) -> Reads:
    """A result that is linear in each operand: the gradient of one reads the others."""
    return Reads(frozenset(i for i in present if trained - {i}))


def normalising(present: Slots, trained: Slots) -> Reads:
    """A normalisation of operand 0 with the scale in slot 1, the shift in slot 2 and statistics
    behind: gradients of the data and of the scale read the data and the statistics."""
    data = {0} if trained & {0, 1} else set()
    scale = {1} if 0 in trained else set()
    return Reads(frozenset(data | scale | {i for i in present if i > 2}), bool(trained & {0, 1}))


@dataclass(frozen=True)
class Product:
    """A dot of a node's kernel: FLOPs of one device's forward pass, how many dots as large its
    backward pass has, how many more it recomputes (attention's scores), and whether the backward
    pass needs the product itself, so that a recomputed node runs it even where nobody reads the
    node's result. beyond: FLOPs of the backward pass for rows of the neighbours. multiplied: how
    many of the backward pass are sums of one term, which compilers multiply: work, but no dots.
    computed: what part of these FLOPs the emitted kernel computes (attention skips masked keys,
    heads of odd vocabularies are padded)."""

    flops: Fraction
    backward: int
    recomputed: int = 0
    inside: bool = False
    beyond: Fraction = Fraction(0)
    multiplied: int = 0
    computed: Fraction = Fraction(1)

    def counted(self, as_compiled: bool) -> Fraction:
        """FLOPs of a forward pass: as compiled, or those of the products as they are defined."""
        return self.flops * self.computed if as_compiled else self.flops


@dataclass(frozen=True)
class Dots:
    """A node of which the dots are asked. flops: of one device's forward pass; trained: slots of
    operands with a gradient (none where no result has one); share: what part of each factor a
    device works through, the whole of factors it does not name; pairs: into how many pieces each
    pair of factors is cut, one where it is not named."""

    node: Node
    rule: Rule
    shapes: tuple[tuple[int, ...], ...]
    trained: Slots
    share: Mapping[str, Fraction]
    pairs: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def flops(self) -> Fraction:
        """FLOPs of one device's forward pass."""
        return prod(self.share.values()) * Fraction(self.rule.flops)


@dataclass(frozen=True)
class Pieces:
    """A node whose price is asked, and what one device has of it under each of several splits.

    mesh: axis -> size, in the order of the mesh. share: part of all index tuples of the rule's
    factors that one device has, padding included, without the factor that is named [splits].
    itemsize: bytes of an element of a type as it is computed with; weight_itemsize: of a weight as
    it is kept. bytes_of: bytes of a tensor's
    piece of a shape. trained: whether a backward pass follows. repeated: whether the node is in a
    repeated block. trained_slots: operands with a gradient; backward: work of the backward pass as
    a multiple of the forward pass, of nodes with products. attention_kernel: the fused attention
    of the device, "" for none; head_widths: of the heads that it takes. compute: dtype
    of activations. partitioned: whether the compiler's partitioner places the collectives.
    on_chip: bytes of a core's own memory, of TPUs. float8: whether the device multiplies it.
    grouped_experts: whether one kernel multiplies the rows of all experts of a device. programs:
    whether what is priced is an emitted program, and no framework's. serves: whether it is an
    engine's.
    """

    node: Node
    graph: Graph
    rule: Rule
    splits: Sequence[Split]
    mesh: Mapping[str, int]
    share: Callable[[str], np.ndarray]
    itemsize: Callable[[str], float]
    weight_itemsize: Callable[[str], float]
    bytes_of: Callable[[str, tuple[int, ...]], float]
    trained: bool
    repeated: bool
    trained_slots: Slots
    backward: float
    attention_kernel: str
    head_widths: HeadWidths
    compute: str
    partitioned: bool
    on_chip: int = 0
    float8: bool = False
    grouped_experts: bool = False
    programs: bool = True
    serves: bool = False

    def operand_shape(self, slot: int, split: Split) -> tuple[int, ...]:
        """Shape of one device's piece of an operand."""
        layout = self.rule.operand(slot, split, tuple(self.mesh))
        return local_shape(self.graph.tensors[self.node.inputs[slot]].shape, layout, self.mesh)

    def result_shape(self, k: int, split: Split) -> tuple[int, ...]:
        """Shape of one device's piece of a result, of those that are wanted."""
        layout = self.rule.result(k, split, tuple(self.mesh))
        name = [o for o in self.node.outputs if o][k]
        return local_shape(self.graph.tensors[name].shape, layout, self.mesh)


@dataclass(frozen=True)
class Kernel:
    """A kernel of one device: FLOPs, bytes moved, how often it runs (on average). attention:
    the pass of the device's fused attention, whose rate is its own.
    """

    flops: float
    moved_bytes: float
    often: float = 1
    attention: AttentionPass | None = None


Passes = tuple[tuple[Kernel, ...], tuple[Kernel, ...]]
"""The kernels of a node's forward pass and of its backward pass."""
