"""RoutedExperts built from the parts that were found of one: stacks brought to [E, in, out] or [E,
out, in], tokens and choices to the same leading dims."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from planner.reader.draft.draft import Draft, Op
from planner.reader.draft.weight_transforms import transformed
from planner.reader.fuse.experts_form import Activation, Form, Product, real_dims
from planner.reader.fuse.matcher import Finder

_NAMES = ("", "", "", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")
"""Parts by operand slot of RoutedExperts, as the weights cut from a stack are called."""


def fused(
    find: Finder,
    root: Op,
    form: Form,
    share: str,
    gate: Product | None,
    up: Product,
    down: Product,
    activation: Activation,
) -> bool:
    """Whether the parts of a mixture fit together; root becomes RoutedExperts then, and what is
    inside goes (which nothing else may read)."""
    draft = find.draft
    x = form.token_rows(up.rows)
    choices = prod(draft.shape(form.index)) // form.tokens
    if not _gate_fits(draft, form, gate, up):
        return False
    width, width_out = (
        prod(draft.shape(x)) // form.tokens,
        prod(draft.shape(root.outputs[0])) // form.tokens,
    )
    lead = _lead_of(draft.shape(x), form.tokens)
    if prod(draft.shape(x)) != form.tokens * width or lead is None or width != width_out:
        return False
    if (
        not _sizes_fit(draft, gate, up, down, width)
        or prod(draft.shape(share)) != form.tokens * choices
    ):
        return False
    x = _view(find, root, x, (*lead, width))
    views = [_view(find, root, name, (*lead, choices)) for name in (form.index, share)]
    inputs = [
        x,
        *views,
        *(_part(find, root, p, what) for what in ("stack", "bias") for p in (gate, up, down)),
    ]
    while not inputs[-1]:
        inputs.pop()
    attrs = {**activation.attrs, "trans_in": int(up.turned), "trans_out": int(down.turned)}
    shape, dtype = draft.types[root.outputs[0]]
    if (shape, dtype) == ((*lead, width), draft.dtype(x)):
        find.fuse(root, form.inside, "RoutedExperts", inputs, attrs)
        return True
    mixture = find.insert(root, "RoutedExperts", inputs, attrs)
    if dtype == draft.dtype(x):
        find.fuse(root, form.inside, "Reshape", [mixture], {})
    else:
        find.fuse(root, form.inside, "Cast", [_view(find, root, mixture, shape)], {"to": dtype})
    draft.maker[mixture].members, root.members = root.members, ()
    return True


def _gate_fits(draft: Draft, form: Form, gate: Product | None, up: Product) -> bool:
    """Whether gate and up read the same rows, lie the same way round and, where they are parts of
    one stack, are its two halves."""
    if gate is None:
        return not up.part
    if (
        form.token_rows(gate.rows) != form.token_rows(up.rows)
        or gate.turned != up.turned
        or (gate.part is None) != (up.part is None)
    ):
        return False
    if not gate.part:
        return True
    halves: tuple[set[Any], ...] = ({(0, 1), (_half(draft, up), 1)}, {(0, 2), (1, 2)})
    return gate.stack == up.stack and {gate.part, up.part} in halves


def _half(draft: Draft, product: Product) -> int:
    """Half of the width of a stack of two."""
    return draft.shape(product.stack)[1 if product.turned else 2] // 2


def _sizes_fit(draft: Draft, gate: Product | None, up: Product, down: Product, width: int) -> bool:
    """Whether all stacks have the same experts and the widths that follow from the tokens'."""
    experts_ = draft.shape(up.stack)[0]
    hidden = _half(draft, up) if up.part else draft.shape(up.stack)[1 if up.turned else 2]
    first = [p for p in (gate, up) if p is not None]
    sides = [
        sorted(draft.shape(p.stack)) == sorted((experts_, width, 2 * hidden if p.part else hidden))
        and draft.shape(p.stack)[2 if p.turned else 1] == width
        for p in first
    ]
    return all(sides) and draft.shape(down.stack) == (
        (experts_, width, hidden) if down.turned else (experts_, hidden, width)
    )


def _part(find: Finder, root: Op, product: Product | None, what: str) -> str:
    """A stack as the operator wants it: whole, or the half of a fused one."""
    draft = find.draft
    stack = "" if product is None else product.stack if what == "stack" else product.bias
    if product is None or not stack:
        return ""
    if what == "bias" and len(draft.shape(stack)) != 2:
        shape = draft.shape(stack)
        stack = _view(find, root, stack, (shape[-3], shape[-1]))
    if product.part is None:
        return stack
    shape, (start, step) = draft.shape(stack), product.part
    axis = len(shape) - 1 if what == "bias" or not product.turned else 1
    half = shape[axis] // 2
    stop = start + half if step == 1 else shape[axis]
    return find.insert(
        root,
        "Slice",
        [stack],
        {"axes": (axis,), "starts": (start,), "ends": (stop,), "steps": (step,)},
    )


def stored_parts(draft: Draft) -> None:
    """Parts of stacks that experts read are cut on the stored weights: each becomes a weight of its
    own."""
    parts: dict[tuple[Any, ...], str] = {}
    for op in draft.ops:
        for slot, name in enumerate(op.inputs if op.op == "RoutedExperts" else ()):
            cut = draft.maker.get(name)
            if (
                slot < 3
                or cut is None
                or cut.op != "Slice"
                or len(cut.attrs["axes"]) != 1
                or not draft.is_leaf(cut.inputs[0])
            ):
                continue
            stack = cut.inputs[0]
            step = (
                cut.attrs["axes"][0],
                cut.attrs["starts"][0],
                cut.attrs["ends"][0],
                cut.attrs["steps"][0],
            )
            if (stack, step) not in parts:
                part = parts[stack, step] = draft.fresh(
                    f"{stack}{'.' if '.' in stack else '_'}{_NAMES[slot]}"
                )
                draft.types[part] = draft.types[name]
                if stack in draft.refs:
                    ref = draft.refs[stack]
                    draft.refs[part] = replace(
                        ref,
                        transform=(
                            *(ref.transform or (("reshape", draft.shape(stack)),)),
                            ("slice", step),
                        ),
                    )
                else:
                    draft.values[part] = transformed(draft.values[stack], [("slice", step)], part)
                    draft.keep_floats.add(part)
            op.inputs[slot] = parts[stack, step]


def _view(find: Finder, root: Op, name: str, shape: tuple[int, ...]) -> str:
    """A tensor in a shape of as many elements, as it is where it has it."""
    return (
        name
        if find.draft.shape(name) == shape
        else find.insert(root, "Reshape", [name], shape=shape)
    )


def _lead_of(shape: tuple[int, ...], tokens: int) -> tuple[int, ...] | None:
    """Leading dims that hold the tokens, ones dropped, or None."""
    k = next(
        (
            k
            for k in range(len(shape) + 1)
            if prod(shape[:k]) == tokens and prod(shape[k:]) * tokens == prod(shape)
        ),
        None,
    )
    if k is None:
        return None
    return shape[:k] if 0 < k <= 2 else real_dims(shape[:k]) or (1,)
