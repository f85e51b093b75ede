"""The statements of one function: one per node, with what planner.emit.values writes to bring its
operands into the layouts it needs.

`Backend` says how layouts appear: "shard_map" (local shapes, explicit collectives) or "jit" (global
shapes, sharding constraints).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.emit.pieces import by_piece, full_shape, on_pieces, operand
from planner.emit.source import comment, literal
from planner.emit.text import rule_cells, short_floats, spec_text, wrapped
from planner.emit.values import Values
from planner.errors import PlanError
from planner.execution.eight_bit import eight_bit
from planner.execution.gated_units import gated_units
from planner.execution.layout_flow import derive
from planner.execution.odd_heads import cut_back, wide_nodes
from planner.graph.ir import Node
from planner.ops import OPERATORS, Call, operator_of
from planner.ops.base import NoRule, axes_text
from planner.ops.control import region
from planner.sharding.layout import Axes, Layout, group, local_shape, padded
from planner.sharding.rule import Rule, Split


@dataclass
class Body(Values):
    """Writes the statements of one function, node by node.

    looped: whether it is the body of a loop, whose forward and backward pass are two computations.
    plain: nodes of gated units (planner.execution.gated_units) that are written as any other.
    """

    looped: bool = False
    plain: frozenset[int] = frozenset()

    def node(self, index: int) -> None:
        """Write one node, with the node that reads it what is inside a gated unit; of further
        overlapped microbatches only what depends on them."""
        if self.first is not None and self.own.isdisjoint(self.flow.graph.nodes[index].outputs):
            return
        units = gated_units(self.flow.graph, self.flow.grad, self.flow.plan.repeated_blocks)
        if index in self.plain or not (index in units.nodes or index in units.inside):
            self._statement(index)
        elif index in units.inside:
            self._gated(index, units.inside[index])

    def _gated(self, index: int, inside: Sequence[int]) -> None:
        """Write the function of a gated unit, of which nothing is kept but its operands, and its
        call. index: the node that reads what the nodes inside make."""
        (output,), name = self.flow.graph.nodes[index].outputs, self.fresh("gated")
        self.stems[name] = "gated"
        inner = self.inner(
            repeats=self.repeats,
            name_collectives=self.backend == "jit" and self.name_collectives,
            plain=frozenset((*inside, index)),
        )
        for i in inside:
            inner.node(i)
        waiting = tuple(inner.arguments)
        self.cause = next(iter(waiting), "")
        inner.node(index)
        layout = self.flow.source[output]
        if output in inner.padded:
            variable, full = inner.padded[output]
            self.padded[output] = variable, full
        else:
            variable = inner.value(output, layout)
            self.bind(output, layout, variable)
        arguments = ", ".join(inner.arguments)
        wrap = f"lean({name})" if self.looped else f"made_again({name}, {len(waiting)})"
        self.helpers.add("lean" if self.looped else "made_again")
        self.lines += [
            f"def {name}({arguments}):  # the backward pass makes again what is inside",
            *(f"    {line}" for line in inner.lines),
            f"    return {variable}",
            f"{variable} = {wrap}({arguments})  # {self._says(index, [layout])}",
        ]
        self._name(output, variable)

    def _statement(self, index: int) -> None:
        """Write one node."""
        graph, node = self.flow.graph, self.flow.graph.nodes[index]
        rule = self.flow.rules[index]
        pieces = self.backend == "jit" and by_piece(self, index)
        split = self.flow.split(index) if self.backend == "shard_map" or pieces else Split()
        live = tuple(o for o in node.outputs if o)
        results = [rule.result(k, split, self.flow.plan.order) for k in range(len(live))]
        args = self._operands(index, pieces)
        call = self._call(index, split, results, args, pieces)
        if node.bodies:
            call = self._with_bodies(call)
        try:
            behind = self._at_once(index, call)
            text = behind or OPERATORS[node.op].kernel(call)
        except NoRule as reason:
            raise PlanError(
                "P066",
                f"no program can be written: node {node.id!r} ({node.op}) has {reason}",
                help=["the plan stands"],
            ) from None
        if whole := cut_back(self.flow, index):
            last = len(call.out_shapes[0]) - 1
            text = f"lax.slice_in_dim({text}, 0, {whole}, axis={last})"
        if pieces:
            text, results[0] = on_pieces(self, text, index, args, results[0])
        text = text[1:-1] if wrapped(text) else text
        names = [self.fresh() for _ in live]
        if behind and len(call.out_shapes[0]) > 2:
            shape = call.out_shapes[0]
            self.products[names[0]] = (*shape[:-1], (not whole and call.wide) or shape[-1])
        self.lines.append(f"{', '.join(names)} = {text}  # {self._says(index, results)}")
        for name, variable, layout in zip(live, names, results, strict=True):
            full = full_shape(self, name, layout) if pieces else graph.tensors[name].shape
            if full != graph.tensors[name].shape:
                self.padded[name] = variable, full
            else:
                self.bind(name, layout, variable)
            if self.backend == "jit":
                self._constrain(name, variable, layout if pieces else self.flow.source[name], full)
            if not operator_of(node.op).names_itself:
                self._name(name, variable)

    def _at_once(self, index: int, call: Call) -> str:
        """A product with a trained weight behind the repeated blocks, or a trained bias added to
        it, of which all gradients are made at once; "" of any other node. Compilers put off the
        weight's and the bias's, and keep logits while the backward passes of all blocks run."""
        node, operator = call.node, operator_of(call.node.op)
        trained = any(n in self.flow.graph.weights and n in self.flow.grad for n in node.inputs)
        behind = self.behind_blocks is not None and index >= self.behind_blocks
        if not behind or not trained or not (operator.kind == "product" or operator.adds):
            return ""
        names = [f"x{k}" if a else "" for k, a in enumerate(call.args)]
        text = OPERATORS[node.op].kernel(replace(call, args=tuple(names)))
        text = text[1:-1] if wrapped(text) else text
        inside, outside = (", ".join(filter(None, each)) for each in (names, call.args))
        return f"{call.use('at_once')}(lambda {inside}: {text})({outside})"

    def _says(self, index: int, results: Sequence[Layout]) -> str:
        """What a comment says of a node and of how its results are cut."""
        node, rule = self.flow.graph.nodes[index], self.flow.rules[index]
        cells = " ".join(rule_cells(rule, k, self.flow.split(index)) for k in range(len(results)))
        pending = "".join(f" partial over {'+'.join(r.partial)}" for r in results[:1] if r.partial)
        name = self._displayed(node.id)
        what = name if node.op in name.rpartition("/")[2] else f"{node.op} {name}"
        return f"{comment(what, 88)} -> {comment(cells + pending, 120)}"

    def _operands(self, index: int, pieces: bool) -> list[str]:
        """Variables of a node's operands in the layouts it needs, "" of those that it lacks.
        pieces: whether it runs piece by piece in a jit program."""
        graph, node = self.flow.graph, self.flow.graph.nodes[index]
        needs = [self.flow.need.get((index, slot)) for slot in range(len(node.inputs))]
        args = [""] * len(node.inputs)
        # operands before weights: a gathered weight waits for the operand beside it
        for slot in sorted(range(len(node.inputs)), key=lambda s: node.inputs[s] in graph.weights):
            name, need = node.inputs[slot], needs[slot]
            if need is None:
                continue
            if name in graph.weights and self.tie:
                ready = zip(args, node.inputs, strict=True)
                self.cause = next(
                    (a for a, n in ready if a.isidentifier() and graph.tensors[n].is_float), ""
                )
            rounded = self._rounded(node, slot)
            if pieces:
                args[slot] = self._on_pieces(name, need, rounded)
            else:
                args[slot] = (self.computed if rounded else self.value)(name, need)
        if self.backend == "jit" and operator_of(node.op).kind == "convolution":
            self._restate(node, needs, args)
        return args

    def _call(
        self, index: int, split: Split, results: Sequence[Layout], args: list[str], pieces: bool
    ) -> Call:
        """What the operator's kernel is written from."""
        graph, node, rule = self.flow.graph, self.flow.graph.nodes[index], self.flow.rules[index]
        needs = [self.flow.need.get((index, slot)) for slot in range(len(node.inputs))]
        live = tuple(o for o in node.outputs if o)

        def local(name: str, layout: Layout) -> tuple[int, ...]:
            shape = graph.tensors[name].shape
            whole = self.backend == "jit" and not pieces
            return shape if whole else local_shape(shape, layout, self.mesh)

        if pieces:
            args = [operand(self, index, k) if a else "" for k, a in enumerate(args)]
        return Call(
            node=replace(node, attrs=short_floats(node.attrs)),
            rule=rule,
            split=split,
            mesh=self.mesh,
            args=tuple(self._masked(node, rule, split, args)),
            in_shapes=tuple(
                local(n, need) if need is not None else ()
                for n, need in zip(node.inputs, needs, strict=True)
            ),
            out_shapes=tuple(local(o, layout) for o, layout in zip(live, results, strict=True)),
            global_in=graph.shapes(node.inputs),
            global_out=graph.shapes(live),
            dtypes=tuple(graph.tensors[n].dtype if n else "" for n in node.inputs),
            out_dtypes=tuple(self._dtype(o) for o in live),
            trained=not self.flow.grad.isdisjoint(live),
            trained_slots=frozenset(k for k, n in enumerate(node.inputs) if n in self.flow.grad),
            helpers=self.helpers,
            wide=wide_nodes(self.flow).get(index, 0),
            saved_as=self.named.get(live[0], ""),
            float8=self.float8 and index in eight_bit(graph),
        )

    def _with_bodies(self, call: Call) -> Call:
        """Write the functions of a node's bodies."""
        node = call.node
        regions = region(node, self.flow.graph)
        names: list[str] = []
        result_types: tuple[tuple[str, Axes], ...] = ()
        for body, splits in zip(node.bodies, regions.splits(node, call.split), strict=True):
            flow = derive(
                body,
                replace(
                    self.flow.plan, splits=splits, weight_plans={}, zero_stage=0, repeated_blocks=()
                ),
                training=False,
            )
            name = self.fresh("body")
            exact = any(o in self.precise for o in node.outputs)
            inner = type(self)(
                flow,
                self.backend,
                helpers=self.helpers,
                arrays=self.arrays,
                counter=self.counter,
                stem=f"{name}c",
                stems=self.stems,
                float_dtype="" if exact else self.float_dtype,
            )
            arguments = [inner.fresh("x") for _ in body.inputs]
            for tensor, variable in zip(body.inputs, arguments, strict=True):
                if tensor in flow.source:
                    inner.bind(tensor, flow.source[tensor], variable)
            for index in range(len(body.nodes)):
                inner.node(index)
            results = [inner.value(o, flow.source[o].stored) for o in body.outputs]
            head = f"def {name}({', '.join(arguments)}):  # {comment(self._displayed(node.id), 88)}"
            self.lines += [
                head,
                *(f"    {line}" for line in inner.lines),
                f"    return ({', '.join(results)},)",
            ]
            names.append(name)
            kept = body.outputs[len(body.outputs) - len(regions.made) :]
            result_types = tuple(
                (inner._dtype(o), axes)
                for o, axes in zip(
                    kept, regions.axes(call.split, self.flow.plan.order), strict=True
                )
            )
        return replace(call, functions=tuple(names), made=result_types)

    def _on_pieces(self, tensor: str, need: Layout, rounded: bool) -> str:
        """Variable of an operand of a kernel of pieces, padded to be cut."""
        shape, want = self.flow.graph.tensors[tensor].shape, full_shape(self, tensor, need)
        kept = None if rounded else self._kept(tensor)
        if kept and kept[1] == want:
            return kept[0]
        variable = (self.computed if rounded else self.value)(tensor, need)
        return variable if want == shape else self._resized(variable, shape, want)

    def _rounded(self, node: Node, slot: int) -> bool:
        """Whether an operand is a precise float that must be to_device to the type of the others.
        Losses and attention's scores are float32 themselves."""
        if (
            not self.float_dtype
            or node.inputs[slot] not in self.precise
            or any(o in self.precise for o in node.outputs)
        ):
            return False
        operator = operator_of(node.op)
        return operator.kind != "loss" and slot not in operator.own_precision

    def _restate(self, node: Node, needs: Sequence[Layout | None], args: list[str]) -> None:
        """State how a convolution's operands lie where the plan converts them: the partitioner of
        jax 0.10 gets the gradient of the weight wrong when the operand is cut along its image and
        the weight along the channels."""
        for slot, need in enumerate(needs):
            name = node.inputs[slot]
            if need is not None and need != self.flow.source[name]:
                args[slot] = (
                    f"at({args[slot]},"
                    f" {spec_text(need, self.flow.graph.tensors[name].shape, self.mesh)})"
                )

    def _constrain(
        self, tensor: str, variable: str, layout: Layout, shape: tuple[int, ...]
    ) -> None:
        """jit programs: state how the value is cut; where a plan has a collective, its result is
        named for checkpoint policies."""
        spec = spec_text(layout, shape, self.mesh)
        text = variable if spec == "P()" else f"at({variable}, {spec})"
        if (
            tensor not in self.named
            and self.name_collectives
            and tensor in self.flow.trees
            and any(s.forward for s in self.flow.trees[tensor].steps())
        ):
            text = f'checkpoint_name({text}, "collective")'
        if text != variable:
            self.lines.append(f"{variable} = {text}")

    def _name(self, tensor: str, variable: str) -> None:
        """Name a value that is saved by name, as it was made."""
        if tensor in self.named:
            self.lines.append(
                f"{variable} = checkpoint_name({variable}, {literal(self.named[tensor])})"
            )

    def _masked(self, node: Node, rule: Rule, split: Split, args: list[str]) -> list[str]:
        """Zero the padding of operands that are summed over a padded factor."""
        if operator_of(node.op).kind in ("loss", "lookup"):
            return args
        masked = list(args)
        for slot, dims in enumerate(rule.operands):
            for d, dim in enumerate(dims):
                for f in dim:
                    axes = split.axes(f)
                    if (
                        args[slot]
                        and f in rule.summed
                        and axes
                        and rule.sizes[f] % group(axes, self.mesh)
                    ):
                        piece = padded(rule.sizes[f], axes, self.mesh) // group(axes, self.mesh)
                        self.helpers.add("real_part")
                        masked[slot] = (
                            f"real_part({masked[slot]}, {d}, lax.axis_index({axes_text(axes)}) *"
                            f" {piece}, {rule.sizes[f]})"
                        )
        return masked
