"""A canonical Graph back to ONNX, so that onnxruntime can judge what the reader made of a file
(tests only)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from planner.graph.ir import Graph, Node
from planner.workload.weights import load

ELEMENT = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
}


class Writer:
    """Collects ONNX nodes; each `op` below is a rule of the canonical form said in ONNX."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.nodes, self.initializers, self.count = graph, [], [], 0

    def const(self, array: Any) -> str:
        self.count += 1
        name = f"__c{self.count}"
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def ints(self, *values: int) -> str:
        return self.const(np.asarray(values, np.int64))

    def like(self, name: str, value: float) -> str:
        return self.const(np.asarray(value, np.dtype(self.graph.tensors[name].dtype)))

    def node(
        self, op: str, inputs: list[str], outputs: list[str] | None = None, **attrs: Any
    ) -> str:
        self.count += 1
        outputs = outputs or [f"__t{self.count}"]
        self.nodes.append(helper.make_node(op, inputs, outputs, f"__n{self.count}", **attrs))
        return outputs[0]

    def write(self, node: Node) -> None:
        rule = getattr(self, "_" + node.op, None)
        if rule is not None:
            rule(node, dict(node.attrs), list(node.inputs), list(node.outputs))
        else:
            self.node(
                node.op,
                list(node.inputs),
                list(node.outputs),
                **{k: _plain(v) for k, v in node.attrs.items()},
            )

    def shape(self, name: str) -> tuple[int, ...]:
        return self.graph.tensors[name].shape

    def _Silu(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node("Mul", [i[0], self.node("Sigmoid", i)], o)

    def _Cast(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node("Cast", i, o, to=ELEMENT[a["to"]])

    def _Clip(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node(
            "Clip",
            [
                i[0],
                self.like(i[0], a["min"]) if "min" in a else "",
                self.like(i[0], a["max"]) if "max" in a else "",
            ],
            o,
        )

    def _Dropout(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node("Identity", i, o[:1])  # compared in evaluation mode

    def _MatMul(self, node: Node, a: Any, i: Any, o: Any) -> None:
        sides = []
        for name, flag in zip(i, ("trans_a", "trans_b"), strict=True):
            n = len(self.shape(name))
            sides.append(
                self.node("Transpose", [name], perm=[*range(n - 2), n - 1, n - 2])
                if a.get(flag)
                else name
            )
        self.node("MatMul", sides, o)

    def _reduce(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node(node.op, [*i, self.ints(*a["axes"])], o, keepdims=a["keepdims"])

    def _ReduceSum(self, *args: Any) -> None:
        self._reduce(*args)

    _ReduceMean = _ReduceMax = _ReduceMin = _ReduceProd = _ReduceSum

    def _ArgMax(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node(node.op, i, o, **a)

    def _RMSNormalization(self, node: Node, a: Any, i: Any, o: Any) -> None:
        axes = self.ints(*range(a["axis"], len(self.shape(i[0]))))
        mean = self.node("ReduceMean", [self.node("Mul", [i[0], i[0]]), axes], keepdims=1)
        root = self.node("Sqrt", [self.node("Add", [mean, self.like(i[0], a["epsilon"])])])
        self.node("Mul", [self.node("Div", [i[0], root]), i[1]], o)

    def _GroupNormalization(self, node: Node, a: Any, i: Any, o: Any) -> None:
        x = self.shape(i[0])
        ones = self.const(np.ones(a["num_groups"], np.float32))
        zeros = self.const(np.zeros(a["num_groups"], np.float32))
        flat = self.node("Reshape", [i[0], self.ints(x[0], a["num_groups"], -1)])
        normed = self.node(
            "Reshape",
            [
                self.node("InstanceNormalization", [flat, ones, zeros], epsilon=a["epsilon"]),
                self.ints(*x),
            ],
        )
        per_channel = self.ints(-1, *(1,) * (len(x) - 2))
        scaled = self.node("Mul", [normed, self.node("Reshape", [i[1], per_channel])])
        self.node("Add", [scaled, self.node("Reshape", [i[2], per_channel])], o)

    def _Reshape(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node("Reshape", [i[0], self.ints(*self.shape(o[0]))], o, allowzero=1)

    def _Expand(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node("Expand", [i[0], self.ints(*self.shape(o[0]))], o)

    def _Split(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node(
            "Split", [i[0], self.ints(*(self.shape(x)[a["axis"]] for x in o))], o, axis=a["axis"]
        )

    def _Slice(self, node: Node, a: Any, i: Any, o: Any) -> None:
        ends = [
            -(2**62) if s < 0 and e < 0 else e for e, s in zip(a["ends"], a["steps"], strict=True)
        ]
        self.node(
            "Slice",
            [
                i[0],
                self.ints(*a["starts"]),
                self.ints(*ends),
                self.ints(*a["axes"]),
                self.ints(*a["steps"]),
            ],
            o,
        )

    def _Pad(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node(
            "Pad", [i[0], self.ints(*a["pads"]), self.like(i[0], a["value"])], o, mode=a["mode"]
        )

    def _Tile(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node("Tile", [i[0], self.ints(*a["repeats"])], o)

    def _Trilu(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node("Trilu", [i[0], self.const(np.int64(a["k"]))], o, upper=a["upper"])

    def _Conv(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node(node.op, i, o, **{k: _plain(v) for k, v in a.items()})

    def _MaxPool(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node(node.op, i, o, **{k: _plain(v) for k, v in a.items() if k != "count_include_pad"})

    def _Col2Im(self, node: Node, a: Any, i: Any, o: Any) -> None:
        sizes = [self.ints(*a["image"]), self.ints(*a["block"])]
        kept = {k: a[k] for k in ("strides", "pads", "dilations")}
        self.node("Col2Im", [i[0], *sizes], o, **kept)

    def _Resize(self, node: Node, a: Any, i: Any, o: Any) -> None:
        exact = all(
            math.floor(n * s) == m
            for n, s, m in zip(self.shape(i[0]), a["scales"], self.shape(o[0]), strict=True)
        )
        goal = (
            [self.const(np.asarray(a["scales"], np.float32))]
            if exact
            else ["", self.ints(*self.shape(o[0]))]
        )
        extra = {"cubic_coeff_a": a["cubic_coeff_a"]} if "cubic_coeff_a" in a else {}
        self.node(
            "Resize",
            [i[0], "", *goal],
            o,
            mode=a["mode"],
            coordinate_transformation_mode=a["coordinate_mode"],
            nearest_mode=a["nearest_mode"],
            **extra,
        )

    def _TopK(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node(
            "TopK",
            [i[0], self.ints(a["k"])],
            o,
            axis=a["axis"],
            largest=a["largest"],
            sorted=a["sorted"],
        )

    def _CumSum(self, node: Node, a: Any, i: Any, o: Any) -> None:
        self.node(
            "CumSum",
            [i[0], self.const(np.int64(a["axis"]))],
            o,
            exclusive=a["exclusive"],
            reverse=a["reverse"],
        )

    def _OneHot(self, node: Node, a: Any, i: Any, o: Any) -> None:
        values = self.const(np.asarray([a["off_value"], a["on_value"]], np.dtype(a["dtype"])))
        self.node("OneHot", [i[0], self.const(np.int64(a["depth"])), values], o, axis=a["axis"])

    def _Range(self, node: Node, a: Any, i: Any, o: Any) -> None:
        n, dtype = self.shape(o[0])[0], np.dtype(a["dtype"])
        bounds = (a["start"], a["start"] + n * a["delta"], a["delta"])
        self.node("Range", [self.const(np.asarray(v, dtype)) for v in bounds], o)

    def _ConstantOfShape(self, node: Node, a: Any, i: Any, o: Any) -> None:
        value = numpy_helper.from_array(np.asarray([a["value"]], np.dtype(a["dtype"])))
        self.node("ConstantOfShape", [self.ints(*self.shape(o[0]))], o, value=value)

    def _RotaryEmbedding(self, node: Node, a: Any, i: Any, o: Any) -> None:
        d = self.shape(i[0])[-1]
        low = self.node("Slice", [i[0], self.ints(0), self.ints(d // 2), self.ints(-1)])
        high = self.node("Slice", [i[0], self.ints(d // 2), self.ints(d), self.ints(-1)])
        turned = self.node("Concat", [self.node("Neg", [high]), low], axis=-1)
        self.node("Add", [self.node("Mul", [i[0], i[1]]), self.node("Mul", [turned, i[2]])], o)

    def _Attention(self, node: Node, a: Any, i: Any, o: Any) -> None:
        q, k, v = i[:3]
        (b, h, s, _), (_, g, t, _) = self.shape(q), self.shape(k)
        if g != h:
            k, v = (
                self.node(
                    "Reshape",
                    [
                        self.node(
                            "Expand",
                            [
                                self.node("Unsqueeze", [x, self.ints(2)]),
                                self.ints(b, g, h // g, t, self.shape(x)[3]),
                            ],
                        ),
                        self.ints(b, h, t, self.shape(x)[3]),
                    ],
                )
                for x in (k, v)
            )
        scores = self.node("MatMul", [q, self.node("Transpose", [k], perm=[0, 1, 3, 2])])
        scores = self.node("Mul", [scores, self.like(i[0], a["scale"])])
        if cap := a.get("cap", 0.0):
            scores = self.node("Tanh", [self.node("Div", [scores, self.like(i[0], cap)])])
            scores = self.node("Mul", [scores, self.like(i[0], cap)])
        lowest = self.like(i[0], -math.inf)
        if a.get("segments"):
            own = self.node("Transpose", [i[3]], perm=[0, 1, 3, 2])
            scores = self.node("Where", [self.node("Equal", [own, i[3]]), scores, lowest])
        elif len(i) > 3 and i[3]:
            boolean = self.graph.tensors[i[3]].dtype == "bool"
            scores = (
                self.node("Where", [i[3], scores, lowest])
                if boolean
                else self.node("Add", [scores, i[3]])
            )
        if a["causal"]:
            assert s == t
            seen = np.tri(s, dtype=bool)
            if a.get("window"):
                seen &= ~np.tri(s, k=-a["window"], dtype=bool)
            scores = self.node("Where", [self.const(seen), scores, lowest])
        weights = self.node("Softmax", [scores], axis=-1)
        if a.get("guard"):
            weights = self.node(
                "Where", [self.node("IsNaN", [weights]), self.like(i[0], 0.0), weights]
            )
        self.node("MatMul", [weights, v], o)

    def _RoutedExperts(self, node: Node, a: Any, i: Any, o: Any) -> None:
        """The gathered form: one row a token and choice."""
        i = [*i, *[""] * (9 - len(i))]
        rank = len(self.shape(i[0]))

        def layer(rows: str, stack: str, bias: str, turned: int) -> str:
            weight = self.node("Transpose", [stack], perm=[0, 2, 1]) if turned else stack
            y = self.node("MatMul", [rows, self.node("Gather", [weight, i[1]])])
            return (
                self.node(
                    "Add",
                    [
                        y,
                        self.node(
                            "Unsqueeze", [self.node("Gather", [bias, i[1]]), self.ints(rank)]
                        ),
                    ],
                )
                if bias
                else y
            )

        x = self.node("Unsqueeze", [i[0], self.ints(rank - 1, rank)])
        up = layer(x, i[4], i[7], a.get("trans_in", 0))
        gate = layer(x, i[3], i[6], a.get("trans_in", 0)) if i[3] else up
        acts = {
            "silu": lambda v: self.node("Mul", [v, self.node("Sigmoid", [v])]),
            "relu": lambda v: self.node("Relu", [v]),
            "tanh": lambda v: self.node("Tanh", [v]),
            "gelu": lambda v: self.node("Gelu", [v]),
            "gelu_tanh": lambda v: self.node("Gelu", [v], approximate="tanh"),
            "identity": lambda v: v,
        }
        if a["activation"] == "swiglu":
            if "limit" in a:
                high, low = (self.like(i[0], c * a["limit"]) for c in (1, -1))
                gate, up = self.node("Min", [gate, high]), self.node("Clip", [up, low, high])
            opened = self.node(
                "Mul",
                [
                    gate,
                    self.node("Sigmoid", [self.node("Mul", [gate, self.like(i[0], a["alpha"])])]),
                ],
            )
            hidden = self.node("Mul", [opened, self.node("Add", [up, self.like(i[0], a["beta"])])])
        else:
            hidden = acts[a["activation"]](gate)
            hidden = self.node("Mul", [hidden, up]) if i[3] else hidden
        y = layer(hidden, i[5], i[8], a.get("trans_out", 0))
        weighed = self.node(
            "Mul",
            [
                self.node("Squeeze", [y, self.ints(rank)]),
                self.node("Unsqueeze", [self.node("CastLike", [i[2], y]), self.ints(rank)]),
            ],
        )
        self.node("ReduceSum", [weighed, self.ints(rank - 1)], o, keepdims=0)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def to_onnx(graph: Graph, folder: Any = None, seed: int = 0) -> ModelProto:
    """An opset-20 model that computes what the graph computes."""
    writer = Writer(graph)
    for node in graph.nodes:
        writer.write(node)
    arrays = load(graph, folder, seed, seed_missing=folder is None)
    for name, label in graph.labels.items():
        writer.initializers.append(
            numpy_helper.from_array(np.array(arrays[label], order="C"), name)
        )
    for name, array in graph.constants.items():
        writer.initializers.append(numpy_helper.from_array(np.array(array, order="C"), name))
    inputs = [
        helper.make_tensor_value_info(n, ELEMENT[graph.tensors[n].dtype], graph.tensors[n].shape)
        for n in graph.inputs
    ]
    outputs = [
        helper.make_tensor_value_info(n, ELEMENT[graph.tensors[n].dtype], graph.tensors[n].shape)
        for n in graph.outputs
    ]
    made = helper.make_graph(writer.nodes, "canonical", inputs, outputs, writer.initializers)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def run(model: ModelProto | str, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """onnxruntime on one model."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    data = model if isinstance(model, str) else model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    known = {i.name for i in session.get_inputs()}
    return session.run(None, {k: v for k, v in feeds.items() if k in known})


def feeds_for(graph: Graph, seed: int = 0, high: int = 10) -> dict[str, np.ndarray]:
    """Random inputs: token-like integers below `high`, floats normal; names with 'mask' are mostly
    ones, 'position' counts."""
    random = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    for name in graph.inputs:
        tensor = graph.tensors[name]
        if "mask" in name:
            mask = np.ones(tensor.shape, tensor.dtype)
            mask[: tensor.shape[0] // 2, -tensor.shape[1] // 4 :] = 0
            feeds[name] = mask
        elif "position" in name:
            feeds[name] = np.broadcast_to(np.arange(tensor.shape[-1]), tensor.shape).astype(
                tensor.dtype
            )
        elif tensor.is_float:
            feeds[name] = random.standard_normal(tensor.shape).astype(tensor.dtype)
        else:
            feeds[name] = random.integers(0, high, tensor.shape).astype(tensor.dtype)
    return feeds


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """max |a - b| / max |b|."""
    return (
        float(np.abs(a.astype(np.float64) - b).max() / max(np.abs(b).max(), 1e-30))
        if a.size
        else 0.0
    )
