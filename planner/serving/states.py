"""Layers that keep a state of a constant size, as a serving program runs them.

    linear attention   reads its state, and hands out the next one in float32: rounded at every
                       step it would drift. Both are counted as four bytes an element, whatever is
                       computed in, and lie with keys last, which are what is summed over
    convolutions       Conv(Concat(past, x), w) -> in a step ConvStep(past, x, w), which hands out
                       the rows that the next one reads; over prompts a convolution that is padded
                       with zeros, and the last rows of x

Engines keep both so: SGLang its states in float32 (--mamba-ssm-dtype), vLLM as the model's
configuration says, or --mamba-ssm-cache-dtype float32; rows of convolutions in the type computed
in. Prompts start from zeros, so that no state is read there. New tokens are real where nothing is
padded: what multiplies others by 0 is left out there.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from planner.errors import PlanError
from planner.graph.ir import AttrValue, Graph, Node, Tensor
from planner.serving.cached import Form

FOUR_BYTES = "uint32"
"""Counts float32 as such, whatever the program computes in; the program has float32."""
PAST_SLOT = 5
"""Of linear attention's operands the state before the first step."""


def going_on(graph: Graph, form: Form) -> Graph:
    """A step with a cache, whose other layers go on from what they keep. Raises PlanError P221
    where what they keep is used in another way."""
    keeping, dropped = _Held(graph, form), set[str]()
    nodes, tensors = list[Node](), dict(graph.tensors)
    for past, present in form.states:
        node = keeping.attention(past, present)
        keeping.instead[node.id] = replace(node, attrs={**node.attrs, "kept": 1})
        for name in (past, present):
            tensors[name] = _as_kept(tensors[name])
    for past, present in form.rows:
        joined, conv, last = keeping.convolution(past, present)
        dropped |= {joined.id, last.id}
        keeping.instead[conv.id] = replace(
            conv,
            op="ConvStep",
            inputs=(past, joined.inputs[1], conv.inputs[1]),
            outputs=(conv.outputs[0], present),
            attrs={},
        )
    for node in graph.nodes:
        if node.id not in dropped:
            nodes.append(keeping.instead.get(node.id, node))
    return all_real(replace(graph, nodes=tuple(nodes), tensors=tensors), form)


def _as_kept(state: Tensor) -> Tensor:
    b, heads, keys, values = state.shape
    return replace(state, dtype=FOUR_BYTES, shape=(b, heads, values, keys))


def from_nothing(graph: Graph, form: Form) -> Graph:
    """Prompts whose layers keep something, from empty states. Raises PlanError P221 as
    `going_on`."""
    keeping, tensors = _Held(graph, form), dict(graph.tensors)
    replaced: dict[str, list[Node]] = {}
    for past, present in form.states:
        node = keeping.attention(past, present)
        inputs = node.inputs[:PAST_SLOT]
        keeping.instead[node.id] = replace(
            node, inputs=inputs if inputs[-1] else inputs[:-1], attrs={**node.attrs, "kept": 1}
        )
        tensors[present] = _as_kept(tensors[present])
    for past, present in form.rows:
        joined, conv, last = keeping.convolution(past, present)
        x, before = joined.inputs[1], tensors[past].shape[2]
        keeping.instead[conv.id] = replace(
            conv, inputs=(x, *conv.inputs[1:]), attrs={**conv.attrs, "pads": (before, 0)}
        )
        replaced[last.id] = _last_rows(last, x, before, tensors)
        replaced[joined.id] = []
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += replaced[node.id] if node.id in replaced else [keeping.instead.get(node.id, node)]
    inputs = tuple(n for n in graph.inputs if n not in form.constant)
    kept = {n: t for n, t in tensors.items() if n not in form.constant}
    return replace(graph, nodes=tuple(nodes), tensors=kept, inputs=inputs)


def _last_rows(node: Node, x: str, count: int, tensors: dict[str, Tensor]) -> list[Node]:
    """The last rows of x [B, C, T], zeros before the first, in the place of what cuts them out of
    earlier and new ones."""
    rows, nodes = tensors[x].shape[2], list[Node]()
    attrs: dict[str, AttrValue]
    if rows < count:
        padded, short = f"{node.id}/padded", count - rows
        tensors[padded] = replace(
            tensors[x], name=padded, shape=(*tensors[x].shape[:2], count), role="activation"
        )
        attrs = {"pads": (0, 0, short, 0, 0, 0), "mode": "constant", "value": 0.0}
        nodes.append(Node(padded, "Pad", (x,), (padded,), attrs, scope=node.scope))
        x, rows = padded, count
    attrs = {"axes": (2,), "starts": (rows - count,), "ends": (rows,), "steps": (1,)}
    return [*nodes, replace(node, op="Slice", inputs=(x,), attrs=attrs)]


def all_real(graph: Graph, form: Form) -> Graph:
    """The graph where every new token is real: nothing is multiplied by which ones are."""
    ones = {form.mask}
    same: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs = tuple(same.get(n, n) for n in node.inputs)
        if node.op in ("Cast", "Slice", "Reshape") and node.inputs[0] in ones:
            ones.update(node.outputs)
        if (x := _multiplied(node, ones)) and not set(node.outputs) & set(graph.outputs):
            x = same.get(x, x)
            if graph.tensors[x].shape == graph.tensors[node.outputs[0]].shape:
                same[node.outputs[0]] = x
                continue
        nodes.append(replace(node, inputs=inputs))
    return replace(graph, nodes=tuple(nodes))


def _multiplied(node: Node, ones: Set[str]) -> str:
    """What a node multiplies by which tokens are real; "" where it does another thing."""
    if node.op != "Mul":
        return ""
    others = [n for n in node.inputs if n not in ones]
    return others[0] if len(others) == 1 else ""


class _Held:
    """How a graph uses what its layers keep. instead: node -> what takes its place."""

    def __init__(self, graph: Graph, form: Form) -> None:
        self.graph, self.form = graph, form
        self.instead: dict[str, Node] = {}

    def attention(self, past: str, present: str) -> Node:
        """The linear attention that goes on from a state."""
        (node,) = self._readers(past, 1)
        same = len(node.outputs) > 1 and node.outputs[1] == present
        if node.op != "LinearAttention" or node.inputs.index(past) != PAST_SLOT or not same:
            raise self._other(past, "linear attention with a decay a head")
        return node

    def convolution(self, past: str, present: str) -> tuple[Node, Node, Node]:
        """What joins earlier and new rows, the convolution of them, what cuts out the last."""
        (joined,) = self._readers(past, 1)
        size = self.graph.tensors[past].shape[2]
        usual = joined.op == "Concat" and joined.attrs["axis"] == 2 and joined.inputs[0] == past
        if not usual or len(joined.inputs) != 2:
            raise self._other(past, "a causal convolution")
        readers = self._readers(joined.outputs[0], 2)
        conv = next((n for n in readers if n.op == "Conv"), None)
        last = next((n for n in readers if n.op == "Slice"), None)
        if conv is None or last is None or last.outputs != (present,):
            raise self._other(past, "a causal convolution")
        total = self.graph.tensors[joined.outputs[0]].shape[2]
        cut = (last.attrs["axes"], last.attrs["starts"], last.attrs["ends"], last.attrs["steps"])
        weight = self.graph.tensors[conv.inputs[1]].shape
        plain = tuple(conv.attrs["pads"]) == (0, 0) and tuple(conv.attrs["strides"]) == (1,)  # type: ignore[arg-type]
        plain &= tuple(conv.attrs["dilations"]) == (1,)  # type: ignore[arg-type]
        if (
            not plain
            or weight[1:] != (1, size + 1)
            or conv.attrs["group"] != weight[0]
            or cut != ((2,), (total - size,), (total,), (1,))
        ):
            raise self._other(past, "a convolution of each channel over the rows that are kept")
        return joined, conv, last

    def _readers(self, name: str, count: int) -> tuple[Node, ...]:
        uses = self.graph.consumers.get(name, ())
        nodes = tuple(self.graph.nodes[i] for i in dict.fromkeys(i for i, _ in uses))
        if len(nodes) != count:
            raise self._other(name, "what keeps a state")
        return nodes

    def _other(self, name: str, wanted: str) -> PlanError:
        return PlanError(
            "P221",
            f"{self.graph.name}: what is kept in {name!r} is not used as {wanted} uses it",
            help=["plan the model without --prompt and --generate: --workload infer"],
        )
