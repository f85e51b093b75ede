"""Dense layers on [batch * seq, width] back to [batch, seq, width].

Many exporters flatten the leading dims before each matrix product and restore them after it. The
dims then appear merged to the planner, which can only cut them together. Nothing between the two
Reshapes looks at the leading dims, so both go.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.reader.draft.draft import Draft, Op
from planner.reader.draft.shapes import ARITHMETIC, words
from planner.reader.draft.simplify import OUTPUT, drop_dead, users

_POINTWISE = words(
    "Relu Sigmoid Tanh Erf Exp Log Sqrt Reciprocal Neg Abs Sin Cos Softplus Silu Elu LeakyRelu"
    " HardSigmoid Gelu Clip Cast Dropout"
)
_LAST = words("Softmax LogSoftmax LayerNormalization RMSNormalization")


def unflatten(draft: Draft) -> None:
    """Lifts what lies between a Reshape that merges leading dims and one that splits them again."""
    splits = [
        op for op in draft.ops if op.op == "Reshape" and len(draft.shape(op.inputs[0])) == 2
    ]  # lifting makes no more of them
    if splits:
        lift = _Lift(draft)
        for op in splits:
            lift.try_at(op)
        ops: list[Op] = []
        for op in draft.ops:
            ops.extend(lift.before.get(id(op), ()))
            ops.append(op)
        draft.ops = ops
    drop_dead(draft)


class _Lift:
    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.readers = users(draft)
        self.before: dict[int, list[Op]] = {}
        self.ids = {op.id for op in draft.ops}

    def try_at(self, end: Op) -> None:
        """Lifts the tree above one Reshape that splits dim 0, when every path ends in a Reshape
        that can keep the dims."""
        draft = self.draft
        flat, target = draft.shape(end.inputs[0]), draft.shape(end.outputs[0])
        if len(flat) != 2:
            return
        k = next((k for k in range(2, len(target) + 1) if math.prod(target[:k]) == flat[0]), 0)
        if not k or math.prod(target[k:]) != flat[1]:
            return
        lead = target[:k]
        actions: list[Callable[[], None]] = []
        gains: list[bool] = []
        if (
            not self._plan(end.inputs[0], lead, end, actions, gains, 0)
            or not any(gains)
            or not actions
        ):
            return
        for action in actions:
            action()
        x = end.inputs[0]
        if draft.shape(x) == target and end.outputs[0] not in draft.outputs:
            y = end.outputs[0]
            for user in self.readers.get(y, []):
                user.inputs[:] = [x if i == y else i for i in user.inputs]
            self.readers[x] = self.readers.get(y, [])

    def _plan(
        self,
        name: str,
        lead: tuple[int, ...],
        user: Op,
        actions: list[Callable[[], None]],
        gains: list[bool],
        depth: int,
    ) -> bool:
        """Records what makes `name` [lead, width] instead of [prod(lead), width]; False when it
        cannot be."""
        draft = self.draft
        op = draft.maker.get(name)
        if op is None or depth > 20 or len(draft.shape(name)) != 2:
            return False
        width = draft.shape(name)[1]
        if op.op == "Reshape":
            source = op.inputs[0]
            if draft.shape(source)[: len(lead)] != lead:
                return False
            gains.append(len(self.readers[name]) == 1 or draft.shape(source) == (*lead, width))
            actions.append(lambda: self._rewire(user, op, source, (*lead, width)))
            return True
        readers = self.readers[name]
        if len(readers) != 1 or readers[0] is OUTPUT:
            return False
        slots = self._slots(op, name)
        if slots is None or not all(
            self._plan(i, lead, op, actions, gains, depth + 1) for i in slots
        ):
            return False

        def widen() -> None:
            for name in op.outputs:
                if name:
                    draft.types[name] = ((*lead, width), draft.dtype(name))
            if op.op in _LAST:
                op.attrs["axis"] = len(lead)

        actions.append(widen)
        return True

    def _slots(self, op: Op, name: str) -> list[str] | None:
        """Inputs that must be lifted with the result, or None when the operation looks at the
        leading dims."""
        draft = self.draft
        flat = draft.shape(name)
        if op.op == "MatMul":
            plain = not op.attrs.get("trans_a") and len(draft.shape(op.inputs[1])) == 2
            return [op.inputs[0]] if plain else None
        if op.op in _POINTWISE:
            return [op.inputs[0]] if len([o for o in op.outputs if o]) == 1 else None
        if op.op in _LAST:
            return [op.inputs[0]] if op.attrs["axis"] == 1 else None
        if op.op in ARITHMETIC:
            slots = []
            for i in op.inputs:
                shape = draft.shape(i)
                if (len(shape) == 2 and shape[0] != 1) or shape == flat:
                    slots.append(i)
                elif len(shape) > 2:
                    return None
            return slots if slots and all(draft.shape(i)[0] == flat[0] for i in slots) else None
        return None

    def _rewire(self, user: Op, old: Op, source: str, shape: tuple[int, ...]) -> None:
        """Lets `user` read the source with its leading dims kept, through a Reshape where the width
        was split too."""
        draft = self.draft
        x = source
        if draft.shape(source) != shape:
            kept, draft.ops = draft.ops, []
            x = draft.add("Reshape", [source], out=f"{old.outputs[0]}/reshape", shape=shape)
            new, draft.ops = draft.ops, kept
            for added in new:
                wanted, k = f"{old.id}/reshape", 1
                while wanted in self.ids:
                    wanted, k = f"{old.id}/reshape.{k}", k + 1
                self.ids.add(wanted)
                added.id, added.scope, added.members = wanted, old.scope, old.members or (old.id,)
            self.before.setdefault(id(old), []).extend(new)
        user.inputs[:] = [x if i == old.outputs[0] else i for i in user.inputs]
        self.readers.setdefault(x, []).append(user)
        self.readers[old.outputs[0]] = [r for r in self.readers[old.outputs[0]] if r is not user]
