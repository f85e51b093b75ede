"""Einsum: a matrix product or a transpose where it is one, with heads apart too, else itself."""

from __future__ import annotations

import math
from typing import Any

from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.call import Call


def einsum(call: Call) -> None:
    """Lowers an Einsum: dims under "..." get letters; what moves dims alone becomes a Transpose, a
    product of matrices a MatMul where it is one, and anything else stays an Einsum."""
    equation = call.attr("equation", "").replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(call.inputs):
        raise ShapeError(f"einsum {equation!r} with {len(call.inputs)} operands")
    if "..." in left:
        used = set(equation)
        free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in used]
        extra = [len(call.shape(k)) - len(t.replace("...", "")) for k, t in enumerate(terms)]
        most = max((n for n, t in zip(extra, terms, strict=True) if "..." in t), default=0)
        letters = "".join(free[:most])
        terms = [
            t.replace("...", letters[most - n :] if n > 0 else "")
            for t, n in zip(terms, extra, strict=True)
        ]
        right = right.replace("...", letters) if "->" in equation else letters
        if "->" not in equation:
            right += _implicit(terms, letters)
    elif "->" not in equation:
        right = _implicit(terms, "")
    if len(terms) == 1 and sorted(terms[0]) == sorted(right) and len(set(right)) == len(right):
        call.result("Transpose", call.inputs, {"perm": tuple(terms[0].index(c) for c in right)})
    elif len(terms) == 2 and (flags := _as_matmul(call, terms, right)) is not None:
        call.result("MatMul", call.inputs, flags)
    elif len(terms) != 2 or not (
        _as_projection(call, terms, right) or _as_heads(call, terms, right)
    ):
        call.result("Einsum", call.inputs, {"equation": ",".join(terms) + "->" + right})


def _as_matmul(call: Call, terms: list[str], right: str) -> dict[str, Any] | None:
    """Flags of the MatMul an einsum of two operands is: batch letters first and alike, then m k, k
    n and m n."""
    a, b = terms
    if min(len(a), len(b), len(right)) < 2 or any(len(set(t)) != len(t) for t in (a, b, right)):
        return None
    m, n = right[-2], right[-1]
    batch = right[:-2]
    inner = [c for c in a[-2:] if c != m]
    if (
        len(inner) != 1
        or not all(t[:-2] in ("", batch) for t in (a, b))
        or {a[:-2], b[:-2]} == {""} != {batch}
    ):
        return None
    k = inner[0]
    if sorted(a[-2:]) != sorted((m, k)) or sorted(b[-2:]) != sorted((k, n)) or k in right:
        return None
    sizes = [
        dict(zip(t, call.shape(i), strict=True))
        for i, t in enumerate((a, b))
        if len(t) == len(call.shape(i))
    ]
    if len(sizes) != 2 or sizes[0][k] != sizes[1][k]:
        return None
    return {
        flag: 1 for flag, swapped in (("trans_a", a[-2] == k), ("trans_b", b[-2] == n)) if swapped
    }


def _sizes(call: Call, terms: list[str]) -> dict[str, int] | None:
    """Extents by letter; None where a letter has two, or stands twice in a term."""
    sizes: dict[str, int] = {}
    for k, term in enumerate(terms):
        if len(term) != len(call.shape(k)) or len(set(term)) != len(term):
            return None
        for letter, n in zip(term, call.shape(k), strict=True):
            if sizes.setdefault(letter, n) != n:
                return None
    return sizes


def _as_projection(call: Call, terms: list[str], right: str) -> bool:
    """Emits an einsum that is a product of two matrices whose rows, columns or sums are several
    dims in a row, as heads are: "bsh,hnd->bsnd", "bsnd,ndh->bsh", "bsh,ndh->bsnd"."""
    (a, b), sizes = terms, _sizes(call, terms)
    summed = "".join(c for c in a if c in b)
    rows, columns = a.removesuffix(summed), "".join(c for c in b if c not in summed)
    turned = b == columns + summed
    if (
        sizes is None
        or not (rows and columns and summed)
        or a != rows + summed
        or not (turned or b == summed + columns)
        or right != rows + columns
    ):
        return False
    k, n = (math.prod(sizes[c] for c in letters) for letters in (summed, columns))
    lead = tuple(sizes[c] for c in rows)
    if len(lead) < 2:
        return False
    x = call.emit("Reshape", [call.arg(0)], shape=(*lead, k))
    w = call.emit("Reshape", [call.arg(1)], shape=(n, k) if turned else (k, n))
    y = call.emit("MatMul", [x, w], {"trans_b": 1} if turned else {})
    call.result("Reshape", [y], shape=tuple(sizes[c] for c in right))
    return True


def _as_heads(call: Call, terms: list[str], right: str) -> bool:
    """Emits an einsum of two batch dims, rows and columns in any order, as scores and sums of
    attention are: "bqnd,bknd->bnqk", "bnqk,bknd->bqnd"."""
    (a, b), sizes = terms, _sizes(call, terms)
    batch = "".join(c for c in right if c in a and c in b)
    if sizes is None or len(batch) != 2 or {len(a), len(b), len(right)} != {4}:
        return False
    alone = [[c for c in right if c in one and c not in two] for one, two in ((a, b), (b, a))]
    summed = [c for c in a if c in b and c not in right]
    if [len(letters) for letters in (*alone, summed)] != [1, 1, 1]:
        return False
    (m,), (n,), (k,) = (*alone, summed)
    sides = []
    for slot, (term, wanted) in enumerate(((a, batch + m + k), (b, batch + k + n))):
        perm = tuple(term.index(c) for c in wanted)
        sides.append(call.emit("Transpose", [call.arg(slot)], {"perm": perm}))
    y = call.emit("MatMul", sides)
    call.result("Transpose", [y], {"perm": tuple((batch + m + n).index(c) for c in right)})
    return True


def _implicit(terms: list[str], taken: str) -> str:
    joined = "".join(terms)
    return "".join(c for c in sorted(set(joined)) if joined.count(c) == 1 and c not in taken)
