"""RoutedExperts from experts that are written one by one, each with weights of its own, working on
every token.

    y = sum over e of column(e) * expert(e, x)

A column [T, 1] holds what the router gives expert e, 0 where it did not choose it. It is the sum
over K of share where index = e (a product with the mask, or Where), or column e of a tensor [T, E]
into which share is spread (`fuse_moe.spread_share`). The sum may begin with another tensor (zeros,
or the result of shared experts). The experts' weights become stacks: weights whose parts are the
stored ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from planner.graph.findings import Finding
from planner.graph.ir import WeightRef
from planner.reader.draft.draft import Draft, Op
from planner.reader.fuse.experts import spread_share, zeros
from planner.reader.fuse.experts_build import fused
from planner.reader.fuse.experts_form import Form, Product, routed, source
from planner.reader.fuse.matcher import Finder

_OTHERS = 16
"""Other terms of a sum, at most, among which a part of it is looked for."""
_BEHIND = 12
"""Operations between a router's choice and a column, at most, where a form is not recognised."""


class _Expert(Form):
    """One expert: its products are those of every token with weights of its own."""

    def product(self, name: str) -> Product | None:
        """Rows times a weight [in, out] of this expert (stored [out, in] where turned), and a bias
        [out]."""
        op, bias = self.take(name, "MatMul", "Add"), ""
        if op is not None and op.op == "Add":
            for k in (0, 1):
                leaf = source(self.draft, op.inputs[k])
                if (
                    self.draft.is_leaf(leaf)
                    and self.draft.shape(leaf) == self.draft.shape(op.outputs[0])[-1:]
                ):
                    self.strip(op.inputs[k])
                    bias, op = leaf, self.take(op.inputs[1 - k], "MatMul")
                    break
        if (
            op is None
            or op.op != "MatMul"
            or op.attrs.get("trans_a")
            or len(self.draft.shape(op.inputs[1])) != 2
        ):
            return None
        weight, turned = op.inputs[1], bool(op.attrs.get("trans_b"))
        if (turn := self.find.maker(weight, "Transpose")) is not None:
            self.inside.append(turn)
            weight, turned = turn.inputs[0], not turned
        if self.draft.is_leaf(weight):
            return Product(weight, turned, op.inputs[0], bias)
        cut = self.find.maker(weight, "Gather")
        if (
            cut is None
            or cut.attrs["axis"] != 0
            or len(self.draft.shape(cut.inputs[0])) != 3
            or not self.draft.is_leaf(cut.inputs[0])
            or self.draft.scalar(cut.inputs[1]) is None
        ):
            return None
        self.inside.append(cut)
        return Product(weight, turned, op.inputs[0], bias)


_Term = tuple[_Expert, str, str]
"""An expert, the share that its result is multiplied by, and its result."""


def experts_each(find: Finder) -> None:
    """Fuses every sum over experts that are written one by one; says so where one is not
    recognised."""
    if not any(op.op == "TopK" for op in find.draft.ops):
        return
    done: set[int] = set()  # Adds below a sum whose parts cannot do better than it
    for root in reversed(find.draft.ops):
        if root.op == "Add" and id(root) not in find.gone and id(root) not in done:
            done.update(_sum(find, root))
    _unknown(find)


def _terms(find: Finder, root: Op) -> tuple[list[str], list[Op]]:
    """What a tree of Adds sums, in order, and its Adds below the root."""
    terms: list[str] = []
    inside: list[Op] = []
    stack = [root.inputs[1], root.inputs[0]]
    while stack:
        name = stack.pop()
        op = find.maker(name, "Add", "Reshape")
        if (
            op is None
            or len(find.uses(name)) != 1
            or name in find.draft.outputs
            or (op.op == "Reshape" and find.maker(source(find.draft, name), "Add") is None)
        ):
            terms.append(name)
            continue
        inside.append(op)
        stack += op.inputs[::-1]
    return terms, inside


def _sum(find: Finder, root: Op) -> set[int]:
    """Fuses a root that is a sum over all experts of one router, and at most one other tensor.
    Returns the Adds below that need no look of their own."""
    draft = find.draft
    terms, inside = _terms(find, root)
    below = {id(op) for op in inside}
    shape = draft.shape(root.outputs[0])
    form = Form(find, prod(shape[:-1]), 0)
    form.inside += inside
    by_expert: dict[int, _Term] = {}
    rest: list[str] = []
    for term in terms:
        expert_form = _Expert(find, form.tokens, 0)
        term_parts = _term(find, expert_form, term)
        if term_parts is None:
            rest.append(term)
            continue
        expert, count, share, result = term_parts
        count = count or _router(find, expert_form.index)
        if (
            expert in by_expert
            or (form.index and expert_form.index != form.index)
            or count != _router(find, expert_form.index)
        ):
            return below if len(terms) > 2 * count + _OTHERS else set()
        form.index = expert_form.index
        by_expert[expert] = expert_form, share, result
    if (
        sorted(by_expert) != list(range(_router(find, form.index)))
        or len({share for _, share, _ in by_expert.values()}) != 1
    ):
        return below
    rest = [name for name in rest if not zeros(draft, name)]
    if len(rest) > 1 or (rest and draft.shape(rest[0]) != shape):
        return below if len(rest) > _OTHERS else set()
    _join(find, root, form, [by_expert[e] for e in sorted(by_expert)], rest)
    return below


def _router(find: Finder, index: str) -> int:
    """How many experts a router chooses from."""
    op = find.maker(index, "TopK") if index else None
    return find.draft.shape(op.inputs[0])[-1] if op is not None else 0


def _term(find: Finder, expert_form: _Expert, term: str) -> tuple[int, int, str, str] | None:
    """(expert, experts if known, share, the expert's result) of column * result."""
    product = expert_form.take(term, "Mul")
    if product is None:
        return None
    shape = find.draft.shape
    for k in (0, 1):
        column, result = product.inputs[k], product.inputs[1 - k]
        if (
            shape(column)[-1:] != (1,)
            or prod(shape(column)) != expert_form.tokens
            or prod(shape(result)[:-1]) != expert_form.tokens
        ):
            continue
        inside_before = list(expert_form.inside)
        column_parts = _column(find, expert_form, column)
        if column_parts is not None:
            return *column_parts, result
        expert_form.inside[:] = inside_before
    return None


def _column(find: Finder, expert_form: _Expert, name: str) -> tuple[int, int, str] | None:
    """(expert, experts if known, share) of a column; sets the indices."""
    draft = find.draft
    op = expert_form.take(name, "ReduceSum", "Slice", "Gather", "Split")
    if op is None:
        return None
    mask_shape = draft.shape(op.inputs[0])
    if op.op != "ReduceSum":
        expert = _picked(draft, op, expert_form.inside, len(mask_shape) - 1)
        spread = (
            None
            if expert is None
            else spread_share(find, expert_form, op.inputs[0], mask_shape[-1])
        )
        if expert is None or spread is None:
            return None
        expert_form.index, share = spread
        return expert, mask_shape[-1], share
    if op.attrs["axes"] != (len(mask_shape) - 1,) or prod(mask_shape[:-1]) != expert_form.tokens:
        return None
    chosen = expert_form.take(op.inputs[0], "Mul", "Where")
    if chosen is None:
        return None
    masks = (
        ((chosen.inputs[0], chosen.inputs[1]),)
        if chosen.op == "Where"
        else ((chosen.inputs[0], chosen.inputs[1]), (chosen.inputs[1], chosen.inputs[0]))
    )
    if chosen.op == "Where" and not zeros(draft, chosen.inputs[2]):
        return None
    for mask, share in masks:
        inside_before = list(expert_form.inside)
        expert = _mask(find, expert_form, mask)
        if (
            expert is not None
            and draft.shape(share) == mask_shape
            and prod(draft.shape(expert_form.index)) == prod(mask_shape)
        ):
            return expert, 0, source(draft, share)
        expert_form.inside[:] = inside_before
    return None


def _picked(draft: Draft, op: Op, inside: Sequence[Op], last: int) -> int | None:
    """Which column of the last dim (or another) an operation takes alone."""
    if op.op == "Slice":
        one = op.attrs["axes"] == (last,) and op.attrs["ends"][0] - op.attrs["starts"][0] == 1
        return int(op.attrs["starts"][0]) if one else None
    if op.op == "Gather":
        index = draft.value(op.inputs[1])
        return (
            int(index.reshape(-1)[0]) % draft.shape(op.inputs[0])[last]
            if op.attrs["axis"] == last and index is not None and index.size == 1
            else None
        )
    name = next((o for user in inside for o in user.inputs if o in op.outputs), "")
    alone = op.attrs["axis"] == last and name and all(draft.shape(o)[last] == 1 for o in op.outputs)
    return op.outputs.index(name) if alone else None


def _mask(find: Finder, expert_form: _Expert, name: str) -> int | None:
    """The expert e of a mask index = e [tokens, K]: Equal, or one of a OneHot's columns; sets the
    indices."""
    kinds = ("Equal", "Cast", "Transpose", "Gather", "Slice")
    op = expert_form.take(name, *kinds)
    while op is not None and op.op in ("Cast", "Transpose"):
        op = expert_form.take(op.inputs[0], *kinds)
    if op is None:
        return None
    if op.op == "Equal":
        for k in (0, 1):
            expert, index = find.draft.scalar(op.inputs[k]), source(find.draft, op.inputs[1 - k])
            if expert is not None and routed(find, index):
                expert_form.strip(op.inputs[1 - k])
                expert_form.index = index
                return int(expert)
        return None
    hot = expert_form.take(op.inputs[0], "OneHot", "Cast", "Transpose")
    last = (
        len(find.draft.shape(op.inputs[0])) - 1
    )  # where the experts are: last, or wherever a Transpose of all masks put them
    while hot is not None and hot.op != "OneHot":
        if hot.op == "Transpose":
            last = hot.attrs["perm"].index(len(hot.attrs["perm"]) - 1)
        hot = expert_form.take(hot.inputs[0], "OneHot", "Cast")
    expert = _picked(find.draft, op, expert_form.inside, last)
    if (
        expert is None
        or hot is None
        or (hot.attrs["off_value"], hot.attrs["on_value"]) != (0, 1)
        or hot.attrs["axis"] != len(find.draft.shape(hot.outputs[0])) - 1
    ):
        return None
    expert_form.index = source(find.draft, hot.inputs[0])
    return expert if routed(find, expert_form.index) else None


def _join(find: Finder, root: Op, form: Form, terms: Sequence[_Term], rest: Sequence[str]) -> bool:
    """Replaces the sum by RoutedExperts once all experts are networks of one kind, reading the same
    rows."""
    layers: list[tuple[Product | None, Product, Product]] = []
    kinds: set[tuple[object, ...]] = set()
    share = terms[0][1]
    for expert, _, result in terms:
        down = expert.product(result)
        hidden = None if down is None else expert.hidden(down.rows)
        if down is None or hidden is None or down.part is not None:
            return False
        gate, up, activation = hidden
        rows = (expert.token_rows(up.rows), "" if gate is None else expert.token_rows(gate.rows))
        kinds.add(
            (
                activation,
                *rows,
                *(
                    (
                        None
                        if p is None
                        else (p.turned, p.part, bool(p.bias), find.draft.shape(p.stack))
                    )
                    for p in (gate, up, down)
                ),
            )
        )
        layers.append((gate, up, down))
        form.inside += expert.inside
    if len(kinds) != 1:
        return False
    group = {id(op) for op in form.inside} | {id(root)}
    leaves = {n for row in layers for p in row if p is not None for n in (p.stack, p.bias) if n}
    distinct = len({p.stack for row in layers for p in row if p is not None}) == sum(
        len({p.stack for p in row if p is not None}) for row in layers
    )
    if not distinct or any(id(user) not in group for leaf in leaves for user in find.uses(leaf)):
        return False
    if not find.closed(root, form.inside):
        return False
    stacks: dict[tuple[str, ...], str] = {}
    first, second, last = (_stack(find, [row[k] for row in layers], stacks) for k in range(3))
    assert second is not None and last is not None
    if not second.stack or not last.stack or (first is not None and not first.stack):
        return False
    mixture = (share, first, second, last, activation)  # of all: kinds holds one
    if not rest:
        return fused(find, root, form, *mixture)
    placeholder = find.insert(
        root, "Add", [rest[0], rest[0]]
    )  # a place for the sum over experts, before the root that adds the other tensor
    if not fused(find, find.draft.maker[placeholder], form, *mixture):
        return False
    find.fuse(root, [], "Add", [rest[0], placeholder], {})
    return True


def _stack(
    find: Finder, parts: Sequence[Product | None], stacks: dict[tuple[str, ...], str]
) -> Product | None:
    """The product with the experts' weights stacked, and their biases."""
    first = parts[0]
    if first is None:
        return None
    stack, bias = (
        _joined(find.draft, [getattr(p, what) for p in parts if p is not None], stacks)
        for what in ("stack", "bias")
    )
    return replace(first, stack=stack, bias=bias)


def _joined(draft: Draft, names: Sequence[str], stacks: dict[tuple[str, ...], str]) -> str:
    """A leaf [E, ..] whose parts are the named leaves; '' where there are none."""
    key = tuple(names)
    if not names[0] or key in stacks:
        return stacks.get(key, "")
    cuts = [draft.maker[name] for name in names if name in draft.maker]
    if cuts:  # each expert's part of one stack
        whole = cuts[0].inputs[0] if len(cuts) == len(names) else ""
        return (
            whole
            if all(
                cut.inputs[0] == whole and draft.scalar(cut.inputs[1]) == e
                for e, cut in enumerate(cuts)
            )
            and draft.shape(whole)[0] == len(names)
            else ""
        )
    refs = []
    for name in names:
        ref = draft.refs.get(name) or WeightRef("inline", proto=draft.values[name])
        refs.append(replace(ref, transform=(*ref.transform, ("reshape", draft.shape(name)))))
    joined = stacks[key] = draft.fresh(_common(names))
    draft.refs[joined] = WeightRef("joined", parts=tuple(refs))
    draft.types[joined] = ((len(names), *draft.shape(names[0])), draft.dtype(names[0]))
    return joined


def _common(names: Sequence[str]) -> str:
    """A name for all: the path without what counts the experts, or the first name where paths do
    not differ by a count alone."""
    paths = [name.split(".") for name in names]
    if len({len(p) for p in paths}) == 1:
        differing = [k for k in range(len(paths[0])) if len({p[k] for p in paths}) > 1]
        if (
            len(differing) == 1
            and len(paths[0]) > 1
            and [p[differing[0]] for p in paths] == [str(e) for e in range(len(names))]
        ):
            return ".".join(part for k, part in enumerate(paths[0]) if k != differing[0])
    return f"{names[0]}_all"


def _unknown(find: Finder) -> None:
    """A note on experts that stay networks of their own, each working on every token."""
    draft, shape = find.draft, find.draft.shape
    weights_by_router: dict[str, list[str]] = {}
    for op in draft.ops:
        if op.op != "Mul" or id(op) in find.gone or not find.uses(op.outputs[0]):
            continue
        for k in (0, 1):
            column, rows = (
                op.inputs[k],
                find.maker(source(draft, op.inputs[1 - k]), "MatMul", "Add"),
            )
            if rows is not None and rows.op == "Add":
                rows = next(
                    (
                        m
                        for i in rows.inputs
                        if (m := find.maker(source(draft, i), "MatMul")) is not None
                    ),
                    None,
                )
            if (
                shape(column)[-1:] == (1,)
                and rows is not None
                and len(shape(rows.inputs[1])) == 2
                and draft.is_leaf(rows.inputs[1])
            ):
                choice = _chosen_by(find, column)
                if choice:
                    weights_by_router.setdefault(choice, []).append(rows.inputs[1])
                    break
    several = {choice: weights for choice, weights in weights_by_router.items() if len(weights) > 1}
    if several:
        choice, weights = next(iter(several.items()))
        count_text = f"{sum(map(len, several.values()))} experts" + (
            f" behind {len(several)} routers" if len(several) > 1 else ""
        )
        text = (
            f"{count_text} (the first, behind {choice!r}, ends in {weights[0]!r}) are written one"
            " by one"
            " in a form that is not known: each is planned as a network that works on every token,"
            " not only on those the router sends; export them stacked (docs/exporting.md)"
        )
        draft.notes.append(Finding("experts", text))


def _chosen_by(find: Finder, name: str) -> str:
    """Id of the TopK that a tensor comes from through operations without weights, '' where there is
    none near."""
    queue, seen = [(name, 0)], {name}
    while queue:
        name, depth = queue.pop(0)
        op = find.maker(name)
        if op is None or op.op in ("MatMul", "Conv") or depth > _BEHIND:
            continue
        if op.op == "TopK":
            return op.id
        for i in op.inputs:
            if i and i not in seen:
                seen.add(i)
                queue.append((i, depth + 1))
    return ""
