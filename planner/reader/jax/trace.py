"""A jaxpr as an ONNX model, which the reader takes like any exporter's: one graph, one set of
rules, whichever door a model comes in by.

    jit, remat, custom derivatives    entered
    scan                              written out, an iteration after the other; a leaf of the
                                      parameters that is scanned becomes one weight an iteration
                                      ("blocks.up" -> "blocks.up.0", "blocks.up.1", ...), so that
                                      iterations are repeats of a block with weights of their own
    anything without a translation    an operator of the domain "jax": planned whole on every device

Weights hold no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.graph.value_digest import value_bytes

DOMAIN, OPSET, IR_VERSION = "jax", 18, 9
PRODUCER = "planner.from_jax"
"""Of its models: they run as they are written."""
FUSED = "FusedAttention"
"""Of the domain: a call of a fused attention kernel, as a node of queries, keys, values [batch,
heads, positions, elements] and a bias to the scores, where there is one. Attributes: scale, causal
(0 or 1), window (positions before and with a query's that it sees, 0 for all) and kernel."""
MOST_EQUATIONS = 200_000
"""Equations after scans are written out."""
INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_lin",
)


def number_of(dtype: Any) -> np.dtype:
    """The numpy type of an array of numbers; of keys, what they are here."""
    return np.dtype(np.uint32 if type(dtype).__name__ == "KeyTy" else dtype)


@dataclass(frozen=True)
class Value:
    """A tensor of the model: name, shape, numpy dtype. parameter: its leaf of the parameters, ""
    for other tensors; it enters the model where it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    parameter: str = ""


@dataclass
class Trace:
    """The ONNX graph while it is written. stacked: parameter -> iterations it is scanned over."""

    name: str
    nodes: list[Any] = field(default_factory=list)
    initializers: dict[str, Any] = field(default_factory=dict)
    types: dict[str, Value] = field(default_factory=dict)
    makers: dict[str, Any] = field(default_factory=dict)
    stacked: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    replicated: dict[str, int] = field(default_factory=dict)
    drawn: set[str] = field(default_factory=set)
    """Random bits."""
    primitives: Mapping[str, Any] = field(default_factory=dict)
    """Name of a primitive -> what writes it (planner.reader.jax.primitives)."""
    prefix: str = ""
    _counts: dict[str, int] = field(default_factory=dict)
    _constants: dict[tuple, Value] = field(default_factory=dict)
    _equations: int = 0

    # --- writing
    # ------------------------------------------------------------------------------------------------------------------------------  # noqa: E501

    def fresh(self, base: str) -> str:
        """A name that is not in use."""
        k = self._counts[base] = self._counts.get(base, -1) + 1
        return f"{self.prefix}{base}_{k}"

    def node(
        self,
        op: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        dtype: Any,
        domain: str = "",
        **attrs: Any,
    ) -> Value:
        """One node with one result."""
        return self.several(op, inputs, [(shape, dtype)], domain, **attrs)[0]

    def several(
        self,
        op: str,
        inputs: Sequence[Value],
        results: Sequence[tuple[Sequence[int], Any]],
        domain: str = "",
        **attrs: Any,
    ) -> list[Value]:
        """One node with some results, each (shape, dtype)."""
        from onnx import helper

        name = self.fresh(op)
        values = [
            Value(
                name if len(results) == 1 else f"{name}.{k}",
                tuple(int(n) for n in shape),
                number_of(dtype),
            )
            for k, (shape, dtype) in enumerate(results)
        ]
        node = helper.make_node(
            op,
            [self.read(v) for v in inputs],
            [v.name for v in values],
            name,
            domain=domain,
            **attrs,
        )
        self.nodes.append(node)
        for v in values:
            self.types[v.name], self.makers[v.name] = v, node
        return values

    def constant(self, array: Any) -> Value:
        """A constant, each value once."""
        from onnx import numpy_helper

        array = np.asarray(array)
        key = (array.dtype.name, array.shape, value_bytes(array))
        if key not in self._constants:
            name = f"constant.{len(self._constants)}"
            self.initializers[name] = numpy_helper.from_array(array, name)
            self._constants[key] = Value(name, array.shape, array.dtype)
        return self._constants[key]

    def read(self, v: Value) -> str:
        """The tensor's name; a parameter becomes a weight of the model when it is first read."""
        if v.parameter:
            self.whole.add(v.parameter)
            self._weight(v.parameter, v.shape, v.dtype)
        return v.name

    def _weight(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        if name not in self.initializers:
            from onnx import TensorProto, helper

            tensor = TensorProto(
                name=name,
                data_type=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)),
                dims=shape,
                data_location=TensorProto.EXTERNAL,
            )
            size = prod(shape) * np.dtype(dtype).itemsize
            for key, value in (("location", "weights.bin"), ("offset", 0), ("length", size)):
                tensor.external_data.add(key=key, value=str(value))
            self.initializers[name] = tensor

    # --- reading
    # ------------------------------------------------------------------------------------------------------------------------------  # noqa: E501

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """The results of an open jaxpr."""
        env: dict[Any, Value] = dict(
            zip(
                jaxpr.constvars,
                (c if isinstance(c, Value) else self.constant(c) for c in consts),
                strict=True,
            )
        )
        env.update(zip(jaxpr.invars, args, strict=True))

        def value(atom: Any) -> Value:
            return (
                self.constant(np.asarray(atom.val, atom.aval.dtype))
                if hasattr(atom, "val")
                else env[atom]
            )

        for eqn in jaxpr.eqns:
            self._equations += 1
            if self._equations > MOST_EQUATIONS:
                raise PlanError(
                    "P195",
                    f"the function has more than {MOST_EQUATIONS} operations once its loops are"
                    " written out",
                    help=["fewer iterations"],
                )
            ins, name = [value(a) for a in eqn.invars], eqn.primitive.name
            outs = [v.aval for v in eqn.outvars]
            if name in INLINED:
                results = self._enter(eqn, ins)
            elif name == "scan":
                results = self.scan(eqn.params, ins)
            else:
                write: Callable[..., list[Value] | None] | None = self.primitives.get(name)
                results = (write(self, eqn.params, ins, outs) if write else None) or self._whole(
                    name, ins, outs
                )
            env.update(zip(eqn.outvars, results, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _enter(self, eqn: Any, ins: list[Value]) -> list[Value]:
        inner = next(eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params)
        return self.jaxpr(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), ins)

    def _whole(self, name: str, ins: list[Value], outs: list[Any]) -> list[Value]:
        """What has no translation: an operator that the planner leaves whole."""
        self.replicated[name] = self.replicated.get(name, 0) + 1
        return self.several(name, ins, [(a.shape, a.dtype) for a in outs], DOMAIN)

    def scan(self, params: Any, ins: list[Value]) -> list[Value]:
        """A scan, written out."""
        n, body, length = params["num_consts"], params["jaxpr"], params["length"]
        consts, carry, xs = (
            ins[:n],
            ins[n : n + params["num_carry"]],
            ins[n + params["num_carry"] :],
        )
        stacked_results: list[list[Value]] = []
        outer, loop = self.prefix, self.fresh("scan")
        for i in range(length - 1, -1, -1) if params["reverse"] else range(length):
            self.prefix, self._counts, outer_counts = f"{loop}.{i}/", {}, self._counts
            results = self.jaxpr(
                body.jaxpr, body.consts, [*consts, *carry, *(self._item(x, i) for x in xs)]
            )
            self.prefix, self._counts = outer, outer_counts
            carry, ys = results[: len(carry)], results[len(carry) :]
            stacked_results.append(ys)
        if params["reverse"]:
            stacked_results.reverse()
        return [
            *carry,
            *(
                self._stack([ys[k] for ys in stacked_results])
                for k in range(len(stacked_results[0]) if stacked_results else 0)
            ),
        ]

    def _item(self, x: Value, i: int) -> Value:
        """One iteration's part of what is scanned."""
        if x.parameter and x.parameter not in self.whole:
            self.stacked[x.parameter] = x.shape[0]
            name = f"{x.parameter}.{i}"
            self._weight(name, x.shape[1:], x.dtype)
            return Value(name, x.shape[1:], x.dtype)
        cut = self.node(
            "Slice",
            [x, *(self.constant(np.array([k], np.int64)) for k in (i, i + 1, 0))],
            (1, *x.shape[1:]),
            x.dtype,
        )
        return self.reshape(cut, x.shape[1:])

    def _stack(self, parts: list[Value]) -> Value:
        rows = [self.reshape(p, (1, *p.shape)) for p in parts]
        return self.node("Concat", rows, (len(rows), *parts[0].shape), parts[0].dtype, axis=0)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """The same elements in another shape."""
        if tuple(shape) == x.shape:
            return x
        return self.node("Reshape", [x, self.constant(np.array(shape, np.int64))], shape, x.dtype)

    def bare(self, values: Sequence[Value], shape: Sequence[int]) -> list[Value]:
        """Operands of an element-wise operator as they were before jax spelt their broadcasting
        out, where the result's shape still follows."""
        operands = list(values)
        for k, v in enumerate(values):
            maker = self.makers.get(v.name)
            if maker is not None and maker.op_type == "Expand":
                source = self._value(maker.input[0])
                if source is not None and np.broadcast_shapes(
                    source.shape, *(o.shape for j, o in enumerate(operands) if j != k)
                ) == tuple(shape):
                    operands[k] = source
        return operands

    def _value(self, name: str) -> Value | None:
        tensor = self.initializers.get(name)
        return self.types.get(name) or next(
            (c for c in self._constants.values() if tensor is not None and c.name == name), None
        )

    # --- the model
    # ----------------------------------------------------------------------------------------------------------------------------  # noqa: E501

    def model(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> Any:
        """The ModelProto. Results that are inputs or weights are passed through an Identity."""
        from onnx import helper

        def info(name: str, v: Value) -> Any:
            return helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(np.dtype(v.dtype)), v.shape
            )

        ends = [
            v if v.name in self.makers else self.node("Identity", [v], v.shape, v.dtype)
            for v in outputs
        ]
        hints = [info(v.name, v) for v in self.types.values()]
        graph = helper.make_graph(
            self.nodes,
            self.name,
            [info(v.name, v) for v in inputs],
            [info(v.name, v) for v in ends],
            list(self.initializers.values()),
            value_info=hints,
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
            ir_version=IR_VERSION,
            producer_name=PRODUCER,
        )
