"""The canonical graph: what every room after the reader works on.

A `Graph` is a static-shape, opset-free view of a model. The reader removes what does not matter for
planning (opset versions, shape arithmetic, constant inputs that are really attributes), so that
each operator has one spelling.

Canonical operators (`Node.op`), with their inputs and attributes. Axes are always non-negative.
Operands that ONNX passes as constant tensors (shapes, axes, slice bounds, pads) are attributes here
or follow from the output shape.

    element-wise, one operand   Relu Sigmoid Tanh Erf Exp Log Sqrt Reciprocal Neg Abs Sin Cos
                                Softplus Silu IsNaN Not Floor Ceil Round Sign Elu(alpha)
                                LeakyRelu(alpha) HardSigmoid(alpha, beta) Gelu(approximate:
                                "none"|"tanh") Clip(min, max: float or absent) Cast(to: dtype name)
                                Dropout(ratio, training_mode)
    element-wise, broadcasting  Add Sub Mul Div Pow Max Min Mod Equal Less LessOrEqual Greater
                                GreaterOrEqual And Or Xor (two operands; variadic ones are chained)
                                and Where(condition, a, b)
    MatMul(a, b)                attrs trans_a, trans_b (0|1: last two dims swapped); any rank >= 2,
                                batch dims broadcast (Gemm -> MatMul [+ Mul] + Add)
    Einsum(...)                 attr equation
    ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd   attrs axes (tuple), keepdims (0|1);
                                                          GlobalAveragePool -> ReduceMean(axes=2..,
                                                          keepdims=1)
    Softmax LogSoftmax Hardmax  attr axis (one axis)
    LayerNormalization(x, scale[, bias])  attrs axis, epsilon;   RMSNormalization(x, scale)  attrs
                                          axis, epsilon
    InstanceNormalization(x, scale, bias) attr epsilon;  GroupNormalization(x, scale, bias) attrs
                                                         num_groups, epsilon
    BatchNormalization(x, scale, bias, mean, var)         attrs epsilon, momentum, training_mode
    Reshape(x)                  target = output shape (Flatten, Squeeze, Unsqueeze too);
                                Transpose(x) attr perm;  Expand(x) target = output shape
    Concat(...) attr axis;  Split(x) attr axis (sizes = output shapes);  Slice(x) attrs axes,
                            starts, ends, steps (ends clipped to the dim; -1 = before 0 for steps <
                            0)
    Pad(x)                      attrs pads (all begins, then all ends), mode, value
    Tile(x) attr repeats;  Trilu(x) attrs k, upper
    Gather(data, indices) attr axis;  GatherElements(data, indices) attr axis;  GatherND(data,
                                      indices) attr batch_dims
    ScatterElements(data, indices, updates) attrs axis, reduction;  ScatterND(data, indices,
        updates) attr reduction
    Conv(x, w)                  attrs strides, pads (begins then ends), dilations, group (a bias
                                becomes Reshape + Add)
    ConvTranspose(x, w)         attrs as Conv, and output_padding
    MaxPool AveragePool(x)      attrs kernel_shape, strides, pads, dilations, ceil_mode,
                                count_include_pad
    Resize(x)                   attrs mode ("nearest"|"linear"|"cubic"), coordinate_mode,
                                nearest_mode, scales (float per dim)
    TopK(x)                     attrs k, axis, largest, sorted; outputs values, indices
    CumSum(x) attrs axis, exclusive, reverse;  OneHot(indices) attrs axis, depth, on_value,
                                               off_value;  ArgMax(x) attrs axis, keepdims
    RandomUniform() RandomNormal()   numbers that are drawn: attrs low, high / mean, scale, and
                                     dtype; with a seed as operand, and the next one as a result,
                                     once the mode is chosen (planner.workload.train_eval_mode)
    Range() ConstantOfShape()   only when too large to fold: attrs start, delta / value
    LSTM(x, w, r[, b, , h0, c0]) attrs hidden_size, direction, (activations default);  GRU likewise,
        linear_before_reset
    Attention(q, k, v[, mask])  q [B,H,S,D], k [B,G,T,D], v [B,G,T,E], G divides H; attrs scale
                                (float), causal (0|1); mask broadcasts to [B,H,S,T], bool (True =
                                attend) or float (added to the scores); rows that are masked
                                everywhere give zeros when attr guard = 1; attr window > 0 (only
                                with causal = 1): query i sees keys i - window + 1 to i; attr cap
                                > 0: scores x become cap tanh(x / cap) before the mask; attr
                                segments = 1 (packed sequences): the mask is whole numbers [B,1,1,T]
                                with T = S, and queries see keys of their own number
    CachedAttention(q, k, v, past_k, past_v[, mask])  of new tokens, k [B,G,S,D], to a cache past_k
                                                      [B,G,T,D], past_v [B,G,T,E] and, causally, to
                                                      each other; attrs scale, cap;
                                mask as above, of the cache's keys. Made by planner.serving, never
                                by the reader
    CachedLatentAttention(q, q_rotated, latent, key, past_latent, past_key[, mask])  of new tokens
                                to a cache of latents past_latent [B,1,T,R] and keys that rotate,
                                past_key [B,1,T,P], which all heads share: q [B,H,S,R], q_rotated
                                [B,H,S,P]; latents are the values; attrs scale, cap; mask of the
                                cache's keys, alike for all heads. Made by planner.serving
    HeadProduct(x, w)           w [R, H*M], or [H*M, R] where attr transposed = 1; x [B,H,S,N] by
                                columns start .. start+N of each head's M -> [B,H,S,R]; where attr
                                back = 1 x [B,H,S,R] by them -> [B,H,S,N]. Made by planner.serving
    LinearAttention(q, k, v, decay[, beta[, past]])  q, k [B,T,G,N], v [B,T,H,P], decay, beta
                                [B,T,H] -> [B,T,H,P], H/G heads in a row sharing a group's q and k:
                                along T a state of each head, from past [B,H,N,P] or zeros,
                                s = exp(decay) s, then s += k (beta (v - k s)), or s += k v without
                                beta, and scale q s; and the last states [B,H,N,P]; attrs scale,
                                chunk (steps that the kernel takes at once), kept = 1 (made by
                                planner.serving): states are [B,H,P,N] and float32
    ConvStep(past, x, w)        the last position of a convolution of each channel [B,C,1] over
                                earlier rows past [B,C,K-1] and x [B,C,1] by w [C,1,K]; and the rows
                                but for the first [B,C,K-1]. Made by planner.serving
    RotaryEmbedding(x, cos, sin)  x [B,H,S,D]; cos, sin broadcast to x ([..,S,D], halves repeated):
                                  x*cos + rotate_half(x)*sin
    RoutedExperts(x, index, share[, gate], up, down[, gate's bias, up's, down's])   x [.., H];
        index, share [.., K]; stacks [E,H,F] ([E,F,H] where attr
                                trans_in = 1) and [E,F,H] ([E,H,F] where trans_out = 1), biases
                                [E,F], [E,H]; attr activation (planner.ops.experts.MIXES, or
                                swiglu): sum over j of share[j] *
                                down[index[j]](activation(gate[index[j]] x) * up[index[j]] x);
                                without a gate activation(up x)
    LpPool(x)                   attrs of MaxPool, and p;  MaxPoolIndices(x) those and storage_order;
                                outputs: maxima, and where they are in the flat tensor
    MaxUnpool(x, indices)       attr extents (of space; indices count in a tensor of those);  Det(x)
                                [.., M, M] -> [..]
    Col2Im(x)                   x [N, C*prod(block), blocks]; attrs image, block, blocks, strides,
                                pads, dilations
    GridSample(x, grid)         attrs mode ("linear"|"cubic"|"nearest"), padding
                                ("zeros"|"border"|"reflection"), align_corners
    RoiAlign(x, regions, images)  attrs cells, scale, ratio, half_pixel, most (maxima, else means);
                                  MaxRoiPool(x, regions)  attrs cells, scale
    DeformConv(x, w, offset[, mask])  attrs of Conv, and offset_group (a bias becomes Reshape + Add)
    DFT(x)                      complex numbers as pairs in the last dim; attrs axis, length,
                                inverse, onesided (STFT -> Gather [+ Mul] + DFT)
    CumProd(x)                  attrs of CumSum;  ReverseSequence(x, lengths)  attrs time_axis,
                                batch_axis
    TensorScatter(past, update[, indices])  attrs axis, circular: rows of update written into the
                                            cache along the axis, per sample from its index on
    If(condition, *read)        bodies (then, else), which both take what either reads from outside
    Scan(*states, *scanned, *read)        one body, run `trips` times; attrs states, scanned (how
                                          many of each), own (1: its first input counts the trips),
                                in_axes, in_reverse, out_axes, out_reverse (0|1) of what is scanned
                                and stacked; outputs: states, then what is stacked
    While(limit|, go|, *states, *read)    one body (trip, states, read) -> (go on, states),
                                          inference only; attrs states, limit (-1: the operand, or
                                          none)
                                all three: attrs first (operands that the bodies do not take), own,
                                and a digest of the bodies
    CrossEntropyLoss(logits, labels), MSELoss(a, b) ...   appended by planner.workload.loss, never
                                                          by the reader

Anything else keeps its ONNX name, inputs and attributes, and is planned replicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

AttrValue = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
Role = Literal["input", "weight", "constant", "activation"]

DTYPE_BYTES: Mapping[str, float] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "int4": 0.5,
    "uint4": 0.5,
    "complex64": 8,
    "complex128": 16,
}
OF_PRODUCT = "of_product"
"""Attribute of a Mul that multiplies a product's columns by a number each (scales of int8 and
float8 weights): it is computed as the product's sums are written, in the product's own kernel."""
KEPT_FLOAT8 = "kept_float8"
"""Attribute of products and routed experts whose weights are kept in float8: the rows that they
multiply are made float8 too, each by its own largest value."""
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"})


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the graph: static shape, dtype (a key of DTYPE_BYTES), and the role it plays."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = "activation"

    @property
    def elements(self) -> int:
        """Number of elements (an exact Python int)."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """True when a gradient can flow through it."""
        return self.dtype in FLOATS


@dataclass(frozen=True, slots=True)
class Node:
    """One operator. `id` is unique and stable (semantics of node ids: docs); `inputs` uses "" for
    an absent optional."""

    id: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    scope: str = ""
    """Module path such as "model.layers.3.mlp", when the exporter wrote one (or derived from the
    node's name), else ""."""
    members: tuple[str, ...] = ()
    """Names of the original nodes this one was rewritten or fused from, when not exactly the one
    named `id`."""
    bodies: tuple[Graph, ...] = ()
    """Subgraphs of control flow: graphs without weights, whose inputs are what they read from
    outside."""


@dataclass(frozen=True, slots=True)
class WeightRef:
    """Where a weight's bytes are. Planning never opens them.

    kind "inline": `proto` is the onnx TensorProto (or an ndarray for values made by the reader).
    kind "external": `location` (relative path inside the model's folder, already checked),
    `offset`, `length` in bytes. kind "absent": no bytes anywhere; programs seed it normal and say
    so. kind "joined": `parts`, weights of one shape, stacked along a new first dim. `transform`
    lists reader rewrites to apply after loading, e.g. ("reshape", (64, 1, 1)).
    """

    kind: Literal["inline", "external", "absent", "joined"]
    location: str = ""
    offset: int = 0
    length: int = 0
    proto: Any = None
    transform: tuple[tuple[str, tuple[int, ...]], ...] = ()
    parts: tuple[WeightRef, ...] = ()


@dataclass(frozen=True, slots=True)
class HostTable:
    """A table that lies on hosts or servers (`place`: "host" or "server"): its rows there, and the
    inputs with their numbers. The graph's own tensor is the piece of a step."""

    rows: int
    ids: tuple[str, ...]
    place: str


@dataclass(frozen=True)
class Graph:
    """A model with every shape static, nodes in topological order.

    inputs / outputs: tensor names in the model's order. weights: tensors that training may change
    or that are large (role "weight"). constants: small folded values (role "constant"; at most 64 k
    elements each), as numpy arrays. labels: stable, readable parameter name per weight tensor (e.g.
    "layers.3.mlp.up.weight"). trainable: the weights that training changes, decided by the slot
    they feed (docs/training.md).
    """

    name: str
    nodes: tuple[Node, ...]
    tensors: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, WeightRef] = field(default_factory=dict)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()
    dims: Mapping[str, int] = field(default_factory=dict)
    """The symbolic dims that were bound, by name; "batch" is the global batch."""
    host_tables: Mapping[str, HostTable] = field(default_factory=dict)
    """Weights whose rows are pulled for a step and pushed after it
    (planner.workload.host_tables)."""
    orthogonalised: frozenset[str] = frozenset()
    """Weights whose matrices the optimizer orthogonalises (planner.ops.matrices)."""
    notes: tuple[str, ...] = ()
    """What the reader assumed or repaired, a sentence each, for the user."""
    unstacked: bool = False
    """Whether its program has no loops over repeated blocks, and their weights one by one: those
    that serve, which would copy all weights out of stacks for each token."""

    @cached_property
    def producer(self) -> dict[str, int]:
        """tensor -> index of the node that makes it (absent for inputs, weights, constants)."""
        return {out: i for i, node in enumerate(self.nodes) for out in node.outputs if out}

    @cached_property
    def consumers(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """tensor -> ((node index, input slot), ...) in node order."""
        readers: dict[str, list[tuple[int, int]]] = {}
        for i, node in enumerate(self.nodes):
            for slot, name in enumerate(node.inputs):
                if name:
                    readers.setdefault(name, []).append((i, slot))
        return {name: tuple(uses) for name, uses in readers.items()}

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What others derive once per graph: its blocks as one function (planner.execution.loops),
        what belongs to which stage (planner.execution.pipeline, planner.execution.collectives)."""
        return {}

    def reached(self, start: Iterable[str]) -> set[str]:
        """Tensors of `start`, and all that are made from any of them."""
        reached = set(start)
        for node in self.nodes:
            if not reached.isdisjoint(node.inputs):
                reached.update(node.outputs)
                reached.discard("")  # an output that is absent
        return reached

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(self.tensors[name].elements for name in self.weights)

    def shapes(self, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the named tensors; () for an absent optional input."""
        return tuple(self.tensors[n].shape if n else () for n in names)
