"""What of gradients takes room in programs without loops (costmodels.liveness)."""

from __future__ import annotations

import numpy as np

import models_zoo
from costmodels.liveness import WeightReaders, gradient_buffers
from costmodels.precision import load_recipe
from planner.analysis.passing import readers
from planner.reader import read_model

MIXED = load_recipe("bf16-mixed", "adamw", True)
WHOLE, PIECE = np.array([8.0, 8.0]), np.array([2.0, 2.0])


def of(carried: bool) -> WeightReaders:
    """Two weights: one read by operator 3, one by 1 and 4, products both."""
    return WeightReaders(
        np.array([3, 1]),
        np.array([3, 4]),
        np.array([carried, False]),
        np.array([False, True]),
        np.array([True, False]),
    )


def test_a_carried_gradient_stays_whole_from_its_operator_on() -> None:
    plain, carried = (gradient_buffers(of(c), WHOLE, PIECE, MIXED, 1, 1) for c in (False, True))
    assert (
        plain.whole.tolist() == [0, 8]
        and plain.piece.tolist() == [2, 2]
        and plain.first.tolist() == [3, 1]
    )
    assert (
        carried.whole.tolist() == [8, 8]
        and carried.piece.tolist() == [0, 2]
        and carried.first.tolist() == [0, 1]
    )
    assert carried.last.tolist() == plain.last.tolist() == [3, 4]


def test_products_that_add_to_sums_have_no_whole_gradient() -> None:
    """The first weight's, of one product; the other's terms are added up first."""
    for micro, whole in ((1, [8, 8]), (2, [0, 8])):
        gradients = gradient_buffers(of(False), WHOLE, PIECE, MIXED, 3, micro, adds=True)
        assert gradients.whole.tolist() == whole


def test_products_behind_the_blocks_add_to_no_sums() -> None:
    """All their gradients are made before one is used, so that each has room of its own."""
    graph = read_model(models_zoo.build("zoo:gpt-tiny,layers=1"), batch=8)
    products = [[i] for i, node in enumerate(graph.nodes) if node.op == "MatMul"]
    head = products[-1][0]
    assert readers(graph, products).of_product.all()
    assert readers(graph, products, head).of_product.tolist() == [i < head for (i,) in products]


def test_sums_of_microbatches_and_level_three_are_as_without_a_loop() -> None:
    for zero, micro in ((1, 2), (3, 1)):
        plain, carried = (
            gradient_buffers(of(c), WHOLE, PIECE, MIXED, zero, micro) for c in (False, True)
        )
        assert all(
            np.array_equal(getattr(plain, k), getattr(carried, k))
            for k in ("first", "last", "whole", "piece")
        )


def test_stacks_of_experts_are_carried() -> None:
    graph = read_model(models_zoo.build("zoo:mixtral-tiny,layers=1"), batch=8)
    found = readers(graph, [[i] for i in range(len(graph.nodes))])
    assert [graph.nodes[i].op for i in np.flatnonzero(found.carried)] == ["RoutedExperts"]
    assert found.first.tolist() == found.last.tolist() == list(range(len(graph.nodes)))


def test_the_gradient_of_a_tied_table_takes_the_table_s_place() -> None:
    """A lookup's backward pass reads no table, so that the head is the last to read it; a bias that
    two sums read, or a weight of two products, is read again."""
    graph = read_model(models_zoo.build("zoo:gpt-tiny,layers=1,tied=1"), batch=8)
    uses: dict[str, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        for name in node.inputs:
            if name in graph.weights:
                uses.setdefault(name, []).append(i)
    (table,) = [own for own in uses.values() if len(own) > 1]
    products = [i for i, node in enumerate(graph.nodes) if node.op == "MatMul"][:2]
    found = readers(graph, [table, products])
    assert (
        graph.nodes[table[0]].op == "Gather"
        and found.first.tolist() == [table[0], products[0]]
        and found.reread.tolist() == [False, True]
    )
    assert gradient_buffers(found, WHOLE, PIECE, MIXED, 1, 1).whole.tolist() == [0, 8]
