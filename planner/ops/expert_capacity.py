"""Routed experts that take a number of rows and drop what is beyond: a capacity.

An expert has places for C = ceil(factor x choices of a group / experts) rows of each group of
tokens, a sample of the batch: what is dropped does not depend on how the plan cuts the batch, and
samples stay whole. First choices queue first, then in the order of the tokens, as GShard and Switch
Transformers do. All experts work on all their places, those that stay empty too, so that a device's
work depends on no router; expert parallelism is one exchange each way.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, prod

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, tuple_text
from planner.ops.cost import Kernel, Passes, Pieces
from planner.sharding.rule import KernelCollective, Rule, Split

ROWS_IN = {"rh,fh->rf": "peth,efh->petf", "rh,hf->rf": "peth,ehf->petf"}
"""Product of one expert's rows -> that of all experts' places: p devices that sent them, e experts,
t places."""
ROWS_OUT = {"rf,hf->rh": "petf,ehf->peth", "rf,fh->rh": "petf,efh->peth"}


def capacity_of(node: Node) -> float:
    """The capacity factor, 0 where nothing is dropped."""
    factor = node.attrs.get("capacity", 0.0)
    assert isinstance(factor, float)
    return factor


def sample_dims(node: Node, graph: Graph, names: tuple[str, ...]) -> tuple[str, dict[str, int]]:
    """Token dims as a rule writes them where samples stay whole, and sizes of factors that share a
    dim. names: factors of the dims."""
    if len(names) > 1:
        return " ".join((names[0], *(n if n == "1" else f"{n}!" for n in names[1:]))), {}
    tokens, batch = graph.tensors[node.inputs[0]].shape[0], graph.dims.get("batch", 1)
    if names[0] == "1" or batch < 2 or tokens % batch:
        return " ".join(n if n == "1" else f"{n}!" for n in names), {}
    if tokens == batch:
        return names[0], {}
    return "(b s!)", {"b": batch, "s": tokens // batch}


def group_factors(rule: Rule) -> tuple[str, ...]:
    """Factors whose tokens are one group."""
    return tuple(f for dim in rule.operands[1][:-1] for f in dim if f in rule.whole)


def group_tokens(rule: Rule) -> int:
    """Tokens of a group."""
    return prod(rule.sizes[f] for f in group_factors(rule))


def places(node: Node, rule: Rule) -> int:
    """Rows that an expert takes of a group, C."""
    tokens, top = group_tokens(rule), rule.sizes["k"]
    return min(tokens, ceil(top * tokens * capacity_of(node) / rule.sizes["e"]))


def capped_filling(node: Node, rule: Rule) -> Fraction:
    """Places over the rows there are."""
    rows = Fraction(group_tokens(rule) * rule.sizes["k"], rule.sizes["e"])
    return places(node, rule) / rows


def capped_exchange(node: Node, rule: Rule, pairs: tuple[str, ...]) -> tuple[KernelCollective, ...]:
    """What travels: rows, shares and results; backward rows, their gradients and what is gained by
    them, shares and the gradients of these."""
    if not pairs:
        return ()
    rows = ("e", *(f for dim in rule.operands[1][:-1] for f in dim if f not in rule.whole))

    def to(over: tuple[str, ...], forward: int, backward: int) -> KernelCollective:
        """An all-to-all of every place of every expert."""
        return KernelCollective(
            "+".join(pairs),
            "all-to-all",
            over,
            forward,
            backward,
            itemsize=0,
            rows=rows,
            places_each=places(node, rule),
            kept=False,
            for_result=True,
        )

    return to((), 1, 2), to(("h",), 2, 3)


def _rows(pieces: Pieces, split: Split) -> tuple[dict[str, int], int, int]:
    """Local sizes, experts of a device, and the rows of each: places for all groups of all devices
    that send some."""
    rule, mesh = pieces.rule, pieces.mesh
    local = rule.local(split, mesh)
    joint = prod(mesh[a] for name in rule.paired for a in split.axes(name))
    whole = group_factors(rule)
    groups = prod(local[f] for dim in rule.operands[1][:-1] for f in dim if f not in whole)
    return local, local["e"], places(pieces.node, rule) * groups * joint


def capped_passes(pieces: Pieces, layers: int) -> list[Passes]:
    """A gather and a scatter of rows, two or three products of all experts at once; the backward
    pass makes the first of these again."""
    itemsize, passes = pieces.itemsize("float32"), list[Passes]()
    for split in pieces.splits:
        local, experts, rows = _rows(pieces, split)
        h, f = local["h"], local["f"]
        moved = Kernel(0.0, 4.0 * experts * rows * h * itemsize)
        product = Kernel(
            2.0 * experts * rows * h * f, experts * (h * f + rows * (h + f)) * itemsize
        )
        passes.append(
            (
                (moved, _times(product, layers)),
                (_times(moved, pieces.backward), _times(product, pieces.backward * layers)),
            )
        )
    return passes


def _times(kernel: Kernel, often: float) -> Kernel:
    return Kernel(kernel.flops, kernel.moved_bytes, often)


def capped_workspace(pieces: Pieces, split: Split) -> float:
    """Rows as they were sent and as they arrived, what the experts make of them, and in training
    the gradients of each: how many of both, of programs compiled for H100."""
    local, experts, rows = _rows(pieces, split)
    travels = any(split.axes(name) for name in pieces.rule.paired)
    wide, hidden = ((4, 4) if travels else (3, 5)) if pieces.trained else (2, 3)
    row_elements = wide * local["h"] + hidden * local["f"]
    return experts * rows * row_elements * pieces.itemsize("float32")


def capped_text(call: Call, stacks: str, mix: str, products: tuple[str, str]) -> str:
    """The call of the runtime's function. stacks, mix: as those of experts that drop nothing;
    products: of the rows of one expert."""
    joint = tuple(a for a in call.mesh if any(a in call.axes(name) for name in call.rule.paired))
    pieces = tuple((a, call.mesh[a]) for a in call.axes("e"))
    how = f'(lambda g, u: {mix}, "{ROWS_IN[products[0]]}", "{ROWS_OUT[products[1]]}")'
    x, index, share = call.args[:3]
    return (
        f"{call.use('experts_with_places')}({x}, {index}, {share}, {stacks}, {pieces!r},"
        f" {tuple_text(joint)}, ({group_tokens(call.rule)}, {places(call.node, call.rule)}), {how})"
    )
