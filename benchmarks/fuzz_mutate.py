"""Broken and odd models made from sound ones: edits of the graph that keep it decodable, and edits
of its bytes.

Everything follows from a `random.Random`; nothing here knows what the reader checks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

Rng = random.Random
SIZES = (
    0,
    1,
    2,
    3,
    5,
    7,
    13,
    64,
    1000,
    -1,
    -2,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    (1 << 53) + 1,
    (1 << 62),
    (1 << 63) - 1,
    -(1 << 63),
)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
NAMES = (
    "",
    " ",
    "x",
    "0",
    "a\nb",
    "\x00",
    "a" * 5000,
    "ключ",
    "x\"'\\{}",
    "__import__('os')",
    "#",
    "../x",
    "x/y.z",
    "%s%n",
    "labels",
    "loss",
    "\u202e",
)
DIM_NAMES = ("", "batch", "seq", "N", "N*2", "-1", "?", "a b", "x" * 300, "batch_size + 1")
OPS = re.findall(
    r"\w+",
    """
    Add Sub Mul Div Pow Mod MatMul Gemm Einsum Conv ConvTranspose Relu Sigmoid Softmax LogSoftmax Gather GatherND GatherElements ScatterND ScatterElements
    Reshape Transpose Slice Split Concat Pad Expand Tile Squeeze Unsqueeze Flatten Shape Size ConstantOfShape Range NonZero TopK CumSum OneHot Resize LSTM
    GRU RNN LayerNormalization RMSNormalization BatchNormalization InstanceNormalization GroupNormalization Attention RotaryEmbedding MaxPool AveragePool
    ReduceSum ReduceMean ReduceMax ArgMax Where Clip Cast CastLike Identity Dropout If Loop Scan SequenceAt Optional DequantizeLinear QuantizeLinear
    MatMulInteger DepthToSpace SpaceToDepth Trilu EyeLike Min Max Sum Mean IsNaN Not And Equal Gelu HardSigmoid LRN GlobalAveragePool NonMaxSuppression
    RandomNormal BitShift Bernoulli Hardmax Shrink Celu PRelu Compress Unique StringNormalizer Upsample ReverseSequence AffineGrid Col2Im DFT
    NoSuchOperator
    """,
)
EQUATIONS = (
    b"ij,jk->ik",
    b"",
    b"->",
    b"ii->i",
    b"...a,...a->...",
    b"a,b,c,d,e,f,g->",
    b"\xff\xfe",
    b"i j , j k",
    b"ij->kk",
)


def size(r: Rng) -> int:
    """A dim, axis or length, often an awkward one."""
    return r.choice(SIZES) if r.random() < 0.7 else r.randint(-4, 300)


def tensors(model: Any) -> list[str]:
    """Every tensor name of the main graph."""
    g = model.graph
    return (
        [v.name for v in g.input]
        + [t.name for t in g.initializer]
        + [o for n in g.node for o in n.output]
    )


def _put(field: Any, values: list[Any]) -> None:
    del field[:]
    field.extend(values)


def _any(r: Rng, items: Any) -> Any:
    return items[r.randrange(len(items))] if len(items) else None


def _value_info(m: Any, r: Rng) -> None:
    """Dims, rank or dtype of an input, output or inner declaration."""
    value = _any(r, r.choice([m.graph.input, m.graph.input, m.graph.output, m.graph.value_info]))
    if value is None:
        return
    kind = value.type.tensor_type
    if r.random() < 0.15:
        kind.elem_type = r.choice((0, 1, 2, 6, 7, 8, 9, 10, 11, 14, 16, 17, 21, 23, 99, -1))
        return
    what = r.random()
    if what < 0.1:
        value.type.ClearField("value")
    elif what < 0.2:
        kind.ClearField("shape")
    elif what < 0.3:
        kind.shape.dim.add().dim_value = size(r)
    elif kind.shape.dim:
        dim = _any(r, kind.shape.dim)
        if what < 0.6:
            dim.dim_param = r.choice(DIM_NAMES)
        elif what < 0.7:
            dim.Clear()
        else:
            dim.dim_value = size(r)


def _initializer(m: Any, r: Rng) -> None:
    """Dims, dtype, bytes, place or existence of a stored tensor."""
    t = _any(r, m.graph.initializer)
    if t is None:
        return
    what = r.randrange(9)
    if what == 0 and t.dims:
        t.dims[r.randrange(len(t.dims))] = size(r)
    elif what == 1:
        t.data_type = r.choice((0, 1, 2, 6, 7, 8, 9, 10, 11, 14, 16, 17, 21, 22, 23, 24, 77))
    elif what == 2:
        t.raw_data = t.raw_data[: r.randrange(len(t.raw_data) + 1)]
    elif what == 3:
        m.graph.initializer.remove(t)
    elif what == 4:
        m.graph.initializer.add().CopyFrom(t)
    elif what == 5:
        t.name = r.choice([*NAMES, *tensors(m)])
    elif what == 6:
        t.data_location = TensorProto.EXTERNAL
        t.external_data.add(
            key="location",
            value=r.choice(
                ("w.bin", "../w.bin", "/etc/passwd", "absent.bin", "", ".", "a\x00", "link.bin")
            ),
        )
        if r.random() < 0.5:
            t.external_data.add(
                key=r.choice(("offset", "length")),
                value=r.choice(("0", "-1", "1e3", "9" * 30, "", "16")),
            )
    elif what == 7:
        values = numpy_helper.from_array(
            np.array(
                [r.choice((0, 1, -1, 2, 1 << 40, 1 << 62)) for _ in range(r.randrange(6))], np.int64
            ),
            t.name,
        )
        t.CopyFrom(values)
    else:
        sparse = m.graph.sparse_initializer.add()
        sparse.values.CopyFrom(t)
        sparse.indices.CopyFrom(
            numpy_helper.from_array(np.arange(r.randrange(5), dtype=np.int64), "indices")
        )
        sparse.dims.extend([size(r) for _ in range(r.randrange(4))])
        if r.random() < 0.7:
            m.graph.initializer.remove(t)


def _node(m: Any, r: Rng) -> None:
    """A node deleted, doubled, moved, or of another operator."""
    nodes = m.graph.node
    if not nodes:
        return
    k, what = r.randrange(len(nodes)), r.randrange(6)
    if what == 0:
        del nodes[k]
    elif what == 1:
        nodes.add().CopyFrom(nodes[k])
    elif what == 2:
        order = list(nodes)
        r.shuffle(order)
        _put(nodes, [helper_copy(n) for n in order])
    elif what == 3:
        nodes[k].op_type = r.choice(OPS)
    elif what == 4:
        nodes[k].domain = r.choice(("", "ai.onnx", "com.microsoft", "ai.onnx.ml", "x\ny"))
    else:
        copy = nodes.add()
        copy.CopyFrom(nodes[k])
        _put(copy.output, [f"{o}_{r.randrange(9)}" for o in copy.output])
        copy.op_type = r.choice(OPS)


def helper_copy(node: Any) -> Any:
    """A copy that outlives its list."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made


def _edge(m: Any, r: Rng) -> None:
    """Operands and results of a node: rewired, dropped, swapped, renamed."""
    node = _any(r, m.graph.node)
    if node is None:
        return
    names, what = tensors(m), r.randrange(8)
    if r.random() < 0.8 and node.output and node.output[0] in names:
        names = names[: names.index(node.output[0])] or names  # nothing that comes later: no cycle
    if what <= 2 and node.input:
        node.input[r.randrange(len(node.input))] = r.choice([*names, *names, "", "ghost"])
    elif what == 3 and node.input:
        del node.input[r.randrange(len(node.input))]
    elif what == 4:
        node.input.append(r.choice([*names, ""]))
    elif what == 5:
        mixed = list(node.input)
        r.shuffle(mixed)
        _put(node.input, mixed)
    elif what == 6 and node.output:
        node.output[r.randrange(len(node.output))] = r.choice([*names, *NAMES])
    elif node.output and r.random() < 0.5:
        del node.output[r.randrange(len(node.output))]
    else:
        node.output.append(r.choice(("", "extra", *names)))


def _attribute(m: Any, r: Rng) -> None:
    """An attribute dropped, renamed, retyped, or given awkward values."""
    node = _any(r, [n for n in m.graph.node if n.attribute] or m.graph.node)
    if node is None:
        return
    a = _any(r, node.attribute)
    if a is None or r.random() < 0.15:
        names = (
            "axis",
            "axes",
            "perm",
            "to",
            "keepdims",
            "epsilon",
            "alpha",
            "group",
            "kernel_shape",
            "pads",
            "strides",
            "dilations",
            "k",
            "value",
            "num_outputs",
            "hidden_size",
            "direction",
            "equation",
            "mode",
            "batch_dims",
            "allowzero",
            "num_heads",
            "scale",
            "blocksize",
            "ratio",
            "is_causal",
        )
        a = node.attribute.add(name=r.choice(names))
    what = r.randrange(8)
    if what == 0 and len(node.attribute):
        node.attribute.remove(a)
    elif what == 1:
        a.type, a.i = AttributeProto.INT, size(r)
    elif what == 2:
        a.type, a.f = AttributeProto.FLOAT, r.choice(NUMBERS)
    elif what == 3:
        a.type = AttributeProto.INTS
        old = list(a.ints)
        if old and r.random() < 0.6:
            old[r.randrange(len(old))] = size(r)
        else:
            old = [size(r) for _ in range(r.randrange(7))]
        _put(a.ints, old)
    elif what == 4:
        a.type, a.s = (
            AttributeProto.STRING,
            r.choice(
                (
                    *EQUATIONS,
                    b"reverse",
                    b"cubic",
                    b"same_upper",
                    b"SAME_UPPER",
                    b"VALID",
                    b"x" * 10_000,
                )
            ),
        )
    elif what == 5:
        a.type = r.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 99))
    elif what == 6:
        a.ref_attr_name = r.choice(("", "axis", "ghost"))
    else:
        a.type = AttributeProto.TENSOR
        a.t.CopyFrom(
            numpy_helper.from_array(np.array([size(r)], np.int64))
            if r.random() < 0.5
            else TensorProto(data_type=r.choice((1, 7, 99)), dims=[size(r)])
        )


def _opset(m: Any, r: Rng) -> None:
    """Another opset, a missing one, or one too many."""
    what = r.random()
    if what < 0.7 and m.opset_import:
        m.opset_import[0].version = r.choice([*range(1, 29), 0, -1, 9999, 1 << 62])
    elif what < 0.85:
        m.opset_import.add(
            domain=r.choice(("", "ai.onnx", "local", "com.microsoft")),
            version=r.choice((1, 7, 25, 9999)),
        )
    else:
        del m.opset_import[:]


def _ends(m: Any, r: Rng) -> None:
    """Graph inputs and outputs: dropped, doubled, renamed, taken from inside."""
    side = r.choice((m.graph.input, m.graph.output))
    value = _any(r, side)
    what = r.randrange(4)
    if what == 0 and value is not None:
        side.remove(value)
    elif what == 1 and value is not None:
        side.add().CopyFrom(value)
    elif what == 2 and value is not None:
        value.name = r.choice([*NAMES, *tensors(m)])
    else:
        side.add(name=r.choice(tensors(m) or ["x"]))


def _rename(m: Any, r: Rng) -> None:
    """One tensor renamed everywhere, or the name of a node, the graph or its documentation."""
    names = tensors(m)
    if not names or r.random() < 0.3:
        node = _any(r, m.graph.node)
        if node is not None:
            node.name = r.choice(NAMES)
        m.graph.name = r.choice(NAMES)
        m.graph.doc_string = m.producer_name = r.choice(NAMES)
        return
    old, new = r.choice(names), r.choice(NAMES)
    for node in m.graph.node:
        _put(node.input, [new if i == old else i for i in node.input])
        _put(node.output, [new if o == old else o for o in node.output])
    for value in (*m.graph.input, *m.graph.output, *m.graph.initializer):
        if value.name == old:
            value.name = new


def _insert(m: Any, r: Rng) -> None:
    """An operator of awkward size before one operand of a node."""
    node = _any(r, [n for n in m.graph.node if n.input])
    if node is None:
        return
    k, name = r.randrange(len(node.input)), f"inserted_{len(m.graph.node)}"
    old = node.input[k]
    wide = numpy_helper.from_array(
        np.array([size(r) for _ in range(r.randrange(1, 5))], np.int64), name + "_s"
    )
    op = r.choice(
        (
            "Expand",
            "Tile",
            "Reshape",
            "ConstantOfShape",
            "Unsqueeze",
            "Squeeze",
            "Slice",
            "Pad",
            "Gather",
            "Range",
            "Transpose",
            "ReduceSum",
            "Split",
        )
    )
    made = helper.make_node(
        op,
        {"ConstantOfShape": [name + "_s"], "Range": [name + "_s"] * 3}.get(op, [old, name + "_s"]),
        [name],
    )
    m.graph.initializer.append(wide)
    m.graph.node.insert(r.randrange(len(m.graph.node) + 1), made)
    node.input[k] = name


def _nest(m: Any, r: Rng) -> None:
    """Part of the graph as a function, a branch or a loop body; sometimes calling itself."""
    node = _any(r, m.graph.node)
    if node is None:
        return
    what, inner = r.randrange(4), helper_copy(node)
    if what == 0:
        if not any(o.domain == "local" for o in m.opset_import):
            m.opset_import.add(domain="local", version=1)
        if r.random() < 0.3:
            inner.op_type, inner.domain = r.choice(("F", "G")), "local"
        function = m.functions.add(name=r.choice(("F", "G")), domain="local")
        function.input.extend(f for f in dict.fromkeys(node.input) if f)
        function.output.extend(dict.fromkeys(node.output))
        function.node.append(inner)
        function.opset_import.add(domain="", version=r.choice((1, 13, 20, 9999)))
        node.op_type, node.domain = function.name, "local"
        del node.attribute[:]
        return
    body = helper.make_graph(
        [inner], "body", [], [onnx.ValueInfoProto(name=o) for o in node.output if o]
    )
    if what == 1:
        m.graph.initializer.append(
            numpy_helper.from_array(np.array(r.random() < 0.5), f"cond_{len(m.graph.node)}")
        )
        _put(node.input, [m.graph.initializer[-1].name])
        node.op_type = "If"
        _put(
            node.attribute,
            [
                helper.make_attribute("then_branch", body),
                helper.make_attribute("else_branch", body),
            ],
        )
    elif what == 2:
        m.graph.initializer.append(
            numpy_helper.from_array(np.array(size(r)), f"trip_{len(m.graph.node)}")
        )
        _put(node.input, [m.graph.initializer[-1].name, "", *list(node.input)[:2]])
        node.op_type = "Loop"
        _put(node.attribute, [helper.make_attribute("body", body)])
    else:
        node.op_type = "Scan"
        _put(
            node.attribute,
            [
                helper.make_attribute("body", body),
                helper.make_attribute("num_scan_inputs", r.choice((0, 1, 2, 1 << 40))),
            ],
        )


EDITS: tuple[Callable[[Any, Rng], None], ...] = (
    _value_info,
    _value_info,
    _initializer,
    _node,
    _node,
    _edge,
    _edge,
    _edge,
    _attribute,
    _attribute,
    _attribute,
    _opset,
    _ends,
    _rename,
    _insert,
    _insert,
    _nest,
)


def edited(model: Any, r: Rng) -> Any:
    """A copy with one to four edits."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for _ in range(r.choice((1, 1, 1, 2, 2, 3, 4))):
        try:
            r.choice(EDITS)(made, r)
        except (
            ValueError,
            TypeError,
        ):  # protobuf refuses what cannot be encoded: no file could hold it either
            continue
    return made


def damaged(data: bytes, r: Rng) -> bytes:
    """The bytes of a model with flips, holes, repeats and cuts."""
    out = bytearray(data)
    for _ in range(r.choice((1, 1, 2, 3, 8))):
        if not out:
            break
        at = r.randrange(len(out)) if r.random() < 0.5 else r.randrange(min(len(out), 400))
        what = r.randrange(6)
        if what <= 1:
            out[at] = r.randrange(256)
        elif what == 2:
            out[at] ^= 1 << r.randrange(8)
        elif what == 3:
            del out[at : at + r.choice((1, 2, 5, 50))]
        elif what == 4:
            out[at:at] = (
                bytes(r.randrange(256) for _ in range(r.choice((1, 2, 8))))
                if r.random() < 0.5
                else out[at : at + r.choice((5, 50, 500))]
            )
        elif r.random() < 0.3:
            del out[at:]
    return bytes(out)
