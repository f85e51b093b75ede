"""The values of one function: which variable holds a tensor in a layout, and the reshards
between them, exactly those of the flow.

Functions nest. What an inner function lacks it asks of the one around it, and what it made is
returned where someone outside asks; so arguments and results are found, not declared. Variable
names come from one counter, hence mean the same thing everywhere.

Floats are of the type the program computes in, except those made of constants and integers alone
(`precise`): positions, rotary angles and masks stay float32, whatever the program computes in, and
are rounded once, where they meet values that depend on the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np

from planner.emit.local_names import GENERATED, given_name, local_names, weight_name
from planner.emit.pieces import full_shape
from planner.emit.source import comment, literal
from planner.emit.text import counted, inlined, small_literal
from planner.execution.block_values import settles
from planner.execution.layout_flow import Flow, stored_layout
from planner.execution.recompute import is_gathered
from planner.graph.ir import Graph
from planner.ops.base import axes_text, jnp_dtype
from planner.sharding.layout import Layout, ReshardStep, group

Backend = Literal["shard_map", "jit"]
Steps = tuple[ReshardStep, ...]
Line = str | Callable[[], str]


def precise(graph: Graph) -> frozenset[str]:
    """Floats made of constants and integers alone."""
    learned = {*graph.weights, *(n for n in graph.inputs if graph.tensors[n].is_float)}
    for node in graph.nodes:
        if any(n in learned for n in node.inputs):
            learned.update(o for o in node.outputs if o)
    return frozenset(n for n, t in graph.tensors.items() if t.is_float and n not in learned)


@dataclass
class Values:
    """The values of one function: `value(tensor, layout)` names a variable, writing what is missing
    to get it.

    float8: whether products of linear layers have float8 operands. arrays: `stem` and its
    number -> constant too long for a statement. variables: (tensor, steps from its source) ->
    variable. given: (tensor, layout) -> variable bound from outside in any layout. padded:
    tensor -> (variable, its shape), in jit programs, of a value that is cut unevenly. cast:
    (tensor, layout) -> variable of a precise value in the type the program computes in.
    repeats: names of the first repeat of a block -> what to call them in a function that stands
    for all. weights: weight -> expression of it as it is kept. tie: whether gathers wait for
    the operand beside them (unrolled programs). name_collectives: whether results of
    collectives are named for checkpoint policies; named: what these call single tensors, and
    what settles their pending sums. first: the same function of the first of several overlapped
    microbatches, whose statements these go among; own: tensors of which this microbatch has its
    own, all others are asked of it. stems: variable -> what to call it, of all functions of a
    program. behind_blocks: the first node behind all repeated blocks, whose backward passes follow
    that of what is behind them; None where there are none. products: variable -> local shape of
    what products behind the blocks make, where that has more dims than rows.
    """

    flow: Flow
    backend: Backend
    lines: list[Line] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    counter: list[int] = field(default_factory=lambda: [0])
    float_dtype: str = ""
    float8: bool = False
    precise: frozenset[str] = frozenset()
    weights: dict[str, str] = field(default_factory=dict)
    repeats: Mapping[str, str] = field(default_factory=dict)
    tie: bool = False
    name_collectives: bool = False
    named: Mapping[str, str] = field(default_factory=dict)
    parent: Self | None = None
    first: Self | None = None
    own: frozenset[str] = frozenset()
    variables: dict[tuple[str, Steps], str] = field(default_factory=dict)
    given: dict[tuple[str, Layout], str] = field(default_factory=dict)
    padded: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    cast: dict[tuple[str, Layout], str] = field(default_factory=dict)
    arguments: dict[str, None] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    made_in: dict[str, Self] = field(default_factory=dict)
    stems: dict[str, str] = field(default_factory=dict)
    cause: str = ""
    stem: str = "c"
    behind_blocks: int | None = None
    products: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def mesh(self) -> Mapping[str, int]:
        """The mesh of the plan: axis -> size."""
        return dict(self.flow.plan.mesh)

    def inner(self, flow: Flow | None = None, **changes: object) -> Self:
        """A function inside this one."""
        return type(self)(
            flow or self.flow,
            self.backend,
            helpers=self.helpers,
            arrays=self.arrays,
            counter=self.counter,
            float_dtype=self.float_dtype,
            float8=self.float8,
            precise=self.precise,
            stems=self.stems,
            parent=self,
            behind_blocks=self.behind_blocks,
            **changes,  # type: ignore[arg-type]
        )

    def for_microbatch(self, own: frozenset[str], parent: Self | None = None) -> Self:
        """The same function for another overlapped microbatch, which has variables of its own for
        the tensors in `own`."""
        return replace(
            self,
            parent=parent,
            first=self,
            own=own,
            variables={},
            given={},
            padded={},
            cast={},
            made_in={},
        )

    def fresh(self, stem: str = "t") -> str:
        """A new variable name from a fixed alphabet; never derived from the model."""
        self.counter[0] += 1
        return f"{stem}{self.counter[0]}"

    def bind(self, tensor: str, layout: Layout, variable: str) -> None:
        """Say that `variable` holds the tensor in this layout."""
        self.named_after(variable, tensor)
        tree = self.flow.trees.get(tensor)
        if self.backend == "jit" or layout == self.flow.source[tensor]:
            self.variables[tensor, ()] = variable
        elif tree is not None and (layout == tree.shared_layout or layout in tree.reader_steps):
            self.variables[tensor, tree.path(layout)] = variable
        else:
            self.given[tensor, layout] = variable

    def named_after(self, variable: str, tensor: str) -> str:
        """The variable, which is to be called after the tensor (planner.emit.local_names)."""
        graph = self.flow.graph
        if GENERATED.fullmatch(variable):
            if variable.startswith("x"):  # what is carried through blocks
                stem = "x"
            elif tensor in graph.weights:
                stem = weight_name(graph.labels.get(tensor, tensor))
            else:
                names = local_names(graph, self.flow.plan.repeated_blocks)
                stem = names.get(tensor) or given_name(tensor)
            self.stems.setdefault(variable, stem)
        return variable

    def steps_to(self, tensor: str, layout: Layout) -> Steps:
        """Steps from the tensor's source to a layout."""
        return () if self.backend == "jit" else self.flow.trees[tensor].path(layout)

    def value(self, tensor: str, layout: Layout) -> str:
        """Variable (or literal) of the tensor in the layout, converting along the tensor's tree
        where needed."""
        if self.first is not None and tensor not in self.own:
            return self.first.value(tensor, layout)
        if (tensor, layout) in self.given:
            return self.given[tensor, layout]
        steps = self.steps_to(tensor, layout)
        start = self._nearest(tensor, steps)
        if start is not None and start < len(steps) and tensor in self.made_in:
            start = self._import(
                tensor, steps
            )  # what made it may have gone further along these steps than was asked of it before
        if start is None:
            if tensor in self.flow.graph.constants:
                text = self._constant(tensor)
                if text is not None:  # a literal: equal everywhere, no reshard
                    return text
            elif tensor in self.made_in:
                self._import(tensor, steps)
            elif tensor in self.weights:
                self._weight(tensor)
            elif self.parent is not None:
                variable = self.parent.value(tensor, layout)
                variable = variable if variable.isidentifier() else self.parent._named(variable)
                self.arguments[variable] = None
                self.given[tensor, layout] = variable
                return variable
            else:
                raise AssertionError(f"tensor {tensor!r} is used before it is made")
            start = self._nearest(tensor, steps)
        assert start is not None
        for end in range(start + 1, len(steps) + 1):
            self.variables[tensor, steps[:end]] = self._step(
                self.variables[tensor, steps[: end - 1]], steps[end - 1], tensor
            )
        return self.variables[tensor, steps]

    def computed(self, tensor: str, layout: Layout) -> str:
        """`value` of a precise tensor in the type the program computes in, rounded where it is
        made: outside repeated blocks where it can be."""
        if tensor in self.flow.graph.constants and not self.flow.graph.tensors[tensor].shape:
            return self.value(tensor, layout)  # a literal has no type of its own
        if self.first is not None and tensor not in self.own:
            return self.first.computed(tensor, layout)
        key = (tensor, layout)
        if key not in self.cast:
            if self.parent is None or tensor in self.made_in or (tensor, ()) in self.variables:
                value = self.value(tensor, layout)
                self.cast[key] = self.named_after(self.fresh(), tensor)
                self.lines.append(f"{self.cast[key]} = {value}.astype({self.float_dtype})")
            else:
                self.cast[key] = self.parent.computed(tensor, layout)
                self.arguments[self.cast[key]] = None
        return self.cast[key]

    def _nearest(self, tensor: str, steps: Steps) -> int | None:
        """How many of the steps, from the first on, are taken already; None where not even the
        tensor itself is at hand."""
        if tensor in self.padded and (tensor, ()) not in self.variables:
            self.variables[tensor, ()] = self._resized(
                *self.padded[tensor], self.flow.graph.tensors[tensor].shape
            )
        return next(
            (end for end in range(len(steps), -1, -1) if (tensor, steps[:end]) in self.variables),
            None,
        )

    def _import(self, tensor: str, steps: Steps) -> int:
        """Have the inner function that made a tensor return it, as far along the steps as it (or
        this one) got; how far that is."""
        maker = self.made_in[tensor]
        end, mine = maker._nearest(tensor, steps), self._nearest(tensor, steps)
        assert end is not None
        if mine is not None and mine >= end:
            return mine
        variable = maker.variables[tensor, steps[:end]]
        if variable not in maker.results:
            maker.results.append(variable)
        self.variables[tensor, steps[:end]] = variable
        return end

    def _constant(self, tensor: str) -> str | None:
        """A literal that fits its neighbours, or None after binding a variable to the array."""
        value = self.flow.graph.constants[tensor]
        if value.ndim == 0:
            return small_literal(value)
        variable = self.named_after(self.fresh(), tensor)
        dtype = jnp_dtype(self._dtype(tensor))
        if evenly_spaced := counted(value):
            self.stems[variable] = "indices"
            self.lines.append(
                f"{variable} = jnp.arange({evenly_spaced}, dtype={dtype})"
                + (f".reshape({value.shape})" if value.ndim > 1 else "")
            )
        elif value.size <= 16:
            self.lines.append(
                f"{variable} = jnp.array({small_literal(value)}, {dtype}).reshape({value.shape})"
                if value.ndim > 1 or not value.size
                else f"{variable} = jnp.array({small_literal(value)}, {dtype})"
            )
        else:
            key = f"{self.stem}{list(self.flow.graph.constants).index(tensor)}"
            self.arrays[key] = value
            place = key.upper() if inlined(value) else f'CONSTANTS["{key}"]'
            self.lines.append(f"{variable} = jnp.asarray({place}, {dtype})")
        self.variables[tensor, ()] = variable
        return None

    def _weight(self, tensor: str) -> None:
        """Bind a weight as its tree begins: gathered where it is kept in pieces."""
        text, plan = self.weights[tensor], self.flow.weights[tensor]
        if self.backend == "shard_map" and is_gathered(self.flow, tensor):
            variable = self.named_after(self.fresh("w"), tensor)
            size = self.flow.graph.tensors[tensor].shape[plan.zero_dim]
            padding = (
                f", {size}"
                if size % group(plan.layout.dims[plan.zero_dim] + plan.zero_axes, self.mesh)
                else ""
            )
            where = f"{axes_text(plan.zero_axes)}, {plan.zero_dim}{padding}"
            cause = self.cause if self.tie else ""
            self.helpers.add("gather_after" if cause else "gather_weight")
            label = comment(self._displayed(tensor), 60)
            self.lines.append(
                f"{variable} = {f'gather_after({cause}, ' if cause else 'gather_weight('}{text},"
                f" {where})  # {label}"
            )
            text = variable
        elif self.backend == "jit" and self._kept(tensor):
            return  # `_nearest` leaves the padding out
        self.variables[tensor, ()] = text

    def _kept(self, tensor: str) -> tuple[str, tuple[int, ...]] | None:
        """(variable, its shape) of a padded value that is at hand, in jit programs."""
        if tensor in self.padded or (tensor, ()) in self.variables:
            return self.padded.get(tensor)
        if tensor in self.weights:
            full = full_shape(self, tensor, stored_layout(self.flow.weights[tensor]))
            if full != self.flow.graph.tensors[tensor].shape:
                self.padded[tensor] = self.weights[tensor], full
        elif tensor in self.made_in:
            maker = self.made_in[tensor]
            if kept := maker._kept(tensor):
                self.padded[tensor] = kept
                if kept[0] not in maker.results:
                    maker.results.append(kept[0])
        elif self.parent is not None and (kept := self.parent._kept(tensor)):
            text, full = kept
            variable = text if text.isidentifier() else self.parent._named(text)
            self.parent.padded[tensor] = self.padded[tensor] = variable, full
            self.arguments[variable] = None
        return self.padded.get(tensor)

    def _resized(self, text: str, shape: tuple[int, ...], want: tuple[int, ...]) -> str:
        """A variable of a value that is padded, or cut back, to a shape."""
        for d, (n, size) in enumerate(zip(shape, want, strict=True)):
            if n != size:
                text = self.step_text(
                    text, ReshardStep("pad" if size > n else "unpad", (), dim=d, size=size)
                )
        variable = self.fresh()
        self.lines.append(f"{variable} = {text}")
        return variable

    def _named(self, text: str) -> str:
        """A variable for an expression, so that it can be an argument."""
        variable = self.fresh()
        self.lines.append(f"{variable} = {text}")
        for key, expression in self.variables.items():
            if expression == text:
                self.variables[key] = self.named_after(variable, key[0])
        return variable

    def _step(self, x: str, step: ReshardStep, tensor: str) -> str:
        """Write one reshard step; returns its variable."""
        new, text = self.named_after(self.fresh(), tensor), self.step_text(x, step)
        if name := self._checkpoint_name(tensor, step):
            text = f"checkpoint_name({text}, {literal(name)})"
        self.lines.append(f"{new} = {text}{self._why(step, tensor)}")
        return new

    def _checkpoint_name(self, tensor: str, step: ReshardStep) -> str:
        """What checkpoint policies call a tensor after a step, "" for nothing."""
        if tensor in self.named:
            return self.named[tensor] * settles(step)
        return "collective" * (self.name_collectives and bool(step.forward))

    def step_text(self, x: str, step: ReshardStep) -> str:
        """The expression of one step."""
        axes = axes_text(step.axes) if step.axes else ""
        if step.kind == "all-reduce":
            return f"lax.psum({x}, {axes})"
        if step.kind == "reduce-scatter":
            return f"lax.psum_scatter({x}, {axes}, scatter_dimension={step.dim}, tiled=True)"
        if step.kind == "all-gather":
            return f"lax.all_gather({x}, {axes}, axis={step.dim}, tiled=True)"
        if step.kind == "all-gather-invariant":
            return f'lax.all_gather({x}, {axes}, axis={step.dim}, tiled=True, to="invarying")'
        if step.kind == "all-to-all":
            return (
                f"lax.all_to_all({x}, {axes}, split_axis={step.to_dim}, concat_axis={step.dim},"
                " tiled=True)"
            )
        if step.kind == "pvary":
            return f'lax.pcast({x}, {axes}, to="varying")'
        if step.kind == "slice":
            self.helpers.add("cut")
            return f"cut({x}, {axes}, {step.dim})"
        if step.kind == "unpad":
            return f"lax.slice_in_dim({x}, 0, {step.size}, axis={step.dim})"
        self.helpers.add("pad_to")
        return f"pad_to({x}, {step.dim}, {step.size})"

    def _why(self, step: ReshardStep, tensor: str) -> str:
        if step.kind in ("pad", "unpad"):
            return ""
        back = f"; backward {step.backward}" if step.backward and tensor in self.flow.grad else ""
        what = {
            "pvary": "same value, gradients pending",
            "slice": "own piece",
            "all-gather-invariant": "all-gather",
        }.get(step.kind, step.kind)
        return (
            f"  # {comment(what + ' over ' + '+'.join(step.axes) + back, 90)}:"
            f" {comment(self._displayed(tensor), 60)}"
        )

    def _displayed(self, name: str) -> str:
        """What to call a tensor or a node in a comment."""
        label = self.flow.graph.labels.get(name, name)
        return self.repeats.get(label, label)

    def _dtype(self, tensor: str) -> str:
        """The type a tensor has in the program."""
        dtype = self.flow.graph.tensors[tensor].dtype
        if not self.float_dtype or dtype not in ("float64", "float32", "float16", "bfloat16"):
            return dtype
        return "float32" if tensor in self.precise else self.float_dtype
