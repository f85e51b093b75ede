"""The lines of a function body: one per node, and the conversions between them, exactly those of the flow.

`Backend` says how layouts appear: "shard_map" (local shapes, explicit collectives) or "jit" (global shapes, sharding constraints).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from planner.emit.source import comment
from planner.flow import Flow
from planner.graph import Node
from planner.layout import Layout, Step, group, local_shape, padded
from planner.ops import OPERATORS, Call
from planner.ops.base import axes_text
from planner.rule import Rule, Split

Backend = Literal["shard_map", "jit"]
OWN_MASKS = frozenset({"CrossEntropyLoss", "MSELoss", "L1Loss", "BCEWithLogitsLoss"})


@dataclass
class Body:
    """Writes the statements of one function: `value(tensor, layout)` names a variable, writing what is missing to get it.

    held: (tensor, layout) -> variable. arrays: constants too long for a literal, by program key. shift: block repeats read the
    body of repeat 0, so tensors of other repeats are mapped onto it by the caller.
    """

    flow: Flow
    backend: Backend
    held: dict[tuple[str, Layout], str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    counter: list[int] = field(default_factory=lambda: [0])
    float_dtype: str = ""

    @property
    def mesh(self) -> Mapping[str, int]:
        return dict(self.flow.plan.mesh)

    def fresh(self, stem: str = "t") -> str:
        """A new variable name from a fixed alphabet; never derived from the model."""
        self.counter[0] += 1
        return f"{stem}{self.counter[0]}"

    def bind(self, tensor: str, layout: Layout, variable: str) -> None:
        """Say that `variable` holds the tensor in this layout."""
        self.held[tensor, self._key(layout)] = variable

    def _key(self, layout: Layout) -> Layout:
        return layout if self.backend == "shard_map" else Layout(())

    def value(self, tensor: str, layout: Layout) -> str:
        """Expression of the tensor in the layout, converting along the tensor's tree where needed."""
        key = (tensor, self._key(layout))
        if key in self.held:
            return self.held[key]
        graph = self.flow.graph
        if tensor in graph.constants:
            source = self._constant(tensor)
            if source[0] != "t":  # a literal: equal everywhere, no conversion
                return source
        elif (tensor, self._key(self.flow.source[tensor])) not in self.held:
            raise AssertionError(f"tensor {tensor!r} is used before it is made")
        tree = self.flow.trees[tensor]
        start = self.held[tensor, self._key(self.flow.source[tensor])]
        hub_key = (tensor, tree.hub)
        if hub_key not in self.held:
            self.held[hub_key] = self.steps(start, tensor, self.flow.source[tensor], tree.trunk)
        if layout != tree.hub:
            self.held[key] = self.steps(self.held[hub_key], tensor, tree.hub, tree.branches[layout])
        return self.held[key]

    def _constant(self, tensor: str) -> str:
        """A literal, or a variable bound to an array the program carries."""
        value = self.flow.graph.constants[tensor]
        literal = scalar_literal(value)
        if literal is not None:
            self.held[tensor, self._key(self.flow.source[tensor])] = literal
            return literal
        key = f"c{len(self.arrays)}"
        self.arrays[key] = value
        variable = self.fresh()
        cast = f", {self.float_dtype}" if self.float_dtype and self.flow.graph.tensors[tensor].is_float else ""
        self.lines.append(f"{variable} = jnp.asarray(CONSTANTS[{key!r}]{cast})")
        self.bind(tensor, self.flow.source[tensor], variable)
        return variable

    def steps(self, variable: str, tensor: str, source: Layout, steps: tuple[Step, ...]) -> str:
        """Write the conversion steps; returns the last variable."""
        if self.backend == "jit":
            return variable
        for step in steps:
            new = self.fresh()
            self.lines.append(f"{new} = {self.step_text(variable, step)}{self._why(step, tensor)}")
            variable = new
        return variable

    def step_text(self, x: str, step: Step) -> str:
        """The expression of one step."""
        axes = axes_text(step.axes) if step.axes else ""
        if step.kind == "all-reduce":
            return f"lax.psum({x}, {axes})"
        if step.kind == "reduce-scatter":
            return f"lax.psum_scatter({x}, {axes}, scatter_dimension={step.dim}, tiled=True)"
        if step.kind == "all-gather":
            return f"lax.all_gather({x}, {axes}, axis={step.dim}, tiled=True)"
        if step.kind == "all-gather-invariant":
            return f"lax.all_gather({x}, {axes}, axis={step.dim}, tiled=True, to='invarying')"
        if step.kind == "all-to-all":
            return f"lax.all_to_all({x}, {axes}, split_axis={step.to_dim}, concat_axis={step.dim}, tiled=True)"
        if step.kind == "fan":
            return f"lax.pcast({x}, {axes}, to='varying')"
        if step.kind == "slice":
            self.helpers.add("cut")
            return f"cut({x}, {axes}, {step.dim})"
        if step.kind == "unpad":
            return f"lax.slice_in_dim({x}, 0, {step.size}, axis={step.dim})"
        self.helpers.add("pad_to")
        return f"pad_to({x}, {step.dim}, {step.size})"

    def _why(self, step: Step, tensor: str) -> str:
        if step.kind in ("pad", "unpad"):
            return ""
        back = f"; backward {step.backward}" if step.backward and tensor in self.flow.grad else ""
        label = self.flow.graph.labels.get(tensor, tensor)
        return f"  # {step.kind} over {'+'.join(step.axes)}{back}: {comment(label, 60)}"

    def node(self, index: int) -> None:
        """Write one node."""
        graph, node = self.flow.graph, self.flow.graph.nodes[index]
        rule = self.flow.rules[index]
        split = self.flow.split(index) if self.backend == "shard_map" else Split()
        live = tuple(o for o in node.outputs if o)
        needs = [self.flow.need.get((index, slot)) for slot in range(len(node.inputs))]
        args = [self.value(n, need) if need is not None else "" for n, need in zip(node.inputs, needs, strict=True)]
        results = [rule.result(k, split, self.flow.plan.order) for k in range(len(live))]
        sharded = self.backend == "shard_map"
        local = lambda name, layout: local_shape(graph.tensors[name].shape, layout, self.mesh) if sharded else graph.tensors[name].shape  # noqa: E731
        call = Call(
            node, rule, split, self.mesh, tuple(self._masked(node, rule, split, args)),
            tuple(local(n, need) if need is not None else () for n, need in zip(node.inputs, needs, strict=True)),
            tuple(local(o, layout) for o, layout in zip(live, results, strict=True)),
            graph.shapes(node.inputs), graph.shapes(live),
            tuple(graph.tensors[n].dtype if n else "" for n in node.inputs), tuple(self._dtype(graph.tensors[o].dtype) for o in live), self.helpers,
        )  # fmt: skip
        text = OPERATORS[node.op].kernel(call)
        names = [self.fresh() for _ in live]
        shapes = " ".join(rule_cells(rule.results[k], split) for k in range(len(live)))
        note = f"  # {comment(node.op, 24)} {comment(node.id, 48)} -> {shapes}"
        self.lines.append(f"{', '.join(names)} = {text}{note}")
        for name, variable, layout in zip(live, names, results, strict=True):
            self.bind(name, layout, variable)
            if self.backend == "jit":
                self._constrain(name, variable)

    def _dtype(self, dtype: str) -> str:
        return self.float_dtype.removeprefix("jnp.") if self.float_dtype and dtype == "float32" else dtype

    def _constrain(self, tensor: str, variable: str) -> None:
        spec = spec_text(self.flow.source[tensor], self.flow.graph.tensors[tensor].shape, self.mesh)
        if spec != "P()":
            self.lines.append(f"{variable} = at({variable}, {spec})")

    def _masked(self, node: Node, rule: Rule, split: Split, args: list[str]) -> list[str]:
        """Zero the padding of operands that are summed over a padded factor."""
        if node.op in OWN_MASKS or self.backend == "jit":
            return args
        out = list(args)
        for slot, dims in enumerate(rule.operands):
            for d, dim in enumerate(dims):
                for f in dim:
                    axes = split.axes(f)
                    if args[slot] and f in rule.summed and axes and rule.sizes[f] % group(axes, self.mesh):
                        piece = padded(rule.sizes[f], axes, self.mesh) // group(axes, self.mesh)
                        self.helpers.add("real_part")
                        out[slot] = f"real_part({out[slot]}, {d}, lax.axis_index({axes_text(axes)}) * {piece}, {rule.sizes[f]})"
        return out


def scalar_literal(value: np.ndarray) -> str | None:
    """A Python literal for one number (so that it adapts to its neighbour's dtype), else None."""
    if value.ndim != 0:
        return None
    item = value.item()
    if isinstance(item, float) and not math.isfinite(item):
        return f"float('{item}')"
    return repr(item) if isinstance(item, bool | int) or item >= 0 else f"({item!r})"


def rule_cells(dims: tuple[tuple[str, ...], ...], split: Split) -> str:
    """A result's dims in plain notation, such as [b/data, s, n/model]."""
    cells = []
    for dim in dims:
        axes = [a for f in dim for a in split.axes(f)]
        cells.append(("".join(dim) or "1") + ("/" + "+".join(axes) if axes else ""))
    return "[" + ", ".join(cells) + "]"


def spec_text(layout: Layout, shape: tuple[int, ...] | None = None, mesh: Mapping[str, int] | None = None) -> str:
    """A PartitionSpec literal; with `shape`, axes that do not divide their dim are left out (jit only shards evenly)."""
    cells = []
    for d, axes in enumerate(layout.dims):
        if shape is not None and mesh is not None and axes and shape[d] % group(axes, mesh):
            axes = ()
        cells.append("None" if not axes else axes_text(axes))
    while cells and cells[-1] == "None":
        cells.pop()
    return f"P({', '.join(cells)})"
