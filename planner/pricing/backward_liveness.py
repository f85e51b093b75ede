"""Memory of a program without loops, at the backward pass of each operator: what of a step's memory
is there at the same time.

Operators i = 0 .. n - 1 run forward, then backward from n - 1 down to 0. While i runs backward, a
device holds

    activations   what the backward passes of operators 0 .. i read, and the batch
    gradients     of weights that both an operator up to i and one from i on read: whole, as the
                  terms are added up; of weights that only operators from i on read: the piece that
                  an optimizer level left, which waits to be collected again
    temporary     gradients of results that pass by operator i (a residual stream), the working set
                  of i (planner.pricing.kernels), and the operand and the result's gradient of one
                  product behind i whose weight's gradient has been put off: compilers do so to hide
                  collectives

and the peak is the largest sum. Parameters and optimizer state are there all the time.

Below level 3 and with one microbatch a weight's whole gradient needs no room of its own where the
optimizer updates a master copy: by then the weight has been read for the last time, and its
gradient takes the place that the new weight will be written to. So does that of a tied table, whose
lookup reads no weight in its backward pass and adds to what is there. It does need room where
another operator reads the weight further on, where the weight is its own master, or where
microbatches are added up (their sums are there all the time). Gradients of stacks of experts do
too: a loop over the experts carries them, and compilers reduce them at the very end.

A program with a loop over its blocks is another matter: there the stacked gradients of all blocks
and their stacked activations are whole as long as the loop runs (planner.pricing.peak_memory).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.precision import Recipe
from planner.analysis.passing import Passing, Readers


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


def between(n: int, first: np.ndarray, last: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The sum of sizes over the rows with first <= i <= last, for each i. [n]"""
    change = np.zeros(n + 1)
    np.add.at(change, first, sizes)
    np.add.at(change, last + 1, -sizes)
    summed: np.ndarray = np.cumsum(change)[:n]
    return summed


@dataclass(frozen=True)
class Weights:
    """Of each weight with a gradient: first and last operator that reads it, and bytes of its whole
    gradient and of the piece that an optimizer level leaves of it. Whether they take room of their
    own: see `gradient_room`."""

    first: np.ndarray
    last: np.ndarray
    whole: np.ndarray
    piece: np.ndarray


def gradient_room(
    read: Readers,
    whole: np.ndarray,
    piece: np.ndarray,
    recipe: Recipe,
    zero: int,
    microbatches: int,
) -> Weights:
    """What of gradients takes room beside parameters, state and the sums of microbatches (module
    docstring)."""
    waits = read.carried & (zero < 3) & (microbatches == 1)
    beside = read.again | (zero == 3) | (microbatches > 1) | (recipe.master_bytes == 0) | waits
    pieces = np.where(waits, 0.0, piece) if microbatches == 1 else np.zeros_like(piece)
    return Weights(np.where(waits, 0, read.first), read.last, np.where(beside, whole, 0.0), pieces)


def left_bytes(recipe: Recipe, level: int) -> float:
    """Bytes an element of what is left of a reduced gradient until the end of the step: below level
    3 the new weight, waiting to be collected."""
    return 0.0 if level == 0 else recipe.gradient_bytes if level == 3 else recipe.parameter_bytes


@dataclass(frozen=True)
class Operators:
    """Bytes by operator. [nodes] each. kept: activations it is the first to read; made: results
    with a gradient; work: working set; waits: operand and result of products with a weight that has
    a gradient."""

    kept: np.ndarray
    made: np.ndarray
    work: np.ndarray
    waits: np.ndarray


def walk(passing: Passing, own: Operators, weights: Weights, always: float = 0.0) -> Walk:
    """The backward pass, operator by operator. always: bytes of activations that stay for all of it
    (the batch), not part of `own.kept`."""
    n = len(own.kept)
    passes = own.made[passing.maker]
    beside = between(n, passing.first, passing.last, passes)
    np.subtract.at(beside, passing.readers[1], passes[passing.readers[0]])
    gradients = between(n, weights.first, weights.last, weights.whole) + between(
        n, np.zeros_like(weights.first), weights.first, weights.piece
    )
    put_off = np.append(np.maximum.accumulate(own.waits[:0:-1])[::-1], 0.0)
    return Walk(
        gradients, np.cumsum(own.kept) + always, np.maximum(beside, 0.0) + put_off + own.work
    )


def work_above_kept(work: np.ndarray, kept: np.ndarray) -> float:
    """The least that any walk's peak is above all that is kept. [nodes]: smallest working set of
    each operator, most that it keeps."""
    after = np.append(np.cumsum(kept[:0:-1])[::-1], 0.0)
    return max(0.0, float((work - after).max(initial=0.0)))
