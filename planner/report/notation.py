"""Layouts in plain notation: `W[d, f/tensor]` says that the second dim is cut over the mesh axis
"tensor".

Dims of weights are named by their extent, with a legend: d the extent most weights share, f the
widest other one of the repeated blocks, v the rows of the longest table that is looked up in; an
extent that plays no such part is written as its number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from planner.sharding.notation import cells
from planner.strategy.notation import weight_groups
from planner.strategy.strategy import Strategy

FACTORS = {
    "MatMul": {"m": "rows", "n": "columns", "k": "sums"},
    "Gemm": {"m": "rows", "n": "columns", "k": "sums"},
    "Attention": {"b": "batch", "g": "heads", "r": "heads", "s": "queries", "t": "keys"},
    "Gather": {"v": "table rows"},
    "CrossEntropyLoss": {"v": "classes"},
    "RoutedExperts": {"e": "experts"},
}
"""Operator -> plain words for what its rule calls by a letter."""


def plain_split(op: str, split: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> str:
    """`batch over 16, columns over 8` of a split: what is cut and into how many parts; sizes are
    those of the mesh's axes."""
    parts_by_word: dict[str, int] = {}
    for factor, axes in split.items():
        letter, number = factor[:1], factor[1:]
        word = FACTORS.get(op, {}).get(factor) or (
            "pending sums"
            if factor == "+"
            else "batch"
            if letter == "b"
            else f"dim {number}"
            if number.isdigit()
            else factor
        )
        parts_by_word[word] = parts_by_word.get(word, 1) * prod(sizes.get(a, 1) for a in axes)
    return (
        ", ".join(f"{word} over {n:,}" for word, n in parts_by_word.items())
        or "whole on every device"
    )


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Labels without the parts that all of them share at the front, layer stars, a closing
    `weight`, and exporters' filler words.

    A short form that two labels would share is not used.
    """
    filler = {
        "*",
        "layers",
        "layer",
        "block",
        "blocks",
        "h",
        "model",
        "self_attn",
        "self",
        "encoder",
        "decoder",
        "transformer",
        "weight",
        "module",
        "m",
    }

    def form(label: str) -> str:
        parts = [p for p in re.split(r"[./]", label) if p]
        telling = [p for p in parts if p not in filler] or parts[-1:]
        return ".".join(telling[-2:])

    forms = {label: form(label) for label in labels}
    taken = list(forms.values())
    return {label: text if taken.count(text) == 1 else label for label, text in forms.items()}


def extent_names(strategy: Strategy) -> dict[int, str]:
    """extent -> letter, see the module's docstring."""
    matrices = [g for g in weight_groups(strategy) if len(g.shape) == 2]
    votes: dict[int, int] = {}
    wide: dict[int, int] = {}
    for g in matrices:
        for n in g.shape:
            votes[n] = votes.get(n, 0) + g.count
            if g.count > 1:
                wide[n] = wide.get(n, 0) + g.elements
    letter_of: dict[int, str] = {}
    shared = min((n for n in votes if n > 1), key=lambda n: (-votes[n], n), default=None)
    if shared is not None and votes[shared] > 1:
        letter_of[shared] = "d"
    hidden = min(
        (n for n in wide if n > 1 and n not in letter_of), key=lambda n: (-wide[n], n), default=None
    )
    if hidden is not None:
        letter_of[hidden] = "f"
    rows = max(
        (
            g.shape[0]
            for g in matrices
            if g.count == 1 and g.shape[0] > g.shape[1] and g.shape[0] not in wide
        ),
        default=None,
    )
    if (
        rows is not None
        and rows not in letter_of
        and any(r["op"] == "Gather" for r in strategy.nodes.values())
    ):
        letter_of[rows] = "v"
    return letter_of


def residual(strategy: Strategy, names: Mapping[int, str]) -> str:
    """`x[b/data, s, d]` of what one repeated block hands to the next; "" without blocks."""
    for block in strategy.blocks:
        last = strategy.nodes.get(block["body"][-1]) if block["body"] else None
        for name in last["outputs"] if last else ():
            row = strategy.tensors.get(name)
            if row and row["shape"]:
                return "x" + _activation(row, strategy, names)
    return ""


def _activation(row: Mapping[str, Any], strategy: Strategy, names: Mapping[int, str]) -> str:
    """Notation of an activation: b for the batch of one microbatch in front, s for the tokens of
    one example, then the weights' letters."""
    batch = strategy.workload["batch"] // max(1, int(strategy.techniques["microbatches"]))
    per_example = int(strategy.costs.get("tokens_per_step", 0)) // max(
        1, int(strategy.workload["batch"])
    )
    letters = []
    for d, n in enumerate(row["shape"]):
        letters.append(
            "b"
            if d == 0 and n == batch
            else (
                "s"
                if d == 1 and n == per_example and n > 1 and len(row["shape"]) > 2
                else names.get(n, str(n))
            )
        )
    text = cells(letters, row["layout"])
    return text + (f" partial over {'+'.join(row['partial'])}" if row["partial"] else "")
