"""What the fusing passes share: who makes and reads a tensor, and replacing a group of operations
by one.

A group may be fused only when nothing outside it reads what it makes inside (`Finder.closed`), so
nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from planner.reader.draft.draft import Draft, Op
from planner.reader.draft.simplify import drop_dead, users

_TOLERANCE = {"float64": 1e-6, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


class Finder:
    """An index of the draft that stays valid while groups are replaced; go on with what `applied`
    returns."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.readers = users(draft)
        self.place = {id(op): k for k, op in enumerate(draft.ops)}
        self.gone: set[int] = set()
        self.before: dict[int, list[Op]] = {}
        self.ids = {op.id for op in draft.ops}
        self.changed = False
        """Whether an operation was replaced, or lost an operand."""

    def maker(self, name: str, *kinds: str) -> Op | None:
        """The operation that makes a tensor, when it is one of `kinds` and not fused away."""
        op = self.draft.maker.get(name)
        return (
            op
            if op is not None and (not kinds or op.op in kinds) and id(op) not in self.gone
            else None
        )

    def uses(self, name: str) -> list[Op]:
        """Live readers of a tensor, once per slot; the graph's output counts as one."""
        return [op for op in self.readers.get(name, []) if id(op) not in self.gone]

    def only(self, name: str, *kinds: str) -> Op | None:
        """The single reader of a tensor, when it is one of `kinds`."""
        users = self.uses(name)
        return users[0] if len(users) == 1 and users[0].op in kinds else None

    def closed(self, root: Op, inside: Iterable[Op]) -> bool:
        """True when only the group reads what the group makes, apart from the root's result."""
        group = {id(op) for op in inside} | {id(root)}
        return all(
            id(user) in group
            for op in inside
            if op is not root
            for result in op.outputs
            if result
            for user in self.uses(result)
        )

    def close(self, a: float | None, b: float, like: str) -> bool:
        """True when a equals b up to the rounding of the dtype of tensor `like`."""
        return a is not None and abs(a - b) <= _TOLERANCE.get(self.draft.dtype(like), 0.0) * max(
            abs(b), 1e-12
        )

    def other(self, op: Op, name: str) -> str | None:
        """The other operand of a two-operand operation, or None when `name` is neither."""
        if len(op.inputs) != 2 or name not in op.inputs:
            return None
        return op.inputs[1] if op.inputs[0] == name else op.inputs[0]

    def scaled(self, op: Op | None) -> tuple[str, float] | None:
        """(x, c) when op is x * c or x / c with a scalar constant c."""
        if op is None or op.op not in ("Mul", "Div"):
            return None
        for k in (1, 0) if op.op == "Mul" else (1,):
            c = self.draft.scalar(op.inputs[k])
            x = op.inputs[1 - k]
            if (
                c is not None
                and (op.op == "Mul" or c != 0)
                and self.draft.types[x] == self.draft.types[op.outputs[0]]
                and not self.draft.is_leaf(x)
            ):
                return x, (c if op.op == "Mul" else 1 / c)
        return None

    def insert(
        self,
        root: Op,
        op: str,
        inputs: Sequence[str],
        attrs: dict[str, Any] | None = None,
        *,
        shape: object = None,
    ) -> str:
        """A new operation placed before `root`, with an id derived from it."""
        draft, self.changed = self.draft, True
        kept, draft.ops = draft.ops, []
        result = draft.add(op, inputs, attrs, out=f"{root.outputs[0]}/{op.lower()}", shape=shape)
        new, draft.ops = draft.ops, kept
        for added in new:
            wanted, k = f"{root.id}/{added.op.lower()}", 1
            while wanted in self.ids:
                wanted, k = f"{root.id}/{added.op.lower()}.{k}", k + 1
            self.ids.add(wanted)
            added.id, added.scope, added.members = wanted, root.scope, root.members or (root.id,)
            for name in added.inputs:
                self.readers.setdefault(name, []).append(added)
        self.before.setdefault(id(root), []).extend(new)
        return result

    def fuse(
        self, root: Op, inside: Iterable[Op], op: str, inputs: Sequence[str], attrs: dict[str, Any]
    ) -> None:
        """Turns `root` into the fused operation; the rest of the group is dropped."""
        group = sorted(
            {id(o): o for o in [*inside, root]}.values(), key=lambda o: self.place.get(id(o), -1)
        )
        members: list[str] = []
        for member in group:
            members.extend(m for m in member.members or (member.id,) if m not in members)
        root.members = tuple(members)
        for member in group:
            if member is not root:
                self.gone.add(id(member))
        root.op, root.inputs, root.attrs, self.changed = op, list(inputs), attrs, True
        for name in inputs:
            if name:
                self.readers.setdefault(name, []).append(root)

    def applied(self) -> Finder:
        """Writes insertions and removals into the draft; an index of what it then is."""
        if not self.changed:
            return self
        ops: list[Op] = []
        remaining = self.draft.ops[::-1]
        while remaining:
            op = remaining.pop()
            before = [] if id(op) in self.gone else self.before.pop(id(op), [])
            if before:  # which may have operations before them as well
                remaining += [op, *before[::-1]]
            elif id(op) not in self.gone:
                ops.append(op)
        self.draft.ops = ops
        drop_dead(self.draft)
        return Finder(self.draft)
