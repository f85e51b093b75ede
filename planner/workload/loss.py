"""What training means for an exported graph: the loss that is appended, and what is pruned because
the loss does not need it.

Losses: "cross_entropy" (labels int32, shape of the logits without the class dim), "mse", "l1",
"bce" (from logits; targets like the output), "output:NAME" (a scalar output of the graph is the
loss), sums of those ("output:a+0.5*output:b") and "FILE.py:function" (planner.workload.user_loss).
The default is cross_entropy when the output is logits of rank >= 2, else mse.

Cross-entropy is the mean over the rows that count. shift_labels: labels are the tokens themselves;
position t is held against label t + 1 and the last position of a sequence does not count.
ignore_index: rows with this label do not count; their number is a part of the data, so the mean
divides by a count made in the graph. With microbatches the loss is the mean of theirs; where they
count rows (`counted_rows`), sums and counts are added up and divided once.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from planner.errors import PlanError, did_you_mean
from planner.graph.findings import Finding
from planner.graph.ir import AttrValue, Graph, Node, Tensor
from planner.ops.base import OPERATORS
from planner.ops.lookup import gradient_tensors
from planner.ops.loss import LOSSES, USER_LOSS
from planner.workload.user_loss import is_user_loss, read_user_loss

IGNORED = -100
"""The label that shift_labels gives to the last position where no ignore_index says another."""
ALIASES = {"bce-with-logits": "bce", "bce_with_logits": "bce", "cross-entropy": "cross_entropy"}
LEAST_HEAD = 0.01
"""What part of a model's parameters an output alone must read to be missed (guess)."""
LABELS, TARGETS, LOSS = "labels", "targets", "loss"


def default_loss(graph: Graph, logits: str = "") -> str:
    """cross_entropy for an output that looks like logits (float, rank >= 2, not an image), else
    mse; output:NAME for a scalar output, of one dim at most: [1, 1] is a value of one row."""
    output = graph.tensors[logits or graph.outputs[0]]
    scalar = output.elements == 1 and len(output.shape) < 2
    if output.is_float and scalar and not logits:
        return f"output:{output.name}"
    return "cross_entropy" if len(output.shape) in (2, 3) and output.shape[-1] > 1 else "mse"


def add_loss(
    graph: Graph,
    loss: str = "",
    logits: str = "",
    shift_labels: bool = False,
    ignore_index: int | None = None,
) -> Graph:
    """The graph whose first (only) output is the scalar loss, pruned to what the loss needs.

    logits: the output the loss reads (default: the first). shift_labels, ignore_index: see the
    module. Raises PlanError for unknown losses, outputs that do not exist, and graphs without
    anything trainable.
    """
    if logits and logits not in graph.outputs:
        raise PlanError(
            "P031",
            f"no output named {logits!r}",
            detail=[f"outputs: {', '.join(graph.outputs)}"],
            help=[did_you_mean(logits, graph.outputs) or "--logits with one of the outputs above"],
        )
    loss = ALIASES.get(loss, loss) or default_loss(graph, logits)
    source = graph.tensors[logits or graph.outputs[0]]
    if not source.elements:
        raise PlanError(
            "P033",
            f"output {source.name!r} of shape {list(source.shape)} has no elements: there is"
            " nothing to train on",
            help=["--logits with another output"],
        )
    if loss != "cross_entropy" and (shift_labels or ignore_index is not None):
        option = "--shift-labels" if shift_labels else "--ignore-index"
        raise PlanError(
            "P033",
            f"{option} is for cross_entropy; the loss is {loss}",
            help=["--loss cross_entropy"],
        )
    if terms := own_outputs(graph, loss):
        return _checked(prune(_own_output(graph, loss, terms)))
    if not (loss in LOSSES or is_user_loss(loss)):
        known = f"one of {', '.join(LOSSES)}, output:NAME, output:a+0.5*output:b, FILE.py:function"
        raise PlanError(
            "P030",
            f"unknown loss {loss!r}",
            help=[h for h in (did_you_mean(loss, list(LOSSES)), known) if h],
        )
    if not source.is_float:
        raise PlanError(
            "P033",
            f"output {source.name!r} is {source.dtype}: a loss needs a float output",
            help=["--logits NAME"] if len(graph.outputs) > 1 else ["--workload infer"],
        )
    builder = _Loss(graph, source)
    if is_user_loss(loss):
        builder.user(loss)
    elif loss == "cross_entropy":
        builder.cross_entropy(shift_labels, ignore_index)
    else:
        builder.add(LOSSES[loss], (source.name, builder.input(TARGETS, source.shape, source.dtype)))
    return _checked(prune(builder.graph()))


_TERM = re.compile(r"(?:([+-]?[\d.]+(?:[eE][+-]?\d+)?)\*)?output:(.+)", re.S)
_BETWEEN = re.compile(r"\+(?=(?:[+-]?[\d.]+(?:[eE][+-]?\d+)?\*)?output:)")


def own_outputs(graph: Graph, loss: str) -> tuple[tuple[float, str], ...]:
    """(weight, output) of each term of `output:a+0.5*output:b`; () for any other loss. Raises
    PlanError for terms that are none."""
    if (
        loss.startswith("output:") and loss.removeprefix("output:") in graph.outputs
    ):  # whatever is in its name
        return ((1.0, loss.removeprefix("output:")),)
    matches = [_TERM.fullmatch(part.strip()) for part in _BETWEEN.split(loss)]
    if not any(matches) or is_user_loss(loss):
        return ()
    wrong = [
        part
        for part, match in zip(_BETWEEN.split(loss), matches, strict=True)
        if match is None or match[2] not in graph.outputs
    ]
    if wrong:
        names = [
            o for o in graph.outputs if graph.tensors[o].elements == 1 and graph.tensors[o].is_float
        ]
        near = did_you_mean(wrong[0].rpartition("output:")[2], names)
        form = "+".join(f"output:{n}" for n in (names[:2] if len(names) > 1 else ["a", "b"]))
        raise PlanError(
            "P032",
            f"--loss {loss}: the graph has no scalar float output of that name",
            detail=[f"not understood: {wrong[0]!r}", *_shapes(graph)],
            help=[
                h
                for h in (
                    near,
                    (
                        f"several losses are joined by +, with weights where wanted: {form},"
                        " output:a+0.5*output:b"
                    ),
                )
                if h
            ],
        )
    try:
        return tuple((float(m[1] or 1), m[2]) for m in matches if m)
    except ValueError:
        raise PlanError(
            "P032", f"--loss {loss}: a weight is no number", help=["output:a+0.5*output:b"]
        ) from None


def _shapes(graph: Graph) -> list[str]:
    return [f"{o}: shape {list(graph.tensors[o].shape)}" for o in graph.outputs]


def _own_output(graph: Graph, loss: str, terms: tuple[tuple[float, str], ...]) -> Graph:
    """The graph's own scalars, without dims, weighted and added up."""
    if bad := [
        n for _, n in terms if graph.tensors[n].elements != 1 or not graph.tensors[n].is_float
    ]:
        raise PlanError(
            "P032",
            f"--loss {loss}: output {bad[0]!r} is no scalar float",
            detail=_shapes(graph),
            help=["--loss cross_entropy, or another output"],
        )
    builder = _Loss(graph, graph.tensors[terms[0][1]])
    plain = len(terms) == 1 and terms[0][0] == 1
    total = ""
    for weight, name in terms:
        t = graph.tensors[name]
        if t.shape:
            name = builder.node("Reshape", (name,), "reshape", (), t.dtype)
        if t.dtype != "float32" and not plain:
            name = builder.node("Cast", (name,), "cast", (), "float32", to="float32")
        if weight != 1:
            name = builder.node(
                "Mul",
                (name, builder.constant("weight", weight, np.float32)),
                "weighted",
                (),
                "float32",
            )
        total = builder.node("Add", (total, name), "sum", (), "float32") if total else name
    return builder.graph(total)


def left_out(graph: Graph, loss: str, logits: str = "") -> tuple[Finding, ...]:
    """Outputs that look like losses and are not in the loss that a plain graph will get: scalars
    called so, and scalars that alone read what trains; and others that alone read much of it."""
    if len(graph.outputs) < 2 or (logits and logits not in graph.outputs) or not graph.trainable:
        return ()
    scalars = [
        o for o in graph.outputs if graph.tensors[o].elements == 1 and graph.tensors[o].is_float
    ]
    loss = ALIASES.get(loss, loss) or default_loss(graph, logits)
    used = {n for _, n in own_outputs(graph, loss)}
    others = [o for o in scalars if o not in used]
    source = tuple(used) or (logits or graph.outputs[0],)
    kept = prune(replace(graph, outputs=source)).trainable
    alone = {
        o: sorted(
            graph.labels.get(w, w) for w in prune(replace(graph, outputs=(o,))).trainable - kept
        )
        for o in others
    }
    like = [o for o in others if "loss" in o.lower() or alone[o]]
    if not like:
        return () if is_user_loss(loss) else _heads_left_out(graph, source, kept)
    idle, several = sorted({w for o in like for w in alone[o]}), len(like) > 1
    are = "look like losses and are left out" if several else "looks like a loss and is left out"
    lost = (
        f"; {len(idle)} weights that {'they' if several else 'it'} alone"
        f" read{'' if several else 's'} get no gradient: {', '.join(map(repr, idle[:3]))}"
        if idle
        else ""
    )
    whole = "+".join(f"output:{n}" for n in [*(n for _, n in own_outputs(graph, loss)), *like])
    return (
        Finding(
            "loss",
            f"trained with {loss} alone: {', '.join(map(repr, like))} {are}{lost} (--loss"
            f" '{whole}')",
        ),
    )


def _heads_left_out(
    graph: Graph, source: tuple[str, ...], kept: frozenset[str]
) -> tuple[Finding, ...]:
    """Outputs without a loss whose own layers are a part of the model: a detector's boxes beside
    its classes. kept: what trains by the outputs of `source`."""
    whole = sum(graph.tensors[w].elements for w in graph.trainable)
    alone = {
        o: sum(
            graph.tensors[w].elements for w in prune(replace(graph, outputs=(o,))).trainable - kept
        )
        for o in graph.outputs
        if o not in source and graph.tensors[o].is_float
    }
    heads = {o: n for o, n in alone.items() if n >= LEAST_HEAD * whole}
    if not heads:
        return ()
    told = ", ".join(f"{o!r} ({n / 1e6:,.2f} M parameters)" for o, n in [*heads.items()][:3])
    return (
        Finding(
            "loss",
            f"trained by {', '.join(map(repr, source))} alone: layers of other outputs are left"
            f" out, {told} (--logits names another output, and a loss in Python takes several:"
            " --loss FILE.py:NAME)",
        ),
    )


class _Loss:
    """A graph while its loss is appended."""

    def __init__(self, graph: Graph, source: Tensor) -> None:
        self.before, self.source = graph, source
        self.tensors, self.inputs, self.constants = (
            dict(graph.tensors),
            list(graph.inputs),
            dict(graph.constants),
        )
        self.nodes: list[Node] = []

    def input(self, name: str, shape: tuple[int, ...], dtype: str) -> str:
        """A new input."""
        name = _free(name, self.tensors)
        self.tensors[name] = Tensor(name, shape, dtype, "input")
        self.inputs.append(name)
        return name

    def node(
        self,
        op: str,
        inputs: tuple[str, ...],
        what: str,
        shape: tuple[int, ...],
        dtype: str,
        **attrs: AttrValue,
    ) -> str:
        """A node before the loss; returns its output."""
        name = _free(f"{LOSS}/{what}", self.tensors)
        self.tensors[name] = Tensor(name, shape, dtype)
        taken = {n.id for n in (*self.before.nodes, *self.nodes)}
        self.nodes.append(Node(_free(f"{LOSS}/{what}", taken), op, inputs, (name,), attrs))
        return name

    def constant(self, what: str, value: float, dtype: type[np.number[Any]] = np.int32) -> str:
        """A scalar constant."""
        name = _free(f"{LOSS}/{what}", self.tensors)
        self.tensors[name] = Tensor(name, (), np.dtype(dtype).name, "constant")
        self.constants[name] = np.array(value, dtype)
        return name

    def add(self, op: str, inputs: tuple[str, ...], **attrs: AttrValue) -> None:
        """The loss itself."""
        name = _free(LOSS, self.tensors)
        self.tensors[name] = Tensor(name, (), "float32")
        self.nodes.append(Node(_free_id(LOSS, self.before), op, inputs, (name,), attrs))

    def cross_entropy(self, shift: bool, ignore: int | None) -> None:
        """Labels, what of them counts, and the loss."""
        shape, rank = self.source.shape, len(self.source.shape)
        if rank < 2:
            raise PlanError(
                "P033",
                f"cross_entropy needs logits of rank 2 or more; {self.source.name!r} has shape"
                f" {list(shape)}",
                help=["--loss mse"],
            )
        # ONNX keeps classes at dim 1 for images [N, C, H, W]; language and classification logits
        # end with them.
        axis = 1 if rank >= 4 else rank - 1
        rows = tuple(s for d, s in enumerate(shape) if d != axis)
        labels = self.input(LABELS, rows, "int32")
        attrs: dict[str, AttrValue] = {"axis": axis}
        if shift:
            last = IGNORED if ignore is None else ignore
            labels = self._next_labels(labels, rows, last)
            attrs |= {"ignore_index": last, "count": rows[0] * (rows[1] - 1)}
        if ignore is None:
            self.add(LOSSES["cross_entropy"], (self.source.name, labels), **attrs)
            return
        attrs["ignore_index"] = ignore
        attrs.pop("count", None)
        count = self._labels_that_count(labels, rows, ignore)
        self.add(LOSSES["cross_entropy"], (self.source.name, labels, count), **attrs)

    def _next_labels(self, labels: str, rows: tuple[int, ...], last: int) -> str:
        """Labels of `rows` shape moved to the position before; those of the last position are
        `last`."""
        if len(rows) != 2 or rows[1] < 2:
            raise PlanError(
                "P033",
                "--shift-labels needs logits [batch, sequence, vocabulary];"
                f" {self.source.name!r} has shape {list(self.source.shape)}",
                help=["--logits NAME, or labels that are shifted in the data"],
            )
        later = self.node(
            "Slice",
            (labels,),
            "next",
            (rows[0], rows[1] - 1),
            "int32",
            axes=(1,),
            starts=(1,),
            ends=(rows[1],),
            steps=(1,),
        )
        return self.node(
            "Pad",
            (later,),
            "shifted",
            rows,
            "int32",
            pads=(0, 0, 0, 1),
            mode="constant",
            value=last,
        )

    def _labels_that_count(self, labels: str, rows: tuple[int, ...], ignore: int) -> str:
        """How many labels are not `ignore`, a scalar of at least 1."""
        same = self.node("Equal", (labels, self.constant("ignored", ignore)), "same", rows, "bool")
        counts = self.node(
            "Cast",
            (self.node("Not", (same,), "counts", rows, "bool"),),
            "rows",
            rows,
            "int32",
            to="int32",
        )
        count = self.node(
            "ReduceSum", (counts,), "sum", (), "int32", axes=tuple(range(len(rows))), keepdims=0
        )
        return self.node("Max", (count, self.constant("least", 1)), "count", (), "int32")

    def user(self, loss: str) -> None:
        """A function of the user's."""
        user_loss = read_user_loss(loss)
        names = [self.source.name]
        known = {**{n: self.tensors[n] for n in (*self.before.inputs, *self.before.outputs)}}
        for argument in user_loss.arguments[1:]:
            if argument in known:
                names.append(argument)
            elif argument == LABELS and len(self.source.shape) > 1:
                names.append(self.input(LABELS, self.source.shape[:-1], "int32"))
            elif argument == TARGETS:
                names.append(self.input(TARGETS, self.source.shape, self.source.dtype))
            else:
                raise PlanError(
                    "P038",
                    f"--loss {loss}: the function's argument {argument!r} is nothing that this"
                    " graph has",
                    help=[
                        "one of"
                        f" {', '.join(dict.fromkeys([*self.before.outputs, *self.before.inputs, LABELS, TARGETS]))}"  # noqa: E501
                    ],
                )
        batch = self.source.shape[:1]
        bad = next(
            (n for n in names if not self.tensors[n].shape or self.tensors[n].shape[:1] != batch),
            None,
        )
        if bad is not None:
            raise PlanError(
                "P038",
                f"--loss {loss}: {bad!r} of shape {list(self.tensors[bad].shape)} has not the batch"
                " in dim 0",
            )
        self.add(USER_LOSS, tuple(names), function=user_loss.function, source=user_loss.source)

    def graph(self, output: str = "") -> Graph:
        """The graph with the loss as its output: that of the last node unless it is named."""
        return replace(
            self.before,
            nodes=(*self.before.nodes, *self.nodes),
            tensors=self.tensors,
            inputs=tuple(self.inputs),
            constants=self.constants,
            outputs=(output or self.nodes[-1].outputs[0],),
        )


def prune(graph: Graph) -> Graph:
    """Without the nodes and values that no output needs; inputs stay listed only when used."""
    wanted = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any(o in wanted for o in node.outputs):
            kept.append(node)
            wanted.update(n for n in node.inputs if n)
    # outputs nobody reads become absent, so that no kernel computes them
    nodes = tuple(part for n in reversed(kept) for part in _live_part(n, wanted, graph))
    live = {t for n in nodes for t in (*n.inputs, *n.outputs) if t} | set(graph.outputs)
    pick = lambda table: {k: v for k, v in table.items() if k in live}  # noqa: E731
    return replace(
        graph,
        nodes=nodes,
        tensors=pick(graph.tensors),
        inputs=tuple(i for i in graph.inputs if i in live),
        weights=pick(graph.weights),
        constants=pick(graph.constants),
        labels=pick(graph.labels),
        trainable=frozenset(graph.trainable & live),
    )


def _live_part(node: Node, wanted: set[str], graph: Graph) -> tuple[Node, ...]:
    """The node without outputs nobody reads. A Split then becomes a Slice per output: its kernel
    needs every piece's extent."""
    if all(o in wanted for o in node.outputs if o) and (node.op != "Split" or all(node.outputs)):
        return (node,)
    if node.op != "Split" or not all(node.outputs):
        return (replace(node, outputs=tuple(o if o in wanted else "" for o in node.outputs)),)
    axis, start = int(node.attrs["axis"]), 0  # type: ignore[arg-type]
    slices: list[Node] = []
    for k, output in enumerate(node.outputs):
        end = start + graph.tensors[output].shape[axis]
        if output in wanted:
            name = f"{node.id}/{k}" if slices else node.id
            attrs: dict[str, AttrValue] = {
                "axes": (axis,),
                "starts": (start,),
                "ends": (end,),
                "steps": (1,),
            }
            slices.append(
                Node(
                    name,
                    "Slice",
                    node.inputs[:1],
                    (output,),
                    attrs,
                    node.scope,
                    node.members or (node.id,),
                )
            )
        start = end
    return tuple(slices)


def _checked(graph: Graph) -> Graph:
    if not graph.trainable:
        unknown = dict.fromkeys(node.op for node in graph.nodes if node.op not in OPERATORS)
        frozen = [str(n) for n in graph.notes if getattr(n, "kind", "") == "frozen"]
        raise PlanError(
            "P034",
            "nothing in this graph is trainable",
            detail=[
                *[f"{op} has no rule: what it reads gets no gradient" for op in unknown][:3],
                *frozen,
            ],
            help=["--trainable 'GLOB' names parameters to train", "--workload infer"],
        )
    open_ended = [node for node in graph.nodes if node.op == "While"]
    grad = gradient_tensors(graph) if open_ended else frozenset()
    for node in open_ended:
        if any(o in grad for o in node.outputs):
            raise PlanError(
                "P147",
                f"node {node.id!r} (Loop) runs until its data says stop: training cannot"
                " differentiate it",
                help=[
                    "--workload infer",
                    "a loop with a constant number of iterations",
                    "--freeze what is before it",
                ],
            )
    return graph


def _free(name: str, taken: object) -> str:
    while name in taken:  # type: ignore[operator]
        name += "_"
    return name


def _free_id(name: str, graph: Graph) -> str:
    return _free(name, {n.id for n in graph.nodes})
