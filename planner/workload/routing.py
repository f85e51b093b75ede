"""What a user says of a router: how its choices spread over experts, and how many rows an expert
takes.

--imbalance 1.4       rows of the busiest device over the mean
--imbalance FILE      counts of a router, a number for each expert in their order: a list in JSON,
                      or numbers parted by commas or lines
--capacity 1.25       an expert takes so many times the mean of a sample's rows, and the program
                      drops what is beyond

Both become attributes of the experts' nodes, which prices, memory and emission read.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

from costmodels.hardware.intake import read_bytes
from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.ops.expert_load import expert_nodes

Spread = float | tuple[int, ...]
"""Rows of the busiest device over the mean, or counts of a router."""
NOT_A_SPREAD = "neither a number of at least 1 nor a file of counts"


def spread_of(text: str | float | tuple[int, ...]) -> Spread:
    """The value of --imbalance. Raises PlanError P019 where it is none."""
    if not isinstance(text, str):
        return _checked(text if isinstance(text, tuple) else float(text), str(text))
    try:
        return _checked(float(text), text)
    except ValueError:
        return _checked(_counts(text), text)


def factor_of(text: str | float) -> float:
    """The value of --capacity. Raises PlanError P019 where it is none."""
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor < math.inf:
        raise PlanError(
            "P019",
            f"--capacity {text}: an expert takes at least the mean of the rows",
            help=["a factor such as 1.25; leave it out for programs that drop nothing"],
        )
    return factor


def _counts(path: str) -> tuple[int, ...]:
    """Numbers of a file."""
    try:
        text = read_bytes(Path(path)).decode()
        cells = json.loads(text) if text.lstrip()[:1] == "[" else re.split(r"[\s,;]+", text.strip())
        return tuple(_whole(cell) for cell in cells)
    except (OSError, ValueError, RecursionError) as e:
        raise PlanError(
            "P019",
            f"--imbalance {path}: {NOT_A_SPREAD}",
            detail=[str(e)],
            help=["1.25, or a JSON list or CSV of whole numbers, one for each expert"],
        ) from e


def _whole(cell: object) -> int:
    """A count, of text or as JSON has it. Raises ValueError for what is none."""
    number = int(cell) if isinstance(cell, str) else cell
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"{cell!r} is no whole number")
    return number


def _checked(spread: Spread, text: str) -> Spread:
    bad = (
        min(spread, default=-1) < 0 or not sum(spread)
        if isinstance(spread, tuple)
        else not 1 <= spread < math.inf
    )
    if bad:
        raise PlanError(
            "P019",
            f"--imbalance {text}: {NOT_A_SPREAD}",
            help=["1.25, or a JSON list or CSV of whole numbers, one for each expert"],
        )
    return spread


def with_routing(graph: Graph, spread: Spread | None, factor: float | None) -> Graph:
    """The graph whose experts know how they are chosen and what they take. Raises PlanError P019
    where there are no experts, or not as many as there are counts."""
    if spread is None and factor is None:
        return graph
    option = "--capacity" if factor is not None else "--imbalance"
    experts = dict(expert_nodes(graph))
    if not experts:
        raise PlanError(
            "P019",
            f"{option} is of routed experts, and the model has none",
            help=["plan ops MODEL lists its operators", f"leave {option} out"],
        )
    if isinstance(spread, tuple) and (other := {n for n in experts.values() if n != len(spread)}):
        raise PlanError(
            "P019",
            f"--imbalance has counts of {len(spread)} experts, the model has {min(other)}",
            help=["one count for each expert of a layer"],
        )
    if isinstance(spread, float):
        _refuse_more_than_all(graph, spread)
    routing_attrs = {
        key: value
        for key, value in (
            ("counts" if isinstance(spread, tuple) else "imbalance", spread),
            ("capacity", factor),
        )
        if value is not None
    }
    nodes = tuple(
        replace(node, attrs={**node.attrs, **routing_attrs}) if i in experts else node
        for i, node in enumerate(graph.nodes)
    )
    return replace(graph, nodes=nodes)


def _refuse_more_than_all(graph: Graph, spread: float) -> None:
    """Raises PlanError P019 for a spread that no router has: an expert is chosen by every token at
    most, and a token chooses several."""
    sizes = ((n, graph.tensors[graph.nodes[i].inputs[1]].shape[-1]) for i, n in expert_nodes(graph))
    experts, top = max(sizes, key=lambda size: size[0] / size[1])
    if spread > experts / top:
        raise PlanError(
            "P019",
            f"--imbalance {spread:g}: of {experts} experts, {top} a token, the busiest has at most"
            f" {experts / top:g} times the mean",
            help=[f"1 to {experts / top:g}"],
        )
