"""Parameters and forward FLOPs of a preset, by the planner's own count.

FLOPs are those of matrix products, convolutions and attention: multiply-adds times 2, all scores of
causal attention counted (the convention of the Megatron papers), one sample, forward. Nothing else
of a model weighs beside them. Layers are alike, so a model with many is counted from two small
ones:

    count(L) = count(a) + (L - a) / p (count(a + p) - count(a))
        a = 2 layers or more behind those that differ, p layers until the pattern begins anew

which is exact, and keeps the listing of all presets short.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from models_zoo.spec import Family, Preset, Value, make
from planner.graph.ir import Graph
from planner.ops.lookup import rule_of
from planner.reader import read_model


@dataclass(frozen=True)
class Count:
    """Of one sample. active: parameters that a token passes; score_flops: the part of `flops` that
    attention's scores and their use are; sample: its size in words."""

    parameters: int
    active: int
    flops: int
    score_flops: int
    sample: str


def count(family: Family, name: str, preset: Preset, values: dict[str, Value]) -> Count:
    """Count a preset with options (`values`, as parsed) applied. Raises PlanError as building
    does."""
    values = {k: v for k, v in values.items() if k not in ("batch", "weights", "seed")} | {
        "batch": 1
    }
    config = family.configure(preset, values)
    layers, first = getattr(config, "layers", 0), _first(config)
    period = _period(config)
    first += (layers - first) % period
    if layers <= first + period:
        measured, sample = _measure(make(family, name, preset, values))
    else:
        (a, sample), (b, _) = (
            _measure(make(family, name, preset, {**values, "layers": n}))
            for n in (first, first + period)
        )
        measured = tuple(
            x + (layers - first) // period * (y - x) for x, y in zip(a, b, strict=True)
        )
    return Count(
        measured[0], measured[0] - getattr(config, "idle", 0), measured[1], measured[2], sample
    )


def _first(config: Any) -> int:
    """Two layers behind those that differ from what follows."""
    return 2 + max(getattr(config, name, 0) for name in ("dense_layers", "window_from"))


def _period(config: Any) -> int:
    """After how many layers they are alike again."""
    names = ("full_every", "bare_every", "sparse_every")
    return math.lcm(*(getattr(config, name, 0) or 1 for name in (*names, "period")))


def _measure(model: Any) -> tuple[tuple[int, ...], str]:
    """(parameters, FLOPs, FLOPs of attention) of a model at batch 1, and its sample."""

    graph = read_model(model, batch=1)
    work = [(node.op, rule_of(node, graph)[0].flops) for node in graph.nodes]
    return (
        graph.parameters,
        int(sum(n for _, n in work)),
        int(sum(n for op, n in work if op == "Attention")),
    ), _sample(graph)


def _sample(graph: Graph) -> str:
    """`8,192 tokens`, `3x224x224`, `13 + 26 ids`; masks and lone numbers are not said."""
    parts, tokens, ids = [], [], 0
    for name in graph.inputs:
        t = graph.tensors[name]
        if "mask" in name or (t.is_float and len(t.shape) == 1):
            continue
        if len(t.shape) == 1:
            ids += 1
        elif t.is_float:
            parts.append("x".join(str(n) for n in (t.shape[1:] if t.shape[0] == 1 else t.shape)))
        else:
            tokens.append(f"{t.elements:,}")
    parts_text = [
        *parts,
        *([" + ".join(tokens) + " tokens"] if tokens else []),
        *([f"{ids} id" + "s" * (ids > 1)] if ids else []),
    ]
    return " + ".join(parts_text)


def as_json(name: str, family: Family, preset: Preset, counted: Count) -> dict[str, Any]:
    """A row of `python -m models_zoo --json`: FLOPs of one sample forward, exact."""
    return {
        "name": name,
        "family": family.name,
        **dataclasses.asdict(counted),
        "default_batch": preset.batch,
        "description": preset.description,
    }
