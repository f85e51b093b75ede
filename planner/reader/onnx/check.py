"""Structural checks of graphs: every tensor written once, every use defined, no cycles.

onnx's own checker accepts cycles of names in some modes and rejects valid planning input (absent
external data, unused broken functions), so planning rests on these checks. Nodes may come in any
order; `order_nodes` sorts them stably.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import PlanError
from planner.graph.ir import WeightRef
from planner.reader.draft.shapes import Type
from planner.reader.onnx.file import check_model
from planner.reader.onnx.records import Records
from planner.reader.onnx.statement import Statement
from planner.reader.onnx.tables import Tables
from planner.reader.onnx.tensors import check_tensor


def order_nodes(protos: Iterable[Any], defined: set[str] | None, where: str) -> list[Statement]:
    """Nodes in dependency order, the given order where possible.

    `defined`: names known from outside (inputs, initializers); None when outer names may be used
    freely (branches: the lowering reports undefined names there). Raises PlanError for names
    written twice, undefined or cyclic.
    """
    nodes = [Statement.of(proto) for proto in protos]
    maker: dict[str, int] = {}
    for k, node in enumerate(nodes):
        for output in node.output:
            if not output:
                continue
            if output in maker:
                a, b = nodes[maker[output]], node
                raise PlanError(
                    "P110",
                    f"tensor {output!r} is written by two nodes of {where}",
                    detail=[describe(a), describe(b)],
                )
            if defined is not None and output in defined:
                raise PlanError(
                    "P110",
                    f"tensor {output!r} is an input or initializer of {where} and also written by a"
                    " node",
                    detail=[describe(node)],
                )
            maker[output] = k
    ordered = True
    needs: list[set[int]] = []
    for k, node in enumerate(nodes):
        need: set[int] = set()
        for name in _uses(node):
            producer = maker.get(name)
            if producer is not None:
                need.add(producer)
                ordered &= producer < k
            elif defined is not None and name not in defined and name in node.input:
                raise PlanError(
                    "P111",
                    f"tensor {name!r} is used but nothing makes it",
                    detail=[describe(node), f"in {where}"],
                    help=["export the model again; a part of its graph is missing"],
                )
        needs.append(need)
    return nodes if ordered else _sort(nodes, needs, where)


def _sort(nodes: Sequence[Statement], needs: list[set[int]], where: str) -> list[Statement]:
    users: list[list[int]] = [[] for _ in nodes]
    waiting = [len(need) for need in needs]
    for k, need in enumerate(needs):
        for producer in need:
            users[producer].append(k)
    ready = [k for k, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    done: list[Statement] = []
    while ready:
        k = heapq.heappop(ready)
        done.append(nodes[k])
        for user in users[k]:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, user)
    if len(done) < len(nodes):
        loop = [describe(nodes[k]) for k in _cycle(needs, waiting)]
        raise PlanError(
            "P112",
            f"nodes of {where} form a cycle",
            detail=loop[:8] + (["..."] if len(loop) > 8 else []),
        )
    return done


def _cycle(needs: list[set[int]], waiting: list[int]) -> list[int]:
    """One cycle among the nodes that never became ready, in the order they feed each other."""
    node = next(k for k, n in enumerate(waiting) if n)
    path: list[int] = []
    while node not in path:
        path.append(node)
        node = min(k for k in needs[node] if waiting[k])
    return path[path.index(node) :][::-1]


def _uses(node: Statement) -> Iterable[str]:
    """Names a node reads, those captured by its subgraphs included."""
    yield from (name for name in node.input if name)
    for _, _, attribute in node.attributes:
        if attribute.type == 5:
            yield from _captured(attribute.g)
        elif attribute.type == 10:
            for graph in attribute.graphs:
                yield from _captured(graph)


def _captured(graph: Any) -> Iterable[str]:
    """Names a subgraph takes from around it; its own may be called as others are."""
    defined = (
        {v.name for v in graph.input}
        | {t.name for t in graph.initializer}
        | {o for node in graph.node for o in node.output}
    )
    used = [name for node in graph.node for name in _uses(Statement.of(node))] + [
        o.name for o in graph.output
    ]
    yield from (name for name in used if name not in defined)


def describe(node: Statement) -> str:
    """A node in one line: its name or outputs, and operator."""
    name = (
        repr(node.name)
        if node.name
        else "unnamed, makes " + ", ".join(map(repr, list(node.output)[:3]))
    )
    return f"node {name[:120]} ({node.op_type[:60]})"


def check_graph(graph: Any) -> list[Statement]:
    """Checks the main graph and returns its nodes in dependency order. Raises PlanError."""
    defined: set[str] = set()
    for value in graph.input:
        if not value.name or value.name in defined:
            raise PlanError("P110", f"graph input {value.name!r} is listed twice or has no name")
        defined.add(value.name)
    initializers: set[str] = set()
    for tensor in [*graph.initializer, *(s.values for s in graph.sparse_initializer)]:
        if not tensor.name or tensor.name in initializers:
            raise PlanError("P110", f"initializer {tensor.name!r} is stored twice or has no name")
        initializers.add(tensor.name)
    defined |= initializers
    nodes = order_nodes(graph.node, defined, "the graph")
    if not nodes:
        raise PlanError("P114", "the graph has no nodes: there is nothing to plan")
    if not graph.output:
        raise PlanError("P114", "the graph has no outputs: there is nothing to compute")
    results = {o for node in nodes for o in node.output if o}
    seen: set[str] = set()
    for value in graph.output:
        if value.name not in results and value.name not in defined:
            raise PlanError("P113", f"graph output {value.name!r} is made by no node")
        if value.name in seen:
            raise PlanError("P110", f"graph output {value.name!r} is listed twice")
        seen.add(value.name)
    return nodes


@dataclass(frozen=True)
class Checked:
    """A ModelProto that was checked, and what of it is the same at every batch: its functions by
    (domain, name, overload), the nodes of its graph in dependency order, its initializers, and what
    opens their data."""

    model: Any
    functions: Mapping[tuple[str, str, str], Any]
    nodes: Sequence[Statement]
    initializers: Sequence[tuple[str, Type, WeightRef]]
    tables: Tables

    @classmethod
    def of(cls, model: Any, folder: Path | None) -> Checked:
        """folder: where its external data would be; None: nowhere. Raises PlanError."""
        check_model(model, model.graph.name or "model")
        functions, nodes = check_functions(model), check_graph(model.graph)
        tables, initializers = Tables(folder, Records.of(model.graph)), []
        for tensor in model.graph.initializer:
            type_, ref = check_tensor(tensor, tensor.name, folder)
            initializers.append((tensor.name, type_, tables.opened(tensor.name, type_, ref)))
        return cls(model, functions, nodes, initializers, tables)


MAX_INLINED = 250_000


def check_functions(model: Any) -> dict[tuple[str, str, str], Any]:
    """Model-local functions by (domain, name, overload), after counting what inlining all calls
    would give.

    The count runs once over the function DAG, never over the expansion: 2 kB of nested functions
    can mean 2^24 nodes. Functions that are never called are left alone, broken or not. Raises
    PlanError past MAX_INLINED nodes or on recursion.
    """
    table = {(f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions}
    if not table:
        return table
    counted: dict[tuple[str, str, str], int] = {}
    open_: set[tuple[str, str, str]] = set()

    def calls(nodes: Iterable[Any]) -> Iterable[tuple[str, str, str]]:
        for node in nodes:
            yield (node.domain, node.op_type, getattr(node, "overload", ""))
            for attribute in node.attribute:
                for graph in [attribute.g] if attribute.type == 5 else attribute.graphs:
                    yield from calls(graph.node)

    def total(nodes: Iterable[Any], depth: int) -> int:
        count = 0
        for key in calls(nodes):
            if key not in table:
                count += 1
                continue
            if key in open_:
                raise PlanError("P122", f"function {key[1]!r} calls itself")
            if depth > 400:
                raise PlanError("P121", "functions are nested deeper than 400")
            if key not in counted:
                open_.add(key)
                counted[key] = total(table[key].node, depth + 1)
                open_.discard(key)
            count += counted[key]
        return count

    nodes = total(model.graph.node, 0)
    if nodes > MAX_INLINED:
        raise PlanError(
            "P120",
            f"inlining the model's functions would give {nodes:,} nodes; the limit is"
            f" {MAX_INLINED:,}",
        )
    return table
