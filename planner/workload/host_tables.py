"""Embedding tables in the memory of hosts or of parameter servers, instead of on the devices:
which, what a step moves, and what that takes.

A table of R rows of D floats is read by row numbers ("ids") that are inputs of the model, and by
nothing else. A step reads at most U = min(R, ids of the batch) of its rows. Hosted are tables with
U < R: the devices hold a piece of U rows, ids become places in it, and all else is planned as for a
table of U rows. Around the step

    pull     U rows with their optimizer state come to the devices in the layout of the piece
    push     the updated rows go back to where they came from; rows that the step did not read stay
             as they were (with moments and decay a lazy optimizer)

With T bytes of these rows of all tables, of which a node's devices need I <= T and one device L,
each way takes the sum of

    gathering    I / HOST_ROWS_BYTES_PER_S                     host: every host serves 1/H of what H
                 nodes need;   server: I H / S on each of S servers
    network      I (H - 1)/H / node's rate                     server: I max(1, H / S) / node's
                 rate, and one more latency
    host link    L / host_bytes_per_s

one after the other and before or after the step: nothing is prefetched, since the next step's rows
are those that this one updates. S = H here: as many servers as nodes.
"""

from __future__ import annotations

from dataclasses import replace

from planner.errors import PlanError
from planner.graph.ir import Graph, HostTable
from planner.ops import operator_of

PLACES = ("device", "host", "server")
WORTH = 0.5
"""Share of a model's parameters in such tables from which on hosting them is looked at."""


def candidates(graph: Graph, microbatches: int = 1, place: str = "host") -> dict[str, HostTable]:
    """weight -> table, of those that a step of so many of the graph's batches does not read
    whole."""
    tables = {}
    for name in graph.weights:
        uses = graph.consumers.get(name, ())
        t = graph.tensors[name]
        if len(t.shape) != 2 or not t.is_float or name not in graph.trainable or not uses:
            continue
        nodes = [
            graph.nodes[i]
            for i, slot in uses
            if slot == 0
            and operator_of(graph.nodes[i].op).kind == "lookup"
            and graph.nodes[i].attrs.get("axis") == 0
        ]
        ids = tuple(dict.fromkeys(n.inputs[1] for n in nodes))
        if len(nodes) < len(uses) or any(
            i not in graph.inputs or len(graph.consumers[i]) > sum(n.inputs[1] == i for n in nodes)
            for i in ids
        ):
            continue
        if microbatches * sum(graph.tensors[i].elements for i in ids) < t.shape[0]:
            tables[name] = HostTable(t.shape[0], ids, place)
    return tables


def with_host_tables(graph: Graph, microbatches: int, place: str) -> Graph:
    """The graph with pieces in place of tables, whose rows lie at a place. Raises PlanError P029
    when there is none to host."""
    tables = candidates(graph, microbatches, place)
    if not tables:
        raise PlanError(
            "P029",
            "no table to keep on hosts: none is read by the ids of an input alone, with more rows"
            " than a batch has ids",
            help=[
                "--tables device",
                "export with the ids of each table as an input, where one input holds those of all",
            ],
        )
    pieces = {
        n: microbatches * sum(graph.tensors[i].elements for i in h.ids) for n, h in tables.items()
    }
    tensors = {
        n: replace(t, shape=(pieces[n], t.shape[1])) if n in tables else t
        for n, t in graph.tensors.items()
    }
    return replace(graph, tensors=tensors, host_tables=tables)


def worth(graph: Graph) -> bool:
    """Whether tables that could be hosted make up most of a model."""
    return sum(graph.tensors[n].elements for n in candidates(graph)) > WORTH * graph.parameters
