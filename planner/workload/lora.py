"""LoRA: y = x W becomes y = x W + (alpha / rank) (x A) B with W frozen, A [k, rank] seeded normal,
B [rank, n] zero at the start.

`--lora rank=16[,targets=GLOB,...][,alpha=32]`. The adapters are nodes and weights of the graph like
any others, so they are split, priced and emitted by the same rules. They are called
`<label>.lora_A` and `<label>.lora_B`. Targets are the second operands of matrix products, named by
a glob or by the layer that they are part of (q_proj), or all of them but the head's; weights of
experts [e, k, n] get one adapter an expert. Hu et al., "LoRA: Low-Rank Adaptation of Large Language
Models" (2021).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.errors import PlanError, did_you_mean
from planner.graph.ir import Graph, Node, Tensor, WeightRef
from planner.workload.weight_globs import matching

ALL = "all-linear"
"""Every target there is but the head's, as the adapters of other libraries are asked for."""


@dataclass(frozen=True)
class Lora:
    """rank: inner dim of every adapter. targets: globs over labels, layers, or ALL. alpha: the
    adapters' products are scaled by alpha / rank."""

    rank: int
    targets: tuple[str, ...]
    alpha: float


def parse_lora(text: str) -> Lora:
    """Reads `rank=16[,targets=GLOB[,GLOB...]][,alpha=32]`; without targets all. Raises
    PlanError."""
    help = [
        "--lora rank=16, of all linear layers but the head",
        "--lora rank=16,targets=q_proj,v_proj",
    ]
    values: dict[str, str] = {}
    targets: list[str] = []
    key = ""
    for part in text.split(","):
        if key == "targets" and part and "=" not in part:
            targets.append(part)
            continue
        key, eq, value = part.partition("=")
        if not eq or key not in ("rank", "targets", "alpha") or not value:
            near = did_you_mean(key, ("rank", "targets", "alpha"))
            raise PlanError(
                "P039",
                f"--lora {text!r}: {part!r} is none of rank=, targets=, alpha=",
                help=[h for h in (near, *help) if h],
            )
        if key == "targets":
            targets.append(value)
        elif key in values:
            raise PlanError("P039", f"--lora {text!r}: {key} is given twice", help=help)
        else:
            values[key] = value
    rank = values.get("rank", "")
    if not (rank.isascii() and rank.isdigit()) or not 1 <= int(rank) <= 1 << 16:
        raise PlanError(
            "P039", f"--lora {text!r}: rank, a whole number of at least 1, is needed", help=help
        )
    try:
        alpha = float(values.get("alpha", rank))
    except ValueError:
        alpha = 0.0
    if not 0 < alpha < 1e6:
        raise PlanError("P039", f"--lora {text!r}: alpha is a number above 0", help=help)
    return Lora(int(rank), tuple(targets) or (ALL,), alpha)


def add_adapters(graph: Graph, text: str) -> Graph:
    """The graph with an adapter beside every target, trained; the rest is as `graph.trainable`
    says. Raises PlanError when a glob has no target."""

    spec = parse_lora(text)
    wanted = {n for target in spec.targets for n in _meant(graph, target)}
    targets = [n for n in graph.weights if n in wanted and _fits(graph, n)]
    if not targets:
        raise PlanError(
            "P039",
            f"--lora {text!r}: none of the {len(wanted)} parameters it names is multiplied by"
            " activations",
            detail=[
                f"{graph.labels.get(n, n)} {list(graph.tensors[n].shape)}"
                for n in sorted(wanted)[:4]
            ],
            help=["targets: weights of linear layers"],
        )
    adapted = _Made(graph, spec)
    for node in graph.nodes:
        adapted.copy(node, targets)
    skipped = len(wanted) - len(targets)
    scale = f", scaled by {spec.alpha / spec.rank:g}" if spec.alpha != spec.rank else ""
    note = (
        f"adapters of rank {spec.rank} on {len(targets)} weights{scale}; everything else named by"
        " no --trainable is frozen"
    )
    if skipped:
        note += f"; {skipped} parameters that match are no weights of linear layers and have none"
    return replace(
        graph,
        nodes=tuple(adapted.nodes),
        tensors=adapted.tensors,
        weights=adapted.weights,
        labels=adapted.labels,
        constants=adapted.constants,
        trainable=frozenset(graph.trainable | adapted.trained),
        notes=(*graph.notes, note),
    )


def _meant(graph: Graph, target: str) -> set[str]:
    """The weights that a target names: of a layer where it is part of their labels between points
    or slashes. Raises PlanError P036 where there are none."""
    if target == ALL:
        head = _head(graph)
        return {n for n in graph.weights if n not in head and _fits(graph, n)}
    of_layer = {n for n in graph.weights if target in re.split("[./]", graph.labels.get(n, n))}
    return of_layer or matching(graph, target, "--lora")


_BEHIND = ("Add", "Cast", "Reshape", "Transpose", "Identity")
"""What may stand between the head's product and the model's outputs."""


def _head(graph: Graph) -> set[str]:
    """The weights whose products are the model's outputs."""
    made_by = {name: node for node in graph.nodes for name in node.outputs}
    head = set[str]()
    for name in graph.outputs:
        node = made_by.get(name)
        while node is not None and node.op in _BEHIND:
            sources = [made_by[i] for i in node.inputs if i in made_by]
            node = sources[0] if len(sources) == 1 else None
        if node is not None and node.op == "MatMul":
            head |= {i for i in node.inputs if i in graph.weights}
    return head


_STACKS = {3: "trans_in", 4: "trans_in", 5: "trans_out"}
"""Operands of RoutedExperts that adapters fit, and the attribute that says whether they are stored
[e, n, k]."""


def _fits(graph: Graph, name: str) -> bool:
    """Whether a weight is the second operand of matrix products, or a stack of experts, and nothing
    else takes part in them."""
    uses = [(graph.nodes[i], slot) for i, slot in graph.consumers.get(name, ())]
    products = [
        n
        for n, slot in uses
        if (n.op == "MatMul" and slot == 1 and not n.attrs.get("trans_a"))
        or (n.op == "RoutedExperts" and slot in _STACKS)
    ]
    return bool(products) and graph.tensors[name].is_float and len(graph.tensors[name].shape) >= 2


class _Made:
    """The graph while adapters are inserted."""

    def __init__(self, graph: Graph, spec: Lora) -> None:
        self.graph, self.spec = graph, spec
        self.nodes: list[Node] = []
        self.tensors, self.weights, self.labels, self.constants = (
            dict(graph.tensors),
            dict(graph.weights),
            dict(graph.labels),
            dict(graph.constants),
        )
        self.ids = {n.id for n in graph.nodes}
        self.trained: set[str] = set()
        self.pairs: dict[str, tuple[str, str]] = {}

    def copy(self, node: Node, targets: Sequence[str]) -> None:
        """Takes a node over, with an adapter when it multiplies by a target."""
        if node.op == "RoutedExperts":
            self._experts(node, targets)
            return
        if node.op != "MatMul" or node.inputs[1] not in targets or node.attrs.get("trans_a"):
            self.nodes.append(node)
            return
        x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
        a, b = self._pair(w, bool(node.attrs.get("trans_b")))
        out = self.tensors[y]
        base = self._tensor(f"{y}/base", out.shape, out.dtype)
        self.nodes.append(replace(node, outputs=(base,)))
        inner = self._node(
            node, "lora_A", "MatMul", (x, a), (*out.shape[:-1], self.spec.rank), out.dtype
        )
        outer = self._node(node, "lora_B", "MatMul", (inner, b), out.shape, out.dtype)
        if self.spec.alpha != self.spec.rank:
            outer = self._node(
                node, "lora_scale", "Mul", (outer, self._scale(out.dtype)), out.shape, out.dtype
            )
        self.nodes.append(
            Node(self._id(node, "lora"), "Add", (base, outer), (y,), {}, node.scope, (node.id,))
        )

    def _experts(self, node: Node, targets: Sequence[str]) -> None:
        """Stacks of routed experts with what their adapters add: a row's expert is known inside the
        kernel alone."""
        inputs = list(node.inputs)
        for slot, flag in _STACKS.items():
            if slot < len(inputs) and inputs[slot] in targets:
                weight, turned = inputs[slot], bool(node.attrs.get(flag))
                t = self.graph.tensors[weight]
                pair = self._pair(weight, turned)
                delta = self._node(
                    node,
                    f"lora_{slot}",
                    "MatMul",
                    pair[::-1] if turned else pair,
                    t.shape,
                    t.dtype,
                    int(turned),
                )
                if self.spec.alpha != self.spec.rank:
                    delta = self._node(
                        node,
                        f"lora_scale_{slot}",
                        "Mul",
                        (delta, self._scale(t.dtype)),
                        t.shape,
                        t.dtype,
                    )
                inputs[slot] = self._node(
                    node, f"lora_sum_{slot}", "Add", (weight, delta), t.shape, t.dtype
                )
        self.nodes.append(replace(node, inputs=tuple(inputs)))

    def _node(
        self,
        like: Node,
        what: str,
        op: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        dtype: str,
        turned: int = 0,
    ) -> str:
        result = self._tensor(f"{like.outputs[0]}/{what}", shape, dtype)
        attrs = {"trans_a": turned, "trans_b": turned} if op == "MatMul" else {}
        self.nodes.append(
            Node(self._id(like, what), op, inputs, (result,), attrs, like.scope, (like.id,))
        )
        return result

    def _pair(self, weight: str, turned: bool) -> tuple[str, str]:
        """A and B of a weight, made once however often it is used."""
        key = f"{weight}/turned" if turned else weight
        if key not in self.pairs:
            t, label = self.graph.tensors[weight], self.graph.labels.get(weight, weight)
            *lead, rows, columns = t.shape
            k, n = (columns, rows) if turned else (rows, columns)
            pair = []
            for what, shape in (
                ("lora_A", (*lead, k, self.spec.rank)),
                ("lora_B", (*lead, self.spec.rank, n)),
            ):
                name = self._tensor(f"{label}.{what}", shape, t.dtype, weight=True)
                zeros = np.broadcast_to(
                    np.zeros((), np.float32), shape
                )  # no memory until it is written
                self.weights[name] = (
                    WeightRef("absent") if what == "lora_A" else WeightRef("inline", proto=zeros)
                )
                self.labels[name] = name
                self.trained.add(name)
                pair.append(name)
            self.pairs[key] = (pair[0], pair[1])
        return self.pairs[key]

    def _scale(self, dtype: str) -> str:
        name = f"lora_scale/{dtype}"
        if name not in self.constants:
            self.tensors[name] = Tensor(name, (), dtype, "constant")
            self.constants[name] = np.array(self.spec.alpha / self.spec.rank, np.float32)
        return name

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: str, weight: bool = False) -> str:
        while name in self.tensors:
            name += "_"
        self.tensors[name] = Tensor(name, shape, dtype, "weight" if weight else "activation")
        return name

    def _id(self, node: Node, what: str) -> str:
        wanted = f"{node.id}/{what}"
        while wanted in self.ids:
            wanted += "_"
        self.ids.add(wanted)
        return wanted
