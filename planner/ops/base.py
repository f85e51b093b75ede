"""What an operator is to the planner: a rule, a kernel as source text, and what its backward pass
keeps.

The kernel is an expression in `jnp`, `jax`, `lax` and the helpers of planner/emit/runtime; it is
the text that is emitted, the text the oracle runs, and the text the ONNX backend runs. It sees
local shapes only (padding included).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

import numpy as np

from planner.graph.ir import AttrValue, Graph, Node
from planner.ops.cost import Dots, Passes, Pieces, Product, Reads, Slots
from planner.ops.ties import Tie
from planner.sharding.layout import Axes, group, padded
from planner.sharding.rule import Rule, Split


class NoRule(Exception):
    """This instance of the operator has no rule: it is planned replicated, and reported. `whole`
    may say what its work is all the same."""

    def __init__(self, why: str, whole: Rule | None = None) -> None:
        super().__init__(why)
        self.whole = whole


class Special(float):
    """An infinity or NaN: its repr, unlike that of a float, is an expression."""

    def __repr__(self) -> str:
        return f'float("{float(self)}")'

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)


def spelled(value: AttrValue) -> AttrValue:
    """An attribute whose repr is Python source."""
    if isinstance(value, float) and not math.isfinite(value):
        return Special(value)
    if isinstance(value, tuple):
        return tuple(
            Special(v) if isinstance(v, float) and not math.isfinite(v) else v for v in value
        )  # type: ignore[return-value]
    return value


@dataclass(frozen=True)
class Call:
    """One kernel call: operand expressions and everything local about it.

    args: operand expressions ("" for an absent optional). local: local size per factor. in_shapes /
    out_shapes: local shapes. global_in / global_out: true global shapes. trained: whether a
    backward pass follows. helpers: names of runtime helpers the text uses (filled by `use`).
    """

    node: Node
    rule: Rule
    split: Split
    mesh: Mapping[str, int]
    args: tuple[str, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    global_in: tuple[tuple[int, ...], ...]
    global_out: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()
    out_dtypes: tuple[str, ...] = ()
    trained: bool = False
    trained_slots: frozenset[int] = frozenset()
    """Operands that have a gradient."""
    helpers: set[str] = field(default_factory=set)
    functions: tuple[str, ...] = ()
    """Names of the functions that were written for the node's bodies; `made`: type of each of their
    results, and axes over which its pieces differ."""
    made: tuple[tuple[str, Axes], ...] = ()
    saved_as: str = ""
    """What checkpoint policies call the result, of an operator that `names_itself`."""
    float8: bool = False
    """Whether its product runs with float8 operands (planner.execution.eight_bit)."""
    wide: int = 0
    """Local size, with padding, of the factor that its operator `pads`; 0 where none is added
    (planner.execution.odd_heads)."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "node",
            replace(self.node, attrs={k: spelled(v) for k, v in self.node.attrs.items()}),
        )

    def attr(self, name: str, default: AttrValue | None = None) -> AttrValue:
        """Attribute value; KeyError when it is missing and has no default."""
        return self.node.attrs[name] if default is None else self.node.attrs.get(name, default)

    def use(self, helper: str) -> str:
        """Name of a runtime helper, noting that the program needs its source."""
        self.helpers.add(helper)
        return helper

    def axes(self, factor: str) -> Axes:
        """Mesh axes that cut the factor, alone or in a pair (or those of the pair of that name)."""
        return self.rule.axes(factor, self.split, tuple(self.mesh))

    def axis_text(self, factor: str) -> str:
        """The axes as a literal for lax: `"tensor"` or `("data", "tensor")`."""
        return axes_text(self.axes(factor))

    def start(self, factor: str) -> str:
        """Expression of the first global index of this device's piece of the factor ("0" when it is
        not cut)."""
        axes = self.axes(factor)
        if not axes:
            return "0"
        piece = padded(self.rule.sizes[factor], axes, self.mesh) // group(axes, self.mesh)
        return f"lax.axis_index({axes_text(axes)}) * {piece}"

    def padded(self, factor: str) -> bool:
        """Whether the factor's pieces hold padding."""
        return bool(self.rule.sizes[factor] % group(self.axes(factor), self.mesh))


JNP = {"float64": "float32", "int64": "int32", "uint64": "uint32", "bool": "bool_"}


def jnp_dtype(dtype: str) -> str:
    """Expression of a dtype as jax holds it: 64-bit types as 32-bit ones; names of the program
    (COMPUTE) as they are."""
    return dtype if dtype.isupper() else f"jnp.{JNP.get(dtype, dtype)}"


def axes_text(axes: Axes) -> str:
    """Axis names as a Python literal, a bare string when there is one."""
    names = ", ".join(f'"{a}"' if a.isidentifier() and a.isascii() else ascii(a) for a in axes)
    return names if len(axes) == 1 else f"({names})"


def tuple_text(axes: Axes) -> str:
    """Axis names as a Python literal, always a tuple."""
    return f"({axes_text(axes)},)" if len(axes) == 1 else axes_text(axes)


Kind = Literal[
    "", "attention", "convolution", "experts", "lookup", "loss", "norm", "product", "recurrent"
]


@dataclass(frozen=True)
class Operator:
    """All that the planner knows of an operator: no other room names it.

    Only the first four fields are asked for; each of the others says where the operator differs
    from what is usual.
    """

    name: str
    rule: Callable[[Node, Graph], Rule]
    """rule(node, graph) -> Rule, or raises NoRule."""
    kernel: Callable[[Call], str]
    """kernel(call) -> expression text (a tuple when there are several results)."""
    saves: str = "in"
    """What the backward pass reads: "in" operands, "out" results, or explicit slots such as
    "in0 in2"; "" nothing."""
    kind: Kind = ""
    """What it is to those who treat several operators alike: convolutions are slow in loops of some
    compilers, tables of lookups are offloaded, scales of norms start at one."""

    # What the time of its kernels is.
    traffic: float = 1.0
    """How many times results and operands cross memory, for memory-bound pricing (1: each operand
    is read once, each result is written once)."""
    gpu_backward: float = 2.0
    """What its backward pass takes on GPUs, in forward passes, for memory-bound pricing."""
    gpu_sums: int = 0
    """Launches that it takes beside there, where operand 1 has a gradient: sums over rows end in
    kernels of few blocks."""
    gpu_beside: int = 0
    """Kernels that run beside the one that reads its operands there, each over as much as its
    result."""
    fusible: bool = False
    """Whether a compiler fuses it into its neighbours (element-wise work): its operands are then
    not read again from memory."""
    free: bool = False
    """Whether its result is its operand under another name or shape: no kernel runs."""
    passes: Callable[[Pieces, np.ndarray, np.ndarray], list[Passes]] | None = None
    """(pieces, bytes of operands, bytes of results [splits]) -> the kernels of both passes under
    each split, where the backward pass is not a multiple of the forward one."""
    filling: Callable[[Node, Rule, Split, Mapping[str, int], bool], Fraction] | None = None
    """(node, rule, split, mesh, whether a backward pass follows) -> what rounding up blocks of rows
    adds to a device's work, as a factor."""

    busiest: Callable[[Node, Rule, Split, Mapping[str, int]], float] | None = None
    """(node, rule, split, mesh) -> work of the busiest device over the mean, where what it gets is
    decided by the data."""

    # What the memory of its kernels is.
    workspace: Callable[[Pieces, np.ndarray], np.ndarray] | None = None
    """(pieces, bytes of the results [splits]) -> bytes that live while it runs, in the backward
    pass where one follows, beside operands and results [splits]."""
    in_place: bool = False
    """Whether the gradient of its operands takes the operands' place."""
    saves_beside: Callable[[Pieces], np.ndarray] | None = None
    """Bytes that its kernel saves for the backward pass beside tensors of the graph [splits]."""

    names_itself: bool = False
    """Whether the kernel's text names the result for checkpoint policies (`Call.saved_as`)."""
    gathers: str = ""
    """Factor whose pieces all read operand 0 whole, where other readers of it may have rows of
    their own: the backward pass needs it so."""
    named_beside: Callable[[Pieces], np.ndarray] | None = None
    """Bytes that are saved with its result where that is saved by name [splits]."""

    # What its backward pass is.
    gradient: Callable[[Slots, Slots], Reads] | None = None
    """(slots that are there, slots with a gradient) -> what the gradients read, where they read
    other operands than `saves`."""
    products: Callable[[Dots], tuple[Product, ...]] | None = None
    """Its dots, where they are not one forward and one as large for each operand with a
    gradient."""
    differentiable: bool = True
    """Whether gradients flow through it."""
    compares: bool = False
    """Whether one comparison remakes its result from its operand: a matrix product's kernel does so
    as it reads it."""
    keeps_slope: Callable[[Node], bool] = lambda node: False
    """Whether compilers keep one more tensor of its result's size from its forward to its backward
    pass where both stand in one computation, outside loops: what its slope is made of."""
    kept_unlooped: Callable[[Pieces], np.ndarray] | None = None
    """Bytes that compilers keep from its forward pass to its backward pass where both stand in one
    computation, outside loops: what both make alike. [splits]"""
    looks_again: bool = False
    """Whether its backward pass reads operands in element-wise kernels, which make them again from
    what they were made of, though its forward pass is none."""
    lays_out_anew: bool = False
    """Whether its kernel reads the operand channel by channel, in another order of dims than that
    of convolutions: its result is a copy in theirs, which no other kernel makes again."""
    adds: tuple[int, ...] = ()
    """Operands whose gradient is the result's, summed over the dims that the operand has not."""
    commutes: bool = False
    """Whether its two operands may change places."""
    rearranges: bool = False
    """Whether the operand's gradient is the result's, with its elements in another order."""

    # What its operands and factors mean.
    roles: Mapping[str, str] = field(default_factory=dict)
    """Factor -> the role of mesh axes that cut it."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Factor -> a plain word for it."""
    starts_at_one: tuple[int, ...] = ()
    """Operands whose fresh values are near 1: scales and variances (`lookup.starts_at_one`)."""
    own_precision: tuple[int, ...] = ()
    """Operands that the kernel reads as precise as they are, whatever the others are."""
    passes_values: bool = False
    """Whether the values of its result are values of its operands: whole numbers that go through
    it look up the same rows."""
    index_limit: Callable[[Node, Graph, int], int] | None = None
    """(node, graph, slot) -> exclusive upper bound of the whole numbers in that operand, 0 for
    none."""
    extents: bool = False
    """Whether its whole factors are extents like any other, not windows, counts or state sizes."""
    counted: str = ""
    """A factor that an attribute, or the meaning of the operator, counts."""
    ties: Callable[[Node, Graph], Iterator[Tie]] | None = None
    """How extents of operands and results hang together where the rule does not say."""
    caches: tuple[int, ...] = ()
    """Operands that are caches, which a program keeps among its weights."""
    sums_last: Callable[[Node, int], bool] | None = None
    """(node, slot) -> whether the product sums over the last dim of a weight in that slot."""
    matrices: Callable[[Node], tuple[int, ...]] = lambda node: ()
    """Operands whose last two dims are a matrix that vectors are multiplied by, another for each
    index of the dims before."""
    float8: Callable[[Node], bool] | None = None
    """Whether a node's kernel has a form whose operands are float8."""
    pads: str = ""
    """A factor to which the kernel of a product can add padding, and which a loss can leave out of
    its sums (`Call.wide`)."""
    by_piece: Callable[[Node], bool] = lambda node: False
    """Whether a compiler's partitioner cannot cut a node's kernel: programs for it run the kernel
    on each device's pieces."""

    def cached(self, node: Node) -> tuple[str, ...]:
        """The operands of a node that are caches."""
        return tuple(node.inputs[k] for k in self.caches if k < len(node.inputs))

    def reads(self, present: Slots, trained: Slots) -> Reads:
        """Operands that the gradients of operands `trained` read, of those that are `present`."""
        if self.gradient is not None:
            return self.gradient(present, trained)
        words = self.saves.split()
        slots = present if "in" in words else {int(w[2:]) for w in words if w.startswith("in")}
        return Reads(present & slots, "out" in words)


OPERATORS: dict[str, Operator] = {}


def _no_rule(node: Node, graph: Graph) -> Rule:
    raise NoRule("unknown")


def _no_kernel(call: Call) -> str:
    raise NoRule("unknown")


_UNKNOWN = Operator("", _no_rule, _no_kernel)


def operator_of(name: str) -> Operator:
    """The operator of a name; of a name that the table lacks what is usual of operators."""
    return OPERATORS.get(name, _UNKNOWN)


def register(*operators: Operator) -> None:
    """Add operators to the table (one name, one operator)."""
    for op in operators:
        if op.name in OPERATORS:
            raise ValueError(f"operator {op.name} is registered twice")
        OPERATORS[op.name] = op
