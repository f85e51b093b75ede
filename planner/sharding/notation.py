"""Layouts, rules and splits as a line of text: the notation of reports, errors and docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.sharding.rule import Rule


def cells(names: Sequence[str], dims: Sequence[Sequence[str]]) -> str:
    """`[d, f/tensor]` of dim names and the axes that cut each."""
    return (
        "["
        + ", ".join(n + ("/" + "+".join(a) if a else "") for n, a in zip(names, dims, strict=True))
        + "]"
    )


def spell_dim(dim: Sequence[str], whole: frozenset[str] = frozenset()) -> str:
    """A rule's dim: `m`, `(h d)`, `k!`, or `1` for a dim of size one."""
    marked = [f + ("!" if f in whole else "") for f in dim]
    return marked[0] if len(marked) == 1 else f"({' '.join(marked)})" if marked else "1"


def spell_rule(rule: Rule) -> str:
    """The one-line rule: `b m k, k n -> b m n`."""
    sides = [
        ", ".join(" ".join(spell_dim(d, rule.whole) for d in dims) or "()" for dims in side)
        for side in (rule.operands, rule.results)
    ]
    pairs = "".join(f" ({name}: {' with '.join(members)})" for name, members in rule.paired.items())
    return " -> ".join(sides) + pairs


def spell_split(split: Mapping[str, Sequence[str]]) -> str:
    """`n/tensor` of a split; "whole on every device" when nothing is cut."""
    return (
        ", ".join(("pending sum" if f == "+" else f) + "/" + "+".join(a) for f, a in split.items())
        or "whole on every device"
    )
