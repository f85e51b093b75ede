"""Attention with more dims before its rows than batch and heads: in the form that
`planner.reader.fuse.attention` knows.

    [B, I, .., H, S, D]     rows and columns of pairs (AlphaFold), units of a mask (Hiera): the dims
                            behind the first are one, [B, I..H, S, D]
    [B W, H, S, D]          windows of an image (Swin), whose scores are seen as [B, W, H, S, T]
                            where a mask of each window is added: [B, W H, S, D], as in the batch
                            the masks repeat, and windows and heads have them in common

What is added to the scores, or they are multiplied by, is repeated over heads and windows where it
differs in either, never over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.reader.draft.draft import Op
from planner.reader.fuse.matcher import Finder

_MOST = 16
"""Operations between the two products, at most."""


@dataclass
class _Chain:
    """Operations from the weights up to the product of queries and keys, each with the slot of the
    scores; `lead`: what the dims before the rows are, the windows' two apart."""

    steps: list[tuple[Op, int]] = field(default_factory=list)
    lead: tuple[int, ...] = ()


def windows(find: Finder) -> Finder:
    """Rewrites what it finds; an index of what the draft then is."""
    for root in list(find.draft.ops):
        if root.op == "MatMul" and not root.attrs.get("trans_a") and id(root) not in find.gone:
            chain = _chain(find, root)
            if chain is not None:
                _rewrite(find, root, chain)
    return find.applied()


def _chain(find: Finder, root: Op) -> _Chain | None:
    """What lies before a product of weights and values; None where it is no attention, or one of
    batch and heads alone."""
    draft, chain, softmax = find.draft, _Chain(), False
    name, shape = root.inputs[0], draft.shape(root.inputs[0])
    if len(shape) < 4 or shape[:-2] != draft.shape(root.inputs[1])[:-2]:
        return None
    if len(shape) > 4:
        chain.lead = shape[:-2]
    for _ in range(_MOST):
        op = find.maker(name)
        if op is None:
            return None
        if op.op == "MatMul":
            rank = len(chain.lead) if len(shape) > 4 else 2
            operands = [draft.shape(i) for i in op.inputs]
            fit = all(len(s) == rank + 2 and s[:-2] == draft.shape(name)[:-2] for s in operands)
            chain.steps.append((op, -1))
            ready = softmax and chain.lead and fit and not op.attrs.get("trans_a")
            inside = [step for step, _ in chain.steps]
            return chain if ready and find.closed(root, inside) else None
        slot = _slot(find, op, name)
        if slot is None or (op.op == "Softmax" and op.attrs["axis"] != len(draft.shape(name)) - 1):
            return None
        before = draft.shape(op.inputs[slot])
        if op.op == "Reshape" and not _windowed(chain, before, draft.shape(name)):
            return None
        softmax |= op.op == "Softmax"
        chain.steps.append((op, slot))
        name = op.inputs[slot]
    return None


def _slot(find: Finder, op: Op, name: str) -> int | None:
    """The operand that is the scores: of the result's shape, and made by an operation."""
    draft = find.draft
    if op.op in ("Softmax", "Cast", "Reshape"):
        return 0
    if op.op not in ("Add", "Mul", "Div", "Where"):
        return None
    slots = [k for k, i in enumerate(op.inputs) if draft.shape(i) == draft.shape(name)]
    slots = [
        k for k in slots if find.maker(op.inputs[k]) is not None and (op.op, k) != ("Where", 0)
    ]
    return slots[0] if len(slots) == 1 and (op.op, slots[0]) != ("Div", 1) else None


def _windowed(chain: _Chain, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a view takes batch and windows apart or together, as the chain does elsewhere."""
    apart, together = (before, after) if len(before) == 5 else (after, before)
    if len(apart) != 5 or len(together) != 4 or apart[2:] != together[1:]:
        return False
    if chain.lead not in ((), apart[:3]):
        return False
    chain.lead = apart[:3]
    return apart[0] * apart[1] == together[0]


def _rewrite(find: Finder, root: Op, chain: _Chain) -> None:
    """The same attention with batch and one dim of all the others before its rows."""
    draft, lead = find.draft, chain.lead
    merged = (lead[0], math.prod(lead[1:]))

    def flat(name: str) -> str:
        return find.insert(root, "Reshape", [name], shape=(*merged, *draft.shape(name)[-2:]))

    scores = chain.steps[-1][0]
    tensor = find.insert(root, "MatMul", [flat(i) for i in scores.inputs], dict(scores.attrs))
    for op, slot in reversed(chain.steps[:-1]):
        if op.op == "Reshape":
            continue
        rank = len(draft.shape(op.outputs[0]))
        operands = [
            tensor if k == slot else _spread(find, root, i, lead, rank)
            for k, i in enumerate(op.inputs)
        ]
        attrs = {**op.attrs, "axis": 3} if op.op == "Softmax" else dict(op.attrs)
        tensor = find.insert(root, op.op, operands, attrs)
    tensor = find.insert(root, "MatMul", [tensor, flat(root.inputs[1])], dict(root.attrs))
    find.fuse(root, [op for op, _ in chain.steps], "Reshape", [tensor], {})


def _spread(find: Finder, root: Op, name: str, lead: Sequence[int], rank: int) -> str:
    """An operand beside scores of a rank, beside those of batch and one dim."""
    draft = find.draft
    shape = draft.shape(name)
    if len(shape) <= 2 or math.prod(shape) == 1:
        return name
    shape = (1,) * (rank - len(shape)) + shape
    rows = shape[-2:]
    if rank == 4 and len(lead) == 3:  # batch and windows in one dim
        parts = (1, 1) if shape[0] == 1 else tuple(lead[:2])
        shape = (*parts, *shape[1:])
    if set(shape[1:-2]) == {1}:
        return find.insert(root, "Reshape", [name], shape=(shape[0], 1, *rows))
    whole = (shape[0], *lead[1:], *rows)
    tensor = find.insert(root, "Reshape", [name], shape=shape)
    if shape != whole:
        tensor = find.insert(root, "Expand", [tensor], shape=whole)
    return find.insert(root, "Reshape", [tensor], shape=(shape[0], math.prod(lead[1:]), *rows))
