"""What a mixture of experts is made of, as exporters write it: stacks of weights, products with
them, the hidden layer, the rows of tokens.

Everything is found from a result backwards (planner.reader.fuse.experts starts at its roots); what
was passed on the way goes when the mixture is fused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from planner.reader.draft.draft import Draft, Op
from planner.reader.fuse.matcher import Finder

_ACTIVATIONS = {"Silu": "silu", "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh"}


@dataclass(frozen=True)
class Product:
    """Rows times an expert's weight: the stack, whether it is stored [E, out, in], the operand, the
    stack of biases; which part (start, step) of the result."""

    stack: str
    turned: bool
    rows: str
    bias: str = ""
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Activation:
    """The hidden activation as attributes of RoutedExperts: its name, and of "swiglu" three
    numbers (limit None: no bounds)."""

    name: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the node."""
        if self.name != "swiglu":
            return {"activation": self.name}
        bounds = {} if self.limit is None else {"limit": self.limit}
        return {"activation": self.name, "alpha": self.alpha, "beta": self.beta, **bounds}


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

    def uncast(self, name: str) -> str:
        """The result behind a cast to a wider float: routers are computed in float32, and what they
        weigh follows."""
        op = self.find.maker(self.strip(name), "Cast")
        if (
            op is None
            or not self.draft.is_float(op.inputs[0])
            or not self.draft.is_float(op.outputs[0])
        ):
            return name
        self.inside.append(op)
        return op.inputs[0]

    def product(self, name: str) -> Product | None:
        """Rows times weights chosen by the router, or times all of them, and a bias of each
        expert."""
        op, bias = self.take(name, "MatMul", "Add"), ""
        if op is not None and op.op == "Add":
            for k in (0, 1):
                added = self.bias(op.inputs[k], op)
                if added and (inner := self.take(op.inputs[1 - k], "MatMul")) is not None:
                    op, bias = inner, added
                    break
        if op is None or op.op != "MatMul":
            return None
        product = self.gathered(op) if self.choices else self.every(op)
        return None if product is None else replace(product, bias=bias)

    def chosen(self, name: str) -> str:
        """The stack that is gathered by the router's choices, '' where it is not."""
        op = self.find.maker(name, "Gather")
        if op is None or op.attrs["axis"] != 0:
            return ""
        index = source(self.draft, op.inputs[1])
        if (
            not self.index
            and prod(self.draft.shape(index)) == self.tokens * self.choices
            and routed(self.find, index)
        ):
            self.index = index
        return op.inputs[0] if index == self.index else ""

    def bias(self, name: str, add: Op) -> str:
        """The stack [E, width] of the biases added here, '' where it is none."""
        out = self.draft.shape(add.outputs[0])
        if self.choices:
            stack = self.chosen(source(self.draft, name))
            return (
                stack
                if stack
                and len(self.draft.shape(stack)) == 2
                and prod(self.draft.shape(name)) == prod(out)
                else ""
            )
        shape = self.draft.shape(name)
        leaf = source(self.draft, name)
        leaf_shape = self.draft.shape(leaf)
        per_expert = (
            len(shape) >= 3
            and len(out) >= 3
            and shape[-3:] == (out[-3], 1, out[-1])
            and prod(shape) == out[-3] * out[-1]
        )
        return (
            leaf
            if per_expert and self.draft.is_leaf(leaf) and leaf_shape in (shape, (out[-3], out[-1]))
            else ""
        )

    def gathered(self, op: Op) -> Product | None:
        """One row a product: [.., 1, H] x chosen [.., H, F], or chosen [.., F, H] x [.., H, 1]."""
        shape = self.draft.shape
        for k in (1, 0):
            stack, other = self.chosen(op.inputs[k]), op.inputs[1 - k]
            if not stack or len(shape(stack)) != 3:
                continue
            swapped, transposed = (
                bool(op.attrs.get(flag))
                for flag in (("trans_a", "trans_b") if k else ("trans_b", "trans_a"))
            )
            batch, rest = shape(op.inputs[k])[:-2], shape(other)[:-2]
            rest = (1,) * (len(batch) - len(rest)) + rest
            if (
                shape(other)[-1 if swapped == bool(k) else -2] != 1
                or rest not in (batch, (*batch[:-1], 1))
                or (rest != batch and batch[-1] != self.choices)
            ):
                return None  # tokens are repeated for their choices, in the last dim, or not at all
            return Product(stack, transposed == bool(k), other)
        return None

    def every(self, op: Op) -> Product | None:
        """All experts: [.., 1, T, H] x stack [E, H, F]."""
        stack, out = op.inputs[1], self.draft.shape(op.outputs[0])
        if (
            op.attrs.get("trans_a")
            or len(self.draft.shape(stack)) != 3
            or len(out) < 3
            or out[-3] != self.draft.shape(stack)[0]
        ):
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
        product = self.product(op.inputs[0])
        return None if product is None else replace(product, part=part)

    def hidden(self, name: str) -> tuple[Product | None, Product, Activation] | None:
        """(gate, up, activation) of the hidden activations."""
        op = self.take(name, "Mul", *_ACTIVATIONS, "Gelu")
        if op is None:
            return None
        if op.op != "Mul":
            up = self.first(op.inputs[0])
            return None if up is None else (None, up, _activation(op))
        if op.inputs[0] == op.inputs[1]:
            return self.squared(op)
        for k in (0, 1):
            act = self.find.maker(source(self.draft, op.inputs[k]), *_ACTIVATIONS, "Gelu")
            if act is None:
                continue
            self.strip(op.inputs[k])
            self.inside.append(act)
            gate, up = self.first(act.inputs[0]), self.first(op.inputs[1 - k])
            return None if gate is None or up is None else (gate, up, _activation(act))
        return self.bounded(op)

    def squared(self, op: Op) -> tuple[None, Product, Activation] | None:
        """(gate, up, activation) of max(0, u)^2, without a gate."""
        act = self.take(op.inputs[0], "Relu")
        up = None if act is None else self.first(act.inputs[0])
        return None if up is None else (None, up, Activation("relu2"))

    def bounded(self, op: Op) -> tuple[Product | None, Product, Activation] | None:
        """(gate, up, activation) of g sigmoid(alpha g) (u + beta), g bounded from above and u on
        both sides."""
        for k in (0, 1):
            plus = self.find.maker(source(self.draft, op.inputs[k]), "Add")
            curve = self.find.maker(source(self.draft, op.inputs[1 - k]), "Mul")
            if plus is None or curve is None or (shifted := self.shifted(plus)) is None:
                continue
            turned = self.curved(curve)
            if turned is None:
                continue
            (g, alpha, sigmoid), (u, beta) = turned, shifted
            for name in op.inputs:
                self.strip(name)
            self.inside += [plus, curve, *sigmoid]
            (g, high), (u, both) = self.clipped(g, both=False), self.clipped(u, both=True)
            if high != both:
                return None
            gate, up = self.first(g), self.first(u)
            bounded = Activation("swiglu", alpha, beta, high)
            return None if gate is None or up is None else (gate, up, bounded)
        return None

    def shifted(self, op: Op) -> tuple[str, float] | None:
        """(u, beta) of u + beta."""
        for k in (0, 1):
            if (beta := self.draft.scalar(op.inputs[k])) is not None:
                return op.inputs[1 - k], beta
        return None

    def curved(self, op: Op) -> tuple[str, float, list[Op]] | None:
        """(g, alpha, operations passed) of g sigmoid(alpha g)."""
        for k in (0, 1):
            sigmoid = self.find.maker(op.inputs[1 - k], "Sigmoid")
            inner = None if sigmoid is None else self.find.maker(sigmoid.inputs[0], "Mul")
            scaled = self.find.scaled(inner)
            if sigmoid is not None and inner is not None and scaled is not None:
                g, alpha = scaled
                if g == op.inputs[k]:
                    return g, alpha, [sigmoid, inner]
        return None

    def clipped(self, name: str, *, both: bool) -> tuple[str, float | None]:
        """(x, bound) of x cut at the bound, from below at its negative too where `both`; what is
        not cut, and None, elsewhere."""
        op = self.find.maker(name, "Clip", "Min")
        if op is None:
            return name, None
        x, high, low = op.inputs[0], op.attrs.get("max"), op.attrs.get("min")
        if op.op == "Min":
            k = int(self.draft.scalar(op.inputs[0]) is None)
            x, high = op.inputs[1 - k], self.draft.scalar(op.inputs[k])
        if high is None or low != (-high if both else None):
            return name, None
        self.inside.append(op)
        return x, float(high)

    def token_rows(self, name: str) -> str:
        """The tensor of tokens [T, H] that rows of a product are taken from, '' where they are
        something else."""
        draft = self.draft
        while (op := self.find.maker(name, "Reshape", "Expand", "Tile", "Gather")) is not None:
            shape, before = draft.shape(name), draft.shape(op.inputs[0])
            before = (1,) * (len(shape) - len(before)) + before
            if op.op in ("Expand", "Tile"):
                changed = [k for k in range(len(shape)) if before[k] != shape[k]]
                if any(before[k] != 1 for k in changed):
                    break
                dense = not self.choices and changed == [len(shape) - 3]
                if not dense and not (
                    len(changed) == 1
                    and shape[changed[0]] == self.choices
                    and prod(shape[: changed[0]]) == self.tokens
                ):
                    break
            elif op.op == "Gather":
                rows, want = (
                    draft.value(op.inputs[1]),
                    np.repeat(np.arange(self.tokens), max(1, self.choices)),
                )
                if (
                    op.attrs["axis"] != 0
                    or before[0] != self.tokens
                    or rows is None
                    or not np.array_equal(rows.reshape(-1), want)
                ):
                    break
            name = op.inputs[0]
        return name


def source(draft: Draft, name: str) -> str:
    """The tensor behind Reshapes and casts of whole numbers."""
    while (op := draft.maker.get(name)) is not None and (
        op.op == "Reshape" or (op.op == "Cast" and not draft.is_float(name))
    ):
        name = op.inputs[0]
    return name


def routed(find: Finder, index: str) -> bool:
    """Whether indices are those of a TopK along its last dim."""
    op = find.maker(index, "TopK")
    return (
        op is not None
        and len(op.outputs) > 1
        and op.outputs[1] == index
        and op.attrs["axis"] == len(find.draft.shape(index)) - 1
    )


def _activation(op: Op) -> Activation:
    gelu = "gelu_tanh" if op.attrs.get("approximate") == "tanh" else "gelu"
    return Activation(_ACTIVATIONS.get(op.op, gelu))


def real_dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its ones."""
    return tuple(n for n in shape if n != 1)
