"""Memory of a program without loops, at the backward pass of each operator: what of a step's memory is there at the same time.

Operators i = 0 .. n - 1 run forward, then backward from n - 1 down to 0. While i runs backward, a device holds

    activations   what the backward passes of operators 0 .. i read, and the batch
    gradients     of weights that i, or both an earlier and a later operator, read: whole, as the terms are added up;
                  of weights that only later operators read: the piece that an optimizer level left, which waits to be collected again
    temporary     gradients of results that pass by operator i (a residual stream), and the working set of i (planner.kernels)

and the peak is the largest sum. Parameters and optimizer state are there all the time. A program with a loop over its blocks is another matter: there the stacked gradients
of all blocks and their stacked activations are whole as long as the loop runs (planner.evaluate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from planner.base import Base


@dataclass(frozen=True)
class Walk:
    """Bytes at the backward pass of every operator. [nodes] each"""

    gradients: np.ndarray
    activations: np.ndarray
    temporary: np.ndarray

    @property
    def at(self) -> int:
        """The operator of the peak; of several the one whose backward pass comes first."""
        total = self.gradients + self.activations + self.temporary
        return len(total) - 1 - int(np.argmax(total[::-1]))

    @property
    def peak(self) -> float:
        """Bytes of the peak."""
        return float(self.gradients[self.at] + self.activations[self.at] + self.temporary[self.at])


@dataclass(frozen=True)
class Passing:
    """Gradients of results that pass by operators. maker: node of each; first, last: the operators they pass by; readers: (row, node) of those in
    between that read the result, where the working set has its gradient already."""

    maker: np.ndarray
    first: np.ndarray
    last: np.ndarray
    readers: tuple[np.ndarray, np.ndarray]


def find_passing(base: Base) -> Passing:
    """What `Base.passing` holds."""
    graph = base.graph
    rows, rows_of, nodes = list[tuple[int, int, int]](), list[int](), list[int]()
    for i, node in enumerate(graph.nodes):
        read = {j for name in node.outputs if name in base.grad for j, _ in graph.consumers.get(name, ())}
        if read and max(read) > i + 1:
            inside = sorted(j for j in read if j < max(read))
            rows_of += [len(rows)] * len(inside)
            nodes += inside
            rows.append((i, i + 1, max(read) - 1))
    maker, first, last = (np.array([row[k] for row in rows], np.int64) for k in range(3))
    return Passing(maker, first, last, (np.array(rows_of, np.int64), np.array(nodes, np.int64)))


def between(n: int, first: np.ndarray, last: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The sum of sizes over the rows with first <= i <= last, for each i. [n]"""
    change = np.zeros(n + 1)
    np.add.at(change, first, sizes)
    np.add.at(change, last + 1, -sizes)
    summed: np.ndarray = np.cumsum(change)[:n]
    return summed


def walk(passing: Passing, kept: np.ndarray, made: np.ndarray, work: np.ndarray, weights: Sequence[np.ndarray], waits: np.ndarray, batch: float = 0.0) -> Walk:
    """kept, made, work [nodes]: bytes of activations by the first operator that reads them, of results, of working sets. weights: first and last operator
    that reads each weight with a gradient, bytes of the whole gradient and of the piece that is left of it. batch: bytes of kept inputs of the graph,
    part of `kept`'s sum for no operator."""
    n = len(kept)
    first, last, whole, piece = weights
    passes = made[passing.maker]
    beside = between(n, passing.first, passing.last, passes)
    np.subtract.at(beside, passing.readers[1], passes[passing.readers[0]])
    gradients = between(n, first, last, whole) + between(n, np.zeros_like(first), first, piece)
    later = np.append(np.maximum.accumulate(waits[:0:-1])[::-1], 0.0)
    return Walk(gradients, np.cumsum(kept) + batch, np.maximum(beside, 0.0) + later + work)
