"""The fewest annotations from which propagation (planner.space.propagation) makes a plan: what a
person would have had to write by hand.

One annotation decides one class of nodes. A set of annotations S works when propagation from S
gives every class the split that the plan has. Wanted is the smallest S that works:

    every set M that fails, and fails whichever class is added to it, leaves a rest R(M) = classes -
    M that S has to meet in one place at least; S is the smallest set that meets every R found so
    far (a small integer program); when it fails too, it is grown until every class that is added
    would make it work, and its rest joins the others.

The last S works, as was seen by running it, and no smaller set meets all rests. That no smaller set
works follows where a set that works still does with more of the plan's own splits added, which
propagation does not promise where neighbours disagree; tests/whatif/test_annotations.py tries all
smaller sets of small models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from planner.analysis.facts import GraphFacts
from planner.execution.techniques import OF_PLANS
from planner.machine.topology import Mesh
from planner.pins.pins import Pins
from planner.sharding.layout import STAGE
from planner.sharding.rule import PENDING, Split
from planner.space.propagation import Spread
from planner.strategy.strategy import Strategy

Table = Mapping[str, Mapping[str, Mapping[str, list[str]]]]
"""Node id -> {"split": factor -> axes}, as in a file of pins."""


def fewest(base: GraphFacts, mesh: Mesh, splits: Mapping[int, Split]) -> Table:
    """Annotations that give each class of nodes (base.times) its split of `splits`, as few as can
    be and at least one. mesh: without stages."""
    spread = Spread(base, mesh)

    def wrong(chosen: Iterable[int]) -> list[int]:
        spread_splits = spread.run({c: (splits[c],) for c in chosen})
        return [c for c in base.times if spread_splits.get(c, Split()) != splits[c]]

    chosen_classes = _smallest(_by_preference(base), wrong) or [
        max(base.times, key=lambda c: base.rules[c].flops)
    ]
    tables = {c: _every_factor(base, c, splits[c]) for c in sorted(chosen_classes)}

    def written() -> Table:
        return {base.graph.nodes[c].id: {"split": table} for c, table in tables.items()}

    for c, table in tables.items():  # factors that stay whole are said only where they would be cut
        for f in [f for f, axes in table.items() if not axes]:
            tables[c] = {k: axes for k, axes in table.items() if k != f}
            propagated = spread.run(Pins(nodes=written()).allowed(base, dict(mesh.shape)))
            if any(propagated.get(k, Split()) != splits[k] for k in base.times):
                tables[c] = table
            table = tables[c]
    return written()


def _by_preference(base: GraphFacts) -> list[int]:
    """Classes, those first that people annotate: what reads parameters, then by work."""
    graph = base.graph
    return sorted(
        base.times,
        key=lambda c: (
            not any(n in graph.weights for n in graph.nodes[c].inputs),
            -base.rules[c].flops,
            c,
        ),
    )


def _smallest(classes: Sequence[int], wrong: Callable[[Iterable[int]], list[int]]) -> list[int]:
    """The smallest set of classes from which none is wrong: see the module's text."""
    rests: list[list[int]] = []
    while True:
        chosen = _meeting(classes, rests)
        missed = wrong(chosen)
        if not missed:
            return chosen
        failing = [c for c in classes if c not in missed]
        if not wrong(failing):
            failing = chosen
        for c in classes:
            if c not in failing and wrong([*failing, c]):
                failing = [*failing, c]
        rests.append([c for c in classes if c not in failing])


def _meeting(classes: Sequence[int], rests: Sequence[Sequence[int]]) -> list[int]:
    """The smallest set that has a class of every rest; of equal ones that of the classes named
    first."""
    if not rests:
        return []
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    among = [c for c in classes if any(c in rest for rest in rests)]
    table = np.array([[c in rest for c in among] for rest in rests], float)
    cost = 1 + np.arange(len(among)) / (1 + len(among)) ** 2
    solution = milp(
        cost,
        constraints=LinearConstraint(table, lb=1),
        integrality=np.ones(len(among)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    return [c for c, x in zip(among, solution.x, strict=True) if x > 0.5]


def _every_factor(base: GraphFacts, c: int, split: Split) -> dict[str, list[str]]:
    """A split with the factors that it leaves whole."""
    rule = base.rules[c]
    factors = [
        f
        for f in (*rule.factors, *rule.paired, *((PENDING,) if rule.linear else ()))
        if rule.sizes.get(f, 2) > 1
    ]
    return {**{f: [] for f in factors}, **split.as_dict()}


def pins_file(strategy: Strategy, nodes: Table) -> str:
    """A file of pins (TOML): the strategy's mesh on its levels, its techniques, and the
    annotations."""
    chosen, inner = strategy.chosen, {a: n for a, n in strategy.mesh_shape if a != STAGE}
    mesh = {
        a["name"]: {
            "size": a["size"],
            **(
                {"level": a["levels"][0] if len(a["levels"]) == 1 else list(a["levels"])}
                if a["levels"]
                else {}
            ),
        }
        for a in strategy.mesh
    }
    staged = len(inner) < len(mesh)
    chosen_pins = {
        t.name: t.in_pins(value)
        for t in OF_PLANS
        for value in [getattr(chosen, t.field)]
        if t.name != "zero_group"
        and ((t.structural and (staged or not t.staged)) or value != t.neutral)
    }
    # What every plan decides comes first.
    first = ("zero_stage", "recompute", "microbatches")
    techniques = {name: chosen_pins[name] for name in first} | chosen_pins
    if chosen.zero_stage and set(chosen.zero_axes) != set(inner):
        techniques["zero_group"] = prod(inner[a] for a in chosen.zero_axes)
    sections = [
        ("mesh", mesh),
        ("techniques", techniques),
        *((json.dumps(name), dict(table)) for name, table in nodes.items()),
    ]
    return "\n".join(
        f"[{head}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
        for head, table in sections
    )


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(
                f"{k if k.isidentifier() else json.dumps(k)} = {_toml(v)}" for k, v in value.items()
            )
            + " }"
            if value
            else "{}"
        )
    return json.dumps(value)
