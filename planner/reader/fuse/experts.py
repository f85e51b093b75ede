"""RoutedExperts from the forms in which exporters write a mixture of experts.

With x [T, H] (T: tokens, in any number of dims), index and share [T, K], and weights stacked over E
experts, the result is

    sum over j of share[t, j] * down[index[t, j]] ( mix(gate[index[t, j]] x[t], up[index[t, j]]
    x[t]) )

    gathered   weights[index] and one product a row of [T, K]: a Gather of each stack by the same
               indices, the sum over K last
    dense      every expert works on every token, and the results are weighed by share spread to [T,
               E]: a OneHot of the indices times share, summed over K, or a ScatterElements of share
               into zeros; the sum over E last

Gate and up may be one stack whose result is cut in two (evenly, first halves or alternating).
Indices must come from a TopK: they are then in range. Reshapes keep the order of elements, so a
tensor of rows is known by its elements' order alone: tokens, choices, width.
"""

from __future__ import annotations

from math import prod

from planner.graph.findings import Finding
from planner.reader.draft.draft import Draft, Op
from planner.reader.fuse.experts_build import fused
from planner.reader.fuse.experts_form import Form, Product, real_dims, routed, source
from planner.reader.fuse.matcher import Finder


def experts(find: Finder) -> None:
    """Fuses every mixture of experts, gathered or dense; says so where a form is not known."""
    for root in list(find.draft.ops):
        if root.op == "ReduceSum" and len(root.attrs["axes"]) == 1 and id(root) not in find.gone:
            for match in (_gathered, _dense):
                if match(find, root):
                    break
    _unknown(find)


def _unknown(find: Finder) -> None:
    """A finding on stacks of matrices gathered by a router whose use is not recognised."""
    draft = find.draft
    stacks = [
        op
        for op in draft.ops
        if op.op == "Gather"
        and id(op) not in find.gone
        and len(draft.shape(op.inputs[0])) == 3
        and draft.is_leaf(op.inputs[0])
    ]
    unfused = [
        op
        for op in stacks
        if any(find.uses(o) for o in op.outputs if o) and routed(find, source(draft, op.inputs[1]))
    ]
    if unfused:
        text = (
            f"{len(unfused)} stacks of experts ({unfused[0].inputs[0]!r}) are gathered by a router,"
            " but"
            " what is done with them is not a known form of experts: they are planned as gathered"
            " weights, one copy per chosen expert and token"
        )
        draft.notes.append(Finding("experts", text))


def _gathered(find: Finder, root: Op) -> bool:
    """Root: the sum over choices of share * result."""
    draft, axis = find.draft, int(root.attrs["axes"][0])
    shape = draft.shape(root.inputs[0])
    form = Form(find, prod(shape[:axis]), shape[axis])
    width = prod(shape[axis + 1 :])
    weigh = form.take(form.uncast(root.inputs[0]), "Mul")
    if weigh is None or form.tokens == 0 or width == 1:
        return False
    rows = form.tokens * form.choices
    for k in (0, 1):
        share, result = weigh.inputs[k], weigh.inputs[1 - k]
        if (
            prod(draft.shape(share)) != rows
            or prod(draft.shape(result)) != rows * width
            or not _per_row(draft, share, result, width)
        ):
            continue
        down = form.product(form.uncast(result))
        return down is not None and _build(find, root, form, source(draft, share), down)
    return False


def _per_row(draft: Draft, share: str, result: str, width: int) -> bool:
    """Whether a factor has one number for each row of `width` elements."""
    a, b = draft.shape(share), draft.shape(result)
    a = (1,) * (len(b) - len(a)) + a
    cut = next((k for k in range(len(b) + 1) if prod(b[k:]) == width), -1)
    while cut > 0 and b[cut - 1] == 1 and a[cut - 1] == 1 and prod(b[cut - 1 :]) == width:
        cut -= 1
    return len(a) == len(b) and prod(a[cut:]) == 1 and a[:cut] == b[:cut]


def _dense(find: Finder, root: Op) -> bool:
    """Root: the sum over experts of share * result."""
    draft, axis = find.draft, int(root.attrs["axes"][0])
    shape = draft.shape(root.inputs[0])
    if len(shape) < 3 or axis != len(shape) - 3:
        return False
    form = Form(find, prod(shape) // max(1, shape[axis] * shape[-1]), 0)
    weigh = find.maker(form.uncast(root.inputs[0]), "Mul")
    if weigh is None or form.tokens == 0:
        return False
    form.inside.append(weigh)
    for k in (0, 1):
        factor, result = weigh.inputs[k], weigh.inputs[1 - k]
        if draft.shape(result) != shape or draft.shape(factor) != (*shape[:-1], 1):
            continue
        spread = _spread(find, form, factor, shape[:-1])
        if spread is None:
            return False
        form.index, share = spread
        down = form.product(form.uncast(result))
        return down is not None and _build(find, root, form, share, down)
    return False


def _spread(find: Finder, form: Form, name: str, shape: tuple[int, ...]) -> tuple[str, str] | None:
    """(index, share) behind a tensor [.., E, tokens] that holds share where the router chose and 0
    elsewhere."""
    draft, experts_, tokens = find.draft, shape[-2], shape[-1]
    name = form.strip(name)
    turn = find.maker(name, "Transpose")
    if tokens != 1 and turn is None:
        return None
    if turn is not None:  # of one token it may be a Reshape
        before, perm = draft.shape(turn.inputs[0]), tuple(turn.attrs["perm"])
        last = len(before) - 1
        if (
            before[-1] != experts_
            or perm != (*range(last - 1), last, last - 1)
            or real_dims(draft.shape(name)) != real_dims(shape)
        ):
            return None
        form.inside.append(turn)
        name = turn.inputs[0]
    return spread_share(find, form, name, experts_)


def spread_share(find: Finder, form: Form, name: str, experts_: int) -> tuple[str, str] | None:
    """(index, share) behind a tensor [tokens, E] that holds share where the router chose and 0
    elsewhere."""
    draft, name = find.draft, form.strip(name)
    if draft.shape(name)[-1] != experts_:
        return None
    scatter = find.maker(name, "ScatterElements")
    if scatter is not None:
        data, index, share = scatter.inputs
        if (
            scatter.attrs["axis"] != len(draft.shape(name)) - 1
            or scatter.attrs.get("reduction", "none") not in ("none", "add")
            or not zeros(draft, data)
        ):
            return None
        if prod(draft.shape(index)[:-1]) != form.tokens:
            return None
        form.inside.append(scatter)
        index = source(draft, index)
        return (index, source(draft, share)) if routed(find, index) else None
    total = find.maker(name, "ReduceSum")
    rank = len(draft.shape(name))
    if total is None or total.attrs["axes"] != (rank - 1,) or total.attrs["keepdims"]:
        return None
    times = find.maker(total.inputs[0], "Mul")
    if times is None:
        return None
    form.inside += [total, times]
    for k in (0, 1):
        hot = find.maker(times.inputs[k], "OneHot", "Cast")
        if hot is not None and hot.op == "Cast":
            form.inside.append(hot)
            hot = find.maker(hot.inputs[0], "OneHot")
        share = times.inputs[1 - k]
        if (
            hot is None
            or hot.attrs["axis"] != rank
            or hot.attrs["depth"] != experts_
            or (hot.attrs["off_value"], hot.attrs["on_value"]) != (0, 1)
        ):
            continue
        if draft.shape(share) != (*draft.shape(hot.outputs[0])[:-1], 1):
            return None
        form.inside.append(hot)
        index = source(draft, hot.inputs[0])
        return (index, source(draft, share)) if routed(find, index) else None
    return None


def _build(find: Finder, root: Op, form: Form, share: str, down: Product) -> bool:
    """Replaces a group by RoutedExperts, once its first layer is found too and nothing outside
    reads what it makes inside."""
    hidden = form.hidden(down.rows)
    if (
        hidden is None
        or down.part is not None
        or not form.index
        or not find.closed(root, form.inside)
    ):
        return False
    gate, up, activation = hidden
    return fused(find, root, form, share, gate, up, down, activation)


def zeros(draft: Draft, name: str) -> bool:
    """Whether a tensor is zero everywhere."""
    op = draft.maker.get(name)
    return draft.splat(name) == 0 or (
        op is not None
        and (
            (op.op == "ConstantOfShape" and op.attrs["value"] == 0)
            or (op.op == "Expand" and zeros(draft, op.inputs[0]))
        )
    )
