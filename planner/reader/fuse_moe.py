"""RoutedExperts from the forms in which exporters write a mixture of experts.

With x [T, H] (T: tokens, in any number of dims), index and share [T, K], and weights stacked over E experts, the result is

    sum over j of share[t, j] * down[index[t, j]] ( mix(gate[index[t, j]] x[t], up[index[t, j]] x[t]) )

    gathered   weights[index] and one product a row of [T, K]: a Gather of each stack by the same indices, the sum over K last
    dense      every expert works on every token, and the results are weighed by share spread to [T, E]: a OneHot of the indices times share, summed over
               K, or a ScatterElements of share into zeros; the sum over E last

Gate and up may be one stack whose result is cut in two (evenly, first halves or alternating). Indices must come from a TopK: they are then in range.
Reshapes keep the order of elements, so a tensor of rows is known by its elements' order alone: tokens, choices, width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from planner.reader.draft import Draft, Op
from planner.reader.finder import Finder
from planner.reader.transforms import transformed

_NAMES = ("", "", "", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")
_ACTIVATIONS = {"Silu": "silu", "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh"}


@dataclass(frozen=True)
class Product:
    """Rows times an expert's weight: the stack, whether it is stored [E, out, in], the operand, the stack of biases; which part (start, step) of the result."""

    stack: str
    turned: bool
    rows: str
    bias: str = ""
    part: tuple[int, int] | None = None


class Form:
    """One form being matched at one root. K = 0: dense. inside: what goes away."""

    def __init__(self, find: Finder, tokens: int, choices: int) -> None:
        self.find, self.draft, self.tokens, self.choices = find, find.draft, tokens, choices
        self.inside: list[Op] = []
        self.index = ""

    def strip(self, name: str) -> str:
        """The tensor behind Reshapes, which go with the group."""
        while (op := self.find.maker(name, "Reshape")) is not None:
            self.inside.append(op)
            name = op.inputs[0]
        return name

    def take(self, name: str, *kinds: str) -> Op | None:
        """The operation of one of the kinds behind Reshapes, into the group."""
        op = self.find.maker(self.strip(name), *kinds)
        if op is not None:
            self.inside.append(op)
        return op

    def product(self, name: str) -> Product | None:
        """Rows times weights chosen by the router, or times all of them, and a bias of each expert."""
        op, bias = self.take(name, "MatMul", "Add"), ""
        if op is not None and op.op == "Add":
            for k in (0, 1):
                found = self.bias(op.inputs[k], op)
                if found and (inner := self.take(op.inputs[1 - k], "MatMul")) is not None:
                    op, bias = inner, found
                    break
        if op is None or op.op != "MatMul":
            return None
        found_product = self.gathered(op) if self.choices else self.every(op)
        return None if found_product is None else replace(found_product, bias=bias)

    def chosen(self, name: str) -> str:
        """The stack that is gathered by the router's choices, '' where it is not."""
        op = self.find.maker(name, "Gather")
        if op is None or op.attrs["axis"] != 0:
            return ""
        index = source(self.draft, op.inputs[1])
        if not self.index and prod(self.draft.shape(index)) == self.tokens * self.choices and routed(self.find, index):
            self.index = index
        return op.inputs[0] if index == self.index else ""

    def bias(self, name: str, add: Op) -> str:
        """The stack [E, width] of the biases added here, '' where it is none."""
        out = self.draft.shape(add.outputs[0])
        if self.choices:
            stack = self.chosen(source(self.draft, name))
            return stack if stack and len(self.draft.shape(stack)) == 2 and prod(self.draft.shape(name)) == prod(out) else ""
        shape = self.draft.shape(name)
        leaf = source(self.draft, name)
        each = self.draft.shape(leaf)
        own = len(shape) >= 3 and len(out) >= 3 and shape[-3:] == (out[-3], 1, out[-1]) and prod(shape) == out[-3] * out[-1]
        return leaf if own and self.draft.is_leaf(leaf) and each in (shape, (out[-3], out[-1])) else ""

    def gathered(self, op: Op) -> Product | None:
        """One row a product: [.., 1, H] x chosen [.., H, F], or chosen [.., F, H] x [.., H, 1]."""
        shape = self.draft.shape
        for k in (1, 0):
            stack, other = self.chosen(op.inputs[k]), op.inputs[1 - k]
            if not stack or len(shape(stack)) != 3:
                continue
            swapped, own = (bool(op.attrs.get(flag)) for flag in (("trans_a", "trans_b") if k else ("trans_b", "trans_a")))
            batch, rest = shape(op.inputs[k])[:-2], shape(other)[:-2]
            rest = (1,) * (len(batch) - len(rest)) + rest
            if shape(other)[-1 if swapped == bool(k) else -2] != 1 or rest not in (batch, (*batch[:-1], 1)) or (rest != batch and batch[-1] != self.choices):
                return None  # tokens are repeated for their choices, in the last dim, or not at all
            return Product(stack, own == bool(k), other)
        return None

    def every(self, op: Op) -> Product | None:
        """All experts: [.., 1, T, H] x stack [E, H, F]."""
        stack, out = op.inputs[1], self.draft.shape(op.outputs[0])
        if op.attrs.get("trans_a") or len(self.draft.shape(stack)) != 3 or len(out) < 3 or out[-3] != self.draft.shape(stack)[0]:
            return None
        return Product(stack, bool(op.attrs.get("trans_b")), op.inputs[0])

    def first(self, name: str) -> Product | None:
        """A product of the first layer, or a part of one."""
        name = self.strip(name)
        op = self.find.maker(name, "Split", "Slice")
        if op is None:
            return self.product(name)
        whole, width = self.draft.shape(op.inputs[0]), self.draft.shape(name)
        axis = next((a for a in range(len(whole)) if whole[a] != width[a]), -1)
        if axis < 0 or whole[axis] != 2 * width[axis] or prod(whole[axis + 1 :]) != 1:
            return None
        if op.op == "Split":
            part = (op.outputs.index(name) * width[axis], 1)
        elif len(op.attrs["axes"]) == 1 and op.attrs["steps"][0] in (1, 2):
            part = (int(op.attrs["starts"][0]), int(op.attrs["steps"][0]))
        else:
            return None
        if part not in ((0, 1), (width[axis], 1), (0, 2), (1, 2)):
            return None
        self.inside.append(op)
        found = self.product(op.inputs[0])
        return None if found is None else replace(found, part=part)

    def hidden(self, name: str) -> tuple[Product | None, Product, str] | None:
        """(gate, up, activation) of the hidden activations."""
        op = self.take(name, "Mul", *_ACTIVATIONS, "Gelu")
        if op is None:
            return None
        if op.op != "Mul":
            up = self.first(op.inputs[0])
            return None if up is None else (None, up, _activation(op))
        for k in (0, 1):
            act = self.find.maker(source(self.draft, op.inputs[k]), *_ACTIVATIONS, "Gelu")
            if act is None:
                continue
            self.strip(op.inputs[k])
            self.inside.append(act)
            gate, up = self.first(act.inputs[0]), self.first(op.inputs[1 - k])
            return None if gate is None or up is None else (gate, up, _activation(act))
        return None

    def token_rows(self, name: str) -> str:
        """The tensor of tokens [T, H] that rows of a product are taken from, '' where they are something else."""
        draft = self.draft
        while (op := self.find.maker(name, "Reshape", "Expand", "Gather")) is not None:
            shape, before = draft.shape(name), draft.shape(op.inputs[0])
            before = (1,) * (len(shape) - len(before)) + before
            if op.op == "Expand":
                at = [k for k in range(len(shape)) if before[k] != shape[k]]
                dense = not self.choices and at == [len(shape) - 3]
                if not dense and not (len(at) == 1 and shape[at[0]] == self.choices and prod(shape[: at[0]]) == self.tokens):
                    break
            elif op.op == "Gather":
                rows, want = draft.value(op.inputs[1]), np.repeat(np.arange(self.tokens), max(1, self.choices))
                if op.attrs["axis"] != 0 or before[0] != self.tokens or rows is None or not np.array_equal(rows.reshape(-1), want):
                    break
            name = op.inputs[0]
        return name


def experts(find: Finder) -> None:
    """Fuses every mixture of experts, gathered or dense; says so where a form is not known."""
    for root in list(find.draft.ops):
        if root.op == "ReduceSum" and len(root.attrs["axes"]) == 1 and id(root) not in find.gone:
            for match in (_gathered, _dense):
                if match(find, root):
                    break
    _unknown(find)


def _unknown(find: Finder) -> None:
    """A note on stacks of matrices gathered by a router whose use is not recognised."""
    draft = find.draft
    dead = {id(op) for op in draft.ops if not any(find.uses(o) for o in op.outputs if o)} | find.gone
    left = [op for op in draft.ops if op.op == "Gather" and id(op) not in dead and len(draft.shape(op.inputs[0])) == 3 and draft.is_leaf(op.inputs[0])
            and routed(find, source(draft, op.inputs[1]))]  # fmt: skip
    if left:
        draft.notes.append(f"{len(left)} stacks of experts ({left[0].inputs[0]!r}) are gathered by a router, but what is done with them is not a known form of experts: "
                           "they are planned as gathered weights, one copy per chosen expert and token")  # fmt: skip


def _gathered(find: Finder, root: Op) -> bool:
    """Root: the sum over choices of share * result."""
    draft, axis = find.draft, int(root.attrs["axes"][0])
    shape = draft.shape(root.inputs[0])
    form = Form(find, prod(shape[:axis]), shape[axis])
    width = prod(shape[axis + 1 :])
    weigh = form.take(root.inputs[0], "Mul")
    if weigh is None or form.tokens == 0 or width == 1:
        return False
    rows = form.tokens * form.choices
    for k in (0, 1):
        share, result = weigh.inputs[k], weigh.inputs[1 - k]
        if prod(draft.shape(share)) != rows or prod(draft.shape(result)) != rows * width or not _per_row(draft, share, result, width):
            continue
        down = form.product(result)
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
    weigh = find.maker(root.inputs[0], "Mul")
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
        down = form.product(result)
        return down is not None and _build(find, root, form, share, down)
    return False


def _spread(find: Finder, form: Form, name: str, shape: tuple[int, ...]) -> tuple[str, str] | None:
    """(index, share) behind a tensor [.., E, tokens] that holds share where the router chose and 0 elsewhere."""
    draft, experts_, tokens = find.draft, shape[-2], shape[-1]
    name = form.strip(name)
    if tokens != 1:
        turn = find.maker(name, "Transpose")
        if turn is None:
            return None
        before, perm = draft.shape(turn.inputs[0]), tuple(turn.attrs["perm"])
        last = len(before) - 1
        if before[-1] != experts_ or perm != (*range(last - 1), last, last - 1) or _real(draft.shape(name)) != _real(shape):
            return None
        form.inside.append(turn)
        name = turn.inputs[0]
    return spread_share(find, form, name, experts_)


def spread_share(find: Finder, form: Form, name: str, experts_: int) -> tuple[str, str] | None:
    """(index, share) behind a tensor [tokens, E] that holds share where the router chose and 0 elsewhere."""
    draft, name = find.draft, form.strip(name)
    if draft.shape(name)[-1] != experts_:
        return None
    scatter = find.maker(name, "ScatterElements")
    if scatter is not None:
        data, index, share = scatter.inputs
        if scatter.attrs["axis"] != len(draft.shape(name)) - 1 or scatter.attrs.get("reduction", "none") not in ("none", "add") or not zeros(draft, data):
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
        if hot is None or hot.attrs["axis"] != rank or hot.attrs["depth"] != experts_ or (hot.attrs["off_value"], hot.attrs["on_value"]) != (0, 1):
            continue
        if draft.shape(share) != (*draft.shape(hot.outputs[0])[:-1], 1):
            return None
        form.inside.append(hot)
        index = source(draft, hot.inputs[0])
        return (index, source(draft, share)) if routed(find, index) else None
    return None


def _build(find: Finder, root: Op, form: Form, share: str, down: Product) -> bool:
    """Replaces a group by RoutedExperts, once its first layer is found too and nothing outside reads what it makes inside."""
    hidden = form.hidden(down.rows)
    if hidden is None or down.part is not None or not form.index or not find.closed(root, form.inside):
        return False
    gate, up, activation = hidden
    return fused(find, root, form, share, gate, up, down, activation)


def fused(find: Finder, root: Op, form: Form, share: str, gate: Product | None, up: Product, down: Product, activation: str) -> bool:
    """Whether the parts of a mixture fit together; root becomes RoutedExperts then, and what is inside goes (which nothing else may read)."""
    draft = find.draft
    x = form.token_rows(up.rows)
    choices = prod(draft.shape(form.index)) // form.tokens
    if (gate and (form.token_rows(gate.rows) != x or gate.turned != up.turned or (gate.part is None) != (up.part is None))) or (up.part and not gate):
        return False
    if gate and gate.part and (gate.stack != up.stack or {gate.part, up.part} not in ({(0, 1), (_half(draft, up), 1)}, {(0, 2), (1, 2)})):
        return False
    width, out = prod(draft.shape(x)) // form.tokens, prod(draft.shape(root.outputs[0])) // form.tokens
    lead = _lead_of(draft.shape(x), form.tokens)
    if prod(draft.shape(x)) != form.tokens * width or lead is None or width != out:
        return False
    if not _sizes_fit(draft, gate, up, down, width) or prod(draft.shape(share)) != form.tokens * choices:
        return False
    x = _view(find, root, x, (*lead, width))
    views = [_view(find, root, name, (*lead, choices)) for name in (form.index, share)]
    inputs = [x, *views, *(_part(find, root, p, what) for what in ("stack", "bias") for p in (gate, up, down))]
    while not inputs[-1]:
        inputs.pop()
    attrs = {"activation": activation, "trans_in": int(up.turned), "trans_out": int(down.turned)}
    if draft.shape(root.outputs[0]) == (*lead, width):
        find.fuse(root, form.inside, "RoutedExperts", inputs, attrs)
        return True
    made = find.insert(root, "RoutedExperts", inputs, attrs)
    find.fuse(root, form.inside, "Reshape", [made], {})
    draft.maker[made].members, root.members = root.members, ()
    return True


def _half(draft: Draft, product: Product) -> int:
    return draft.shape(product.stack)[1 if product.turned else 2] // 2


def _sizes_fit(draft: Draft, gate: Product | None, up: Product, down: Product, width: int) -> bool:
    """Whether all stacks have the same experts and the widths that follow from the tokens'."""
    experts_ = draft.shape(up.stack)[0]
    hidden = _half(draft, up) if up.part else draft.shape(up.stack)[1 if up.turned else 2]
    first = [p for p in (gate, up) if p is not None]
    sides = [sorted(draft.shape(p.stack)) == sorted((experts_, width, 2 * hidden if p.part else hidden)) and draft.shape(p.stack)[2 if p.turned else 1] == width for p in first]
    return all(sides) and draft.shape(down.stack) == ((experts_, width, hidden) if down.turned else (experts_, hidden, width))


def _part(find: Finder, root: Op, product: Product | None, what: str) -> str:
    """A stack as the operator wants it: whole, or the half of a fused one."""
    draft = find.draft
    whole = "" if product is None else product.stack if what == "stack" else product.bias
    if product is None or not whole:
        return ""
    if what == "bias" and len(draft.shape(whole)) != 2:
        shape = draft.shape(whole)
        whole = _view(find, root, whole, (shape[-3], shape[-1]))
    if product.part is None:
        return whole
    shape, (start, step) = draft.shape(whole), product.part
    axis = len(shape) - 1 if what == "bias" or not product.turned else 1
    half = shape[axis] // 2
    stop = start + half if step == 1 else shape[axis]
    return find.insert(root, "Slice", [whole], {"axes": (axis,), "starts": (start,), "ends": (stop,), "steps": (step,)})


def stored_parts(draft: Draft) -> None:
    """Parts of stacks that experts read are cut on the stored weights: each becomes a weight of its own."""
    made: dict[tuple[Any, ...], str] = {}
    for op in draft.ops:
        for slot, name in enumerate(op.inputs if op.op == "RoutedExperts" else ()):
            cut = draft.maker.get(name)
            if slot < 3 or cut is None or cut.op != "Slice" or len(cut.attrs["axes"]) != 1 or not draft.is_leaf(cut.inputs[0]):
                continue
            whole = cut.inputs[0]
            step = (cut.attrs["axes"][0], cut.attrs["starts"][0], cut.attrs["ends"][0], cut.attrs["steps"][0])
            if (whole, step) not in made:
                own = made[whole, step] = draft.fresh(f"{whole}{'.' if '.' in whole else '_'}{_NAMES[slot]}")
                draft.types[own] = draft.types[name]
                if whole in draft.refs:
                    ref = draft.refs[whole]
                    draft.refs[own] = replace(ref, transform=(*(ref.transform or (("reshape", draft.shape(whole)),)), ("slice", step)))
                else:
                    draft.values[own] = transformed(draft.values[whole], [("slice", step)], own)
                    draft.keep_floats.add(own)
            op.inputs[slot] = made[whole, step]


def _view(find: Finder, root: Op, name: str, shape: tuple[int, ...]) -> str:
    return name if find.draft.shape(name) == shape else find.insert(root, "Reshape", [name], shape=shape)


def source(draft: Draft, name: str) -> str:
    """The tensor behind Reshapes and casts of whole numbers."""
    while (op := draft.maker.get(name)) is not None and (op.op == "Reshape" or (op.op == "Cast" and not draft.is_float(name))):
        name = op.inputs[0]
    return name


def routed(find: Finder, index: str) -> bool:
    """Whether indices are those of a TopK along its last dim."""
    op = find.maker(index, "TopK")
    return op is not None and len(op.outputs) > 1 and op.outputs[1] == index and op.attrs["axis"] == len(find.draft.shape(index)) - 1


def _activation(op: Op) -> str:
    return _ACTIVATIONS.get(op.op) or ("gelu_tanh" if op.attrs.get("approximate") == "tanh" else "gelu")


def zeros(draft: Draft, name: str) -> bool:
    """Whether a tensor is zero everywhere."""
    op = draft.maker.get(name)
    return draft.splat(name) == 0 or (op is not None and ((op.op == "ConstantOfShape" and op.attrs["value"] == 0) or (op.op == "Expand" and zeros(draft, op.inputs[0]))))


def _real(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its ones."""
    return tuple(n for n in shape if n != 1)


def _lead_of(shape: tuple[int, ...], tokens: int) -> tuple[int, ...] | None:
    """Leading dims that hold the tokens, ones dropped, or None."""
    k = next((k for k in range(len(shape) + 1) if prod(shape[:k]) == tokens and prod(shape[k:]) * tokens == prod(shape)), None)
    if k is None:
        return None
    return shape[:k] if 0 < k <= 2 else _real(shape[:k]) or (1,)
