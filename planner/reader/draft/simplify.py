"""Passes that make the draft smaller without recognising anything: dead code, chains of views, lazy
Expand, transposed products."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from planner.reader.draft.draft import Draft, Op
from planner.reader.draft.shapes import ARITHMETIC, COMPARE, LOGIC, broadcast, words
from planner.reader.draft.views import Step, shortest

BROADCASTING = ARITHMETIC | COMPARE | LOGIC | {"Where"}
ALONE = words(
    "Relu Sigmoid Tanh Erf Exp Log Sqrt Reciprocal Neg Abs Sin Cos Softplus Silu IsNaN Not Floor"
    " Ceil Round Sign Elu LeakyRelu HardSigmoid Gelu Clip Cast"
)


def tidy(draft: Draft) -> None:
    """All passes, in an order that leaves nothing for a second round."""
    drop_dead(draft)
    for rewrite in (sink_expands, shorten_views, fold_transposes):
        if rewrite(draft):
            drop_dead(draft)


def users(draft: Draft) -> dict[str, list[Op]]:
    """tensor -> operations that read it (once per slot). Graph outputs count as one more reader,
    marked by an Op ''."""
    readers = defaultdict[str, list[Op]](list)
    for op in draft.ops:
        for name in op.inputs:
            readers[name].append(op)
    readers.pop("", None)
    for name in draft.outputs:
        readers[name].append(OUTPUT)
    return dict(readers)


OUTPUT = Op("", [], [], {})


def drop_dead(draft: Draft) -> None:
    """Removes operations whose results nobody reads."""
    live, results = set(draft.outputs), 0
    kept: list[Op] = []
    for op in reversed(draft.ops):
        if not live.isdisjoint(op.outputs):
            live.update(op.inputs)
            live.discard("")  # stands for operands and results that are left out
            kept.append(op)
            results += len(op.outputs)
    draft.ops = kept[::-1]
    if len(draft.maker) != results:
        draft.maker = {o: op for op in draft.ops for o in op.outputs if o}


def replace_tensor(ops: Iterable[Op], old: str, new: str) -> None:
    """Lets the given operations read another tensor."""
    for op in ops:
        op.inputs[:] = [new if i == old else i for i in op.inputs]


class Scribe:
    """Rebuilds the list of operations in one sweep; new ones take ids and scopes from the one they
    stand for."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.old = draft.ops
        self.ids = {op.id for op in draft.ops}
        draft.ops = []

    def keep(self, op: Op) -> None:
        """Appends an operation unchanged."""
        self.draft.ops.append(op)

    def add(
        self,
        like: Op,
        op: str,
        inputs: list[str],
        attrs: dict[str, Any] | None = None,
        *,
        out: str = "",
        shape: object = None,
    ) -> str:
        """Adds an operation in place of (part of) `like`; `out` may be a name `like` made."""
        draft = self.draft
        before = len(draft.ops)
        if out:
            draft.types.pop(out, None)
            draft.maker.pop(out, None)
        name = draft.add(
            op, inputs, attrs, out=out or f"{like.outputs[0]}/{op.lower()}", shape=shape
        )
        for new in draft.ops[before:]:
            self.name(new, like, bool(out))
        return name

    def name(self, new: Op, like: Op, main: bool) -> None:
        """Gives a new operation an id: that of `like` when it makes its result."""
        wanted = like.id if main else f"{like.id}/{new.op.lower()}"
        k = 1
        while not main and wanted in self.ids:
            wanted, k = f"{like.id}/{new.op.lower()}.{k}", k + 1
        self.ids.add(wanted)
        new.id, new.scope = wanted, like.scope
        new.members = like.members if main else (like.members or (like.id,))


def sink_expands(draft: Draft) -> bool:
    """f(Expand(x), small) = Expand(f(x, small)): work on the small tensor, and drop the Expand
    where broadcasting does it anyway. Whether there was any."""
    if not any(op.op == "Expand" for op in draft.ops):
        return False
    scribe = Scribe(draft)
    for op in scribe.old:
        if op.op not in BROADCASTING and op.op not in ALONE:
            scribe.keep(op)
            continue
        sources = []
        for name in op.inputs:
            maker = draft.maker.get(name)
            sources.append(maker.inputs[0] if maker is not None and maker.op == "Expand" else name)
        if sources == op.inputs:
            scribe.keep(op)
            continue
        full = draft.shape(op.outputs[0])
        small = broadcast(*(draft.shape(s) for s in sources))
        if small == full:
            op.inputs[:] = sources
            scribe.keep(op)
        elif math.prod(small) < math.prod(full) and not all(draft.is_leaf(s) for s in sources):
            inner = scribe.add(op, op.op, sources, dict(op.attrs))
            scribe.add(op, "Expand", [inner], out=op.outputs[0], shape=full)
        else:
            scribe.keep(op)
    return True


def shorten_views(draft: Draft) -> bool:
    """Replaces each chain of Reshape and Transpose by its shortest form. Whether one was
    replaced."""
    readers, changed = users(draft), False
    scribe = Scribe(draft)
    for op in scribe.old:
        if op.op not in ("Reshape", "Transpose"):
            scribe.keep(op)
            continue
        chain = [op]
        while True:
            before = draft.maker.get(chain[0].inputs[0])
            if (
                before is None
                or before.op not in ("Reshape", "Transpose")
                or len(readers[before.outputs[0]]) > 1
            ):
                break
            chain.insert(0, before)
        if len(chain) == 1:
            scribe.keep(op)
            continue
        source = chain[0].inputs[0]
        steps: list[Step] = [_step(draft, v) for v in chain]
        best = shortest(draft.shape(source), steps)
        if best is None or len(best) >= len(chain):
            scribe.keep(op)
            continue
        if not best and op.outputs[0] in draft.outputs:
            scribe.keep(op)
            continue
        x, changed = source, True
        for k, (kind, arg) in enumerate(best):
            last = op.outputs[0] if k == len(best) - 1 else ""
            y = (
                scribe.add(op, "Reshape", [x], out=last, shape=arg)
                if kind == "reshape"
                else scribe.add(op, "Transpose", [x], {"perm": arg}, out=last)
            )
            readers.setdefault(x, []).append(draft.maker.get(y, op))
            readers.setdefault(y, [op])
            x = y
        if x != op.outputs[0]:
            replace_tensor(readers.get(op.outputs[0], []), op.outputs[0], x)
            readers.setdefault(x, []).extend(readers.get(op.outputs[0], []))
    return changed


def _step(draft: Draft, op: Op) -> Step:
    if op.op == "Transpose":
        return ("transpose", op.attrs["perm"])
    return ("reshape", draft.shape(op.outputs[0]))


def swaps_last_two(op: Op | None) -> bool:
    """True for a Transpose of the last two dims alone."""
    if op is None or op.op != "Transpose":
        return False
    perm = op.attrs["perm"]
    n = len(perm)
    return n >= 2 and tuple(perm) == (*range(n - 2), n - 1, n - 2)


def fold_transposes(draft: Draft) -> bool:
    """MatMul(a, Transpose(b)) -> MatMul(a, b; trans_b), and the reshapes and transposes of a weight
    done on the stored weight. Whether there was any."""
    changed = False
    for op in draft.ops:
        if op.op != "MatMul":
            continue
        for k, flag in enumerate(("trans_a", "trans_b")):
            maker = draft.maker.get(op.inputs[k])
            if swaps_last_two(maker):
                assert maker is not None
                op.inputs[k] = maker.inputs[0]
                op.attrs[flag], changed = 1 - int(op.attrs.get(flag, 0)), True
    if changed:
        drop_dead(draft)  # a transpose nobody reads any more is no use of its weight
    readers = users(draft)
    kept: list[Op] = []
    for op in draft.ops:
        x = op.inputs[0] if op.inputs else ""
        leaf = x in draft.refs or x in draft.keep_floats
        if (
            op.op in ("Reshape", "Transpose")
            and leaf
            and len(readers.get(x, [])) == 1
            and op.outputs[0] not in draft.outputs
        ):
            step = _step(draft, op)
            y = op.outputs[0]
            if x in draft.refs:
                start = draft.refs[x].transform or (
                    (("reshape", draft.shape(x)),) if step[0] == "transpose" else ()
                )
                draft.refs[x] = replace(draft.refs[x], transform=(*start, step))
            else:
                value = draft.values[x]
                draft.values[x] = (
                    value.reshape(step[1]) if step[0] == "reshape" else value.transpose(step[1])
                )
            draft.forget(x)
            draft.types[x] = draft.types[y]
            replace_tensor(readers.get(y, []), y, x)
            readers[x] = readers.get(y, [])
            continue
        kept.append(op)
    changed |= len(kept) < len(draft.ops)
    draft.ops = kept
    return changed


def drop_copies(draft: Draft) -> None:
    """Removes Reshapes and Identities that change nothing, those that only give a graph output its
    name included."""
    readers = users(draft)
    kept: list[Op] = []
    for op in draft.ops:
        x = op.inputs[0] if op.inputs else ""
        y = op.outputs[0]
        if op.op not in ("Reshape", "Identity") or draft.types[x] != draft.types[y]:
            kept.append(op)
        elif y not in draft.outputs:
            replace_tensor(readers.get(y, []), y, x)
            readers.setdefault(x, []).extend(readers.get(y, []))
        elif x in draft.maker and x not in draft.outputs:
            maker = draft.maker.pop(x)
            maker.outputs[maker.outputs.index(x)] = y
            draft.maker[y] = maker
            replace_tensor(readers.get(x, []), x, y)
            readers[y] = [*readers.get(y, []), *(r for r in readers.get(x, []) if r is not op)]
        else:
            kept.append(op)
    draft.ops = kept
