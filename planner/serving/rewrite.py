"""From the exported graph to what a serving program runs.

    step     Attention(q, Concat(past_k, k), Concat(past_v, v), mask)  ->  CachedAttention(q, k, v,
             past_k, past_v, mask of the past): nothing is copied, the new keys and values leave the
             graph as they are, and the caches are weights of the graph: stored, cut, and counted as
             such. Where attention sees a sliding window of W tokens, or those of its own chunk of
             W, its cache has room for W: a token t lies in slot t mod W until token t + W takes its
             place, and the program says which slots are seen
    both     logits -> the token they are greatest at, of the last position alone: what acts on rows
             (the head, the last norm) is done for that one

All are exact: a row of such an operator depends on the same row of its operand, and softmax does
not depend on the order of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from planner.errors import PlanError
from planner.graph.ir import Graph, Node, Tensor, WeightRef
from planner.serving.cached import Form
from planner.serving.latent import latents

TOKEN = "next_token"
CACHE, STATE = "cache.", "state."
"""How labels of what is kept begin."""
EIGHT_BITS = "uint8"
BY_ROW = frozenset({"Cast", "LayerNormalization", "RMSNormalization", "Tanh", "Clip", "Identity"})
BY_ROW_WITH_WEIGHTS = frozenset({"MatMul", "Add", "Mul", "Div", "Sub"})


def cache_label(past: str) -> str:
    """What a cache is called among the parameters of a program."""
    return f"{CACHE}{past.removeprefix('past_key_values.')}"


def state_label(past: str) -> str:
    """The name, among the parameters of a program, of what is kept beside keys and values:
    past_conv.0.x is state.0.conv.x."""
    kind, *rest = past.removeprefix("past").lstrip("_.").split(".")
    return STATE + ".".join([*rest[:1], kind, *rest[1:]])


@dataclass(frozen=True, order=True)
class Sight:
    """What an attention sees of earlier tokens: the last ones, `tokens` with the new one, or
    (by_chunks) those of the new one's own chunk of so many."""

    tokens: int
    by_chunks: bool = False


def sight(graph: Graph, form: Form, padding: int) -> dict[str, int]:
    """How many tokens, the new one among them, each attention of a step sees, which are the last
    ones. graph: as read; its masks are computed for a mask of ones behind so many zeros. Raises
    PlanError P221 where they are others: keys would have to lie at their positions."""
    real = np.ones(graph.tensors[form.mask].shape, np.int64)
    real[..., :padding] = 0
    known: dict[str, np.ndarray] = {**graph.constants, form.mask: real}
    if form.positions in graph.tensors:
        known[form.positions] = np.full(
            graph.tensors[form.positions].shape, real.shape[-1] - padding - 1
        )
    seen: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "Attention" and len(node.inputs) > 3 and node.inputs[3]:
            mask = known.get(node.inputs[3])
            keys = None if mask is None else mask if mask.dtype == bool else mask == 0
            number = 0 if keys is None else int(keys.reshape(-1, keys.shape[-1]).sum(1).min())
            if keys is None or not number or not _are_last(keys, number):
                raise unseen(graph.name, node.id)
            seen[node.id] = number if keys.shape[-1] > 1 else graph.tensors[node.inputs[1]].shape[2]
        elif (
            all(n in known for n in node.inputs if n)
            and (values := _values(node, graph, known)) is not None
        ):
            known.update(zip((o for o in node.outputs if o), values, strict=True))
    return seen


def _are_last(keys: np.ndarray, number: int) -> bool:
    """Whether the last `number` keys are seen, and no other."""
    return bool(keys[..., -number:].all() and not keys[..., :-number].any())


def unseen(name: str, node: str) -> PlanError:
    """P221 for attention that sees others than all tokens, the last ones, or a chunk's."""
    return PlanError(
        "P221",
        f"{name}: {node!r} sees neither every earlier token nor the last so many, nor those of its"
        " own chunk, counted from the first",
        help=["a model whose attention is full, or has a sliding window, or chunks"],
    )


def _values(node: Node, graph: Graph, known: Mapping[str, np.ndarray]) -> list[np.ndarray] | None:
    from planner.reader.draft.fold import evaluate

    types = [(graph.tensors[o].shape, graph.tensors[o].dtype) for o in node.outputs if o]
    return evaluate(node.op, node.attrs, [known[n] for n in node.inputs if n], types)


def step_graph(graph: Graph, form: Form, windows: Mapping[str, Sight]) -> Graph:
    """The graph of one step of generation. windows: attention -> what it sees, where that is less
    than the cache may have. Raises PlanError P221 where the cache is used in another way
    than attention's."""
    step = _Step(graph, form, windows)
    for node in graph.nodes:
        step.take(node)
    nodes_so_far, tensors, kept, joined = step.nodes, step.tensors, step.kept, step.joined
    for past in form.pasts:
        b, heads, length, width = tensors[past].shape
        seen = kept.get(past)
        shape = (b, heads, seen.tokens if seen else length, width)
        tensors[past] = replace(tensors[past], role="weight", shape=shape)
    for past in form.constant:
        tensors[past] = replace(tensors[past], role="weight")
    new = [joined[present][1] for present in form.presents]
    outputs = (form.logits, *new, *form.handed[len(new) :])
    nodes = _read_by(nodes_so_far, outputs)
    for node in nodes:
        if used := [n for n in node.inputs if n in joined]:
            raise _other(graph, used[0], node)
    read = {n for node in nodes for n in node.inputs}
    inputs = [n for n in graph.inputs if n not in form.held]
    inputs += [window_input(form, w) for w in sorted({w for w in kept.values() if w})]
    step_of_model = replace(
        graph,
        nodes=nodes,
        tensors=tensors,
        weights={**graph.weights, **{p: WeightRef("absent") for p in form.held}},
        labels={
            **graph.labels,
            **{p: cache_label(p) for p in form.pasts},
            **{p: state_label(p) for p in form.constant},
        },
        inputs=tuple(n for n in inputs if n in read),
        outputs=outputs,
    )
    return chosen_token(step_of_model)


class _Step:
    """The nodes of a step, as they are taken one after the other. kept: cache -> what is seen of
    it, None where it has room for all tokens."""

    def __init__(self, graph: Graph, form: Form, windows: Mapping[str, Sight]) -> None:
        self.graph, self.form, self.windows = graph, form, windows
        self.nodes: list[Node] = []
        self.tensors, self.joined = dict(graph.tensors), _joined(graph, form)
        self.kept: dict[str, Sight | None] = {}
        self._masks: dict[str, str] = {}
        self._latents = latents(graph, frozenset(self.joined))

    def take(self, node: Node) -> None:
        """The next node, or what takes its place. Raises PlanError P221 for attention whose mask is
        not understood."""
        joined = self.joined
        attrs = {a: node.attrs[a] for a in ("scale", "cap") if a in node.attrs}
        if any(o in joined for o in node.outputs):
            return
        if over := self._latents.get(node.id):
            mask = self._mask(node, (joined[over.latent][0], joined[over.key][0]))
            self.nodes += over.nodes_of_step(node, joined, mask, attrs, self.tensors)
        elif node.op == "Attention" and node.inputs[1] in joined and node.inputs[2] in joined:
            (past_k, k), (past_v, v) = (joined[n] for n in node.inputs[1:3])
            inputs = node.inputs[0], k, v, past_k, past_v, self._mask(node, (past_k, past_v))
            self.nodes.append(replace(node, op="CachedAttention", inputs=inputs, attrs=attrs))
        else:
            self.nodes.append(node)

    def _mask(self, node: Node, pasts: tuple[str, str]) -> str:
        """The mask of an attention's cache."""
        window = self.windows.get(node.id)
        alike = {self.kept.setdefault(past, window) for past in pasts} == {window}
        masked = len(node.inputs) > 3 and node.inputs[3]
        if not masked or not alike or node.attrs.get("causal"):
            raise _other(self.graph, node.inputs[1], node)
        mask = window_input(self.form, window) if window else node.inputs[3]
        if mask not in self._masks:
            self._masks[mask] = (
                _slots_seen(
                    mask, window.tokens, self.nodes, self.tensors, self.tensors[self.form.mask]
                )
                if window
                else _before_last(mask, self.nodes, self.tensors, pasts[0])
            )
        return self._masks[mask]


def _joined(graph: Graph, form: Form) -> dict[str, tuple[str, str]]:
    """present -> (past, new): the keys or values so far with the new ones behind them. Raises
    PlanError P221 where they are anything else."""
    joined: dict[str, tuple[str, str]] = {}
    for past, present in form.pairs:
        maker = graph.producer.get(present)
        node = graph.nodes[maker] if maker is not None else None
        if (
            node is None
            or node.op != "Concat"
            or node.attrs["axis"] != 2
            or len(node.inputs) != 2
            or node.inputs[0] != past
        ):
            raise _other(graph, present, node)
        joined[present] = past, node.inputs[1]
    return joined


def unpadded(graph: Graph) -> Graph:
    """Prompts as engines pass them, one behind the other without padding: causal attention has no
    mask that hides any."""

    def take(node: Node) -> Node:
        if node.op != "Attention" or not node.attrs.get("causal"):
            return node
        attrs = {k: v for k, v in node.attrs.items() if k != "guard"}
        return replace(node, inputs=node.inputs[:3], attrs=attrs)

    return replace(graph, nodes=tuple(map(take, graph.nodes)))


def window_input(form: Form, seen: Sight) -> str:
    """The input that says which slots of a cache are seen: 1, else 0."""
    return f"{form.mask}/{'chunk of' if seen.by_chunks else 'last'} {seen.tokens}"


def _slots_seen(
    name: str, window: int, nodes: list[Node], tensors: dict[str, Tensor], mask: Tensor
) -> str:
    """The mask of attention to a cache of so many tokens, of an input that says it as `mask` does
    [batch, window]."""
    batch = mask.shape[0]
    cast, spread = f"{name}/bool", f"{name}/heads"
    tensors[name] = replace(mask, name=name, shape=(batch, window))
    tensors[cast] = Tensor(cast, (batch, window), "bool")
    tensors[spread] = Tensor(spread, (batch, 1, 1, window), "bool")
    nodes.append(Node(cast, "Cast", (name,), (cast,), {"to": "bool"}))
    nodes.append(Node(spread, "Reshape", (cast,), (spread,), {}))
    return spread


def _read_by(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[Node, ...]:
    """The nodes that outputs depend on, in their order: masks of windows are made no more."""
    wanted, needed = set(outputs), list[Node]()
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            wanted.update(node.inputs)
            needed.append(node)
    return tuple(reversed(needed))


def with_cache_of(graph: Graph, form: Form, cache_type: str) -> Graph:
    """The graph of a step whose caches are of a type: "compute", or "fp8", whose eight bits are
    counted as such; the program has them as float8_e4m3fn, which no other weight is kept in."""
    if cache_type == "compute":
        return graph
    caches = {p: replace(graph.tensors[p], dtype=EIGHT_BITS) for p in form.pasts}
    return replace(graph, tensors={**graph.tensors, **caches})


def _other(graph: Graph, present: str, node: Node | None) -> PlanError:
    what = (
        f"read by {node.op} {node.id!r}"
        if node is not None and present in node.inputs
        else "not the earlier keys with the new ones behind them"
    )
    return PlanError(
        "P221",
        f"{graph.name}: the cache {present!r} is {what}: only attention over past and new keys"
        " under a mask is understood",
        help=["plan the model without --prompt and --generate: --workload infer"],
    )


def _before_last(mask: str, nodes: list[Node], tensors: dict[str, Tensor], past: str) -> str:
    """The columns of a mask that are the cache's."""
    t, length = tensors[mask], tensors[past].shape[2]
    name, axis = f"{mask}/cache", len(t.shape) - 1
    if t.shape[-1] == 1:
        return mask
    tensors[name] = replace(t, name=name, shape=(*t.shape[:-1], length), role="activation")
    nodes.append(
        Node(
            name,
            "Slice",
            (mask,),
            (name,),
            {"axes": (axis,), "starts": (0,), "ends": (length,), "steps": (1,)},
        )
    )
    return name


def prompt_graph(graph: Graph, form: Form) -> Graph:
    """The graph of the pass over the prompts; the caches were read empty, so that what is present
    is new."""
    return chosen_token(replace(graph, outputs=(form.logits, *form.handed)))


def chosen_token(graph: Graph) -> Graph:
    """The graph with the token of the greatest logit at the last position, int64 [batch, 1], in the
    place of its first output."""
    logits = graph.tensors[graph.outputs[0]]
    if len(logits.shape) != 3:
        raise PlanError(
            "P221",
            f"{graph.name}: logits of shape {list(logits.shape)} are not [batch, tokens,"
            " vocabulary]",
            help=["plan with --workload infer alone"],
        )
    graph = _last_row(graph, graph.outputs[0])
    token = Tensor(TOKEN, (logits.shape[0], 1), "int64")
    node = Node(TOKEN, "ArgMax", (graph.outputs[0],), (TOKEN,), {"axis": 2, "keepdims": 0})
    return replace(
        graph,
        nodes=(*graph.nodes, node),
        tensors={**graph.tensors, TOKEN: token},
        outputs=(TOKEN, *graph.outputs[1:]),
    )


def _last_row(graph: Graph, logits: str) -> Graph:
    """The graph with `logits` of the last position alone, cut out before everything that acts on
    rows."""
    rows = graph.tensors[logits].shape[1]
    if rows == 1:
        return graph
    chain: list[int] = []
    name = logits
    while (
        (maker := graph.producer.get(name)) is not None
        and len(graph.consumers.get(name, ())) <= (name != logits)
        and _by_row(graph, graph.nodes[maker])
    ):
        chain.append(maker)
        name = graph.nodes[maker].inputs[0]
    tensors = dict(graph.tensors)
    for name_made in {o for i in chain for o in graph.nodes[i].outputs if o}:
        tensors[name_made] = _one_row(tensors[name_made], name_made)
    cut = f"{name}/last"
    # The cut tensor takes the place of `name` in the chain; where there is no chain `name` is the
    # logits, and what made them makes the uncut ones.
    source, result = (name, cut) if chain else (cut, logits)
    tensors[source], tensors[result] = (
        replace(graph.tensors[name], name=source),
        _one_row(graph.tensors[name], result),
    )
    slice_ = Node(
        cut,
        "Slice",
        (source,),
        (result,),
        {"axes": (1,), "starts": (rows - 1,), "ends": (rows,), "steps": (1,)},
    )
    nodes: list[Node] = []
    for i, node in enumerate(graph.nodes):
        if chain and i == chain[-1]:
            nodes.append(slice_)
            node = replace(node, inputs=(cut, *node.inputs[1:]))
        if not chain and logits in node.outputs:
            nodes += [
                replace(node, outputs=tuple(cut if o == logits else o for o in node.outputs)),
                slice_,
            ]
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes), tensors=tensors)


def _one_row(t: Tensor, name: str) -> Tensor:
    return replace(t, name=name, shape=(t.shape[0], 1, *t.shape[2:]), role="activation")


def _by_row(graph: Graph, node: Node) -> bool:
    """Whether row r of a node's result depends on row r of its first operand [batch, rows,
    features], and on nothing else that has rows."""
    if (
        len(graph.tensors[node.inputs[0]].shape) != 3
        or len([o for o in node.outputs if o]) != 1
        or node.inputs[0] in graph.weights
    ):
        return False
    others = [graph.tensors[n].shape for n in node.inputs[1:] if n]
    if node.op == "MatMul":
        return not node.attrs.get("trans_a") and len(others[0]) == 2
    flat = all(len(s) < 2 or prod(s[:-1]) == 1 for s in others)
    axis = int(node.attrs.get("axis", 2)) if node.op.endswith("Normalization") else 2  # type: ignore[arg-type]
    return node.op in BY_ROW | BY_ROW_WITH_WEIGHTS and flat and axis == 2
