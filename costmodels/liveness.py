"""Memory of a program without loops at the backward pass of each operator: which of a step's bytes
are live at the same time.

Operators i = 0 .. n - 1 run forward, then backward from n - 1 down to 0. While i runs backward, a
device holds

    activations   what the backward passes of operators 0 .. i read, and the batch; where compilers
                  put off the gradients of all weights of blocks to the end, also operands and
                  results' gradients of the blocks' products behind i
    gradients     of weights that both an operator up to i and one from i on read: whole, as the
                  terms are added up; of weights that only operators from i on read: the piece that
                  the ZeRO stage leaves, which waits for the optimizer or to be gathered again
    temporary     gradients of results that pass by operator i (a residual stream), the workspace of
                  i (planner.pricing.kernels), and the operand and the result's gradient of one
                  product behind i whose weight's gradient has been postponed: compilers do so to
                  hide collectives (not of products behind the repeated blocks, of which a program
                  makes all gradients at once)

and the peak is the largest sum. Parameters and optimizer state are live all the time.

Below ZeRO stage 3 and with one microbatch a weight's whole gradient needs no room of its own where
the optimizer updates a master copy: by then the weight has been read for the last time, and its
gradient takes the place that the new weight will be written to. So does that of a tied table, whose
lookup reads no weight in its backward pass and adds to what is there. It does need room where
another operator reads the weight further on, where the weight is its own master, or where
microbatches are added up (their sums are live all the time). Gradients of stacks of experts do too:
a loop over the experts carries them, and compilers reduce them at the very end.

A program with a loop over its blocks is another matter: there the stacked gradients of all blocks
and their stacked activations are whole as long as the loop runs (planner.pricing.peak_memory).
Gradients of weights outside the loop lie in the places of their weights as they do here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.precision import Recipe


@dataclass(frozen=True)
class PassingGradients:
    """Gradients of results that pass by operators between the last reader of a result and its
    maker.

    maker: node of each. [gradients]. first, last: the operators that it passes by. [gradients]
    each. readers: (row, node) of those in between that read the result, whose workspace has its
    gradient already. [pairs] each
    """

    maker: np.ndarray
    first: np.ndarray
    last: np.ndarray
    readers: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class WeightReaders:
    """The readers of each weight with a gradient: the first and the last operator that reads it,
    whether a loop carries its gradient, whether an operator before the last one reads it in its
    backward pass, and whether one product alone reads it, whose kernel may add to the sums of
    microbatches. [weights] each"""

    first: np.ndarray
    last: np.ndarray
    carried: np.ndarray
    reread: np.ndarray
    of_product: np.ndarray


@dataclass(frozen=True)
class WeightGradients:
    """The gradient of each weight that has one: first and last operator that reads it, and bytes of
    its whole gradient and of the piece that the ZeRO stage leaves of it; 0 where they take no room
    of their own (`gradient_buffers`). [weights] each"""

    first: np.ndarray
    last: np.ndarray
    whole: np.ndarray
    piece: np.ndarray


@dataclass(frozen=True)
class OperatorBytes:
    """Bytes by operator. [nodes] each. saved: activations that its backward pass is the first to
    read; results: results with a gradient; workspace: what lives only while it runs; postponed:
    operand and result of products with a weight that has a gradient, of which one at a time waits;
    waiting: of products that all wait."""

    saved: np.ndarray
    results: np.ndarray
    workspace: np.ndarray
    postponed: np.ndarray
    waiting: np.ndarray | float = 0.0


@dataclass(frozen=True)
class Liveness:
    """Bytes that are live at the backward pass of every operator. [nodes] each"""

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


def live_bytes(n: int, first: np.ndarray, last: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The sum of sizes over the rows with first <= i <= last, for each i below n. [n]"""
    change = np.zeros(n + 1)
    np.add.at(change, first, sizes)
    np.add.at(change, last + 1, -sizes)
    summed: np.ndarray = np.cumsum(change)[:n]
    return summed


def gradient_buffers(
    read: WeightReaders,
    whole: np.ndarray,
    piece: np.ndarray,
    recipe: Recipe,
    zero_stage: int,
    microbatches: int,
    adds: bool = False,
) -> WeightGradients:
    """What of gradients takes room beside parameters, state and the sums of microbatches (module
    docstring). whole, piece: bytes of each gradient and of what the ZeRO stage leaves of it.
    [weights] each. adds: whether kernels of products add to the sums of microbatches where these
    lie."""
    waits = read.carried & (zero_stage < 3) & (microbatches == 1)
    in_place = gradient_takes_its_weights_place(recipe, zero_stage, microbatches)
    own_room = read.reread | waits | (not in_place)
    own_room &= ~(read.of_product & (adds and microbatches > 1))
    pieces = np.where(waits, 0.0, piece) if microbatches == 1 else np.zeros_like(piece)
    return WeightGradients(
        np.where(waits, 0, read.first), read.last, np.where(own_room, whole, 0.0), pieces
    )


def backward_liveness(
    passing: PassingGradients,
    operators: OperatorBytes,
    weights: WeightGradients,
    always: float = 0.0,
) -> Liveness:
    """Live bytes of the backward pass, operator by operator. always: bytes of activations that stay
    for all of it (the batch), not part of `operators.saved`."""
    n = len(operators.saved)
    passing_by = passing_bytes(passing, operators.results)
    gradients = live_bytes(n, weights.first, weights.last, weights.whole) + live_bytes(
        n, np.zeros_like(weights.first), weights.first, weights.piece
    )
    postponed = np.append(np.maximum.accumulate(operators.postponed[:0:-1])[::-1], 0.0)
    waiting = np.broadcast_to(operators.waiting, n)
    kept = np.cumsum(operators.saved) + np.append(np.cumsum(waiting[:0:-1])[::-1], 0.0)
    return Liveness(gradients, kept + always, passing_by + postponed + operators.workspace)


def passing_bytes(passing: PassingGradients, results: np.ndarray) -> np.ndarray:
    """Bytes of what passes by each operator, of the bytes of every operator's results. [nodes]
    Results pass by the same operators in the forward pass as their gradients in the backward pass.
    """
    sizes = results[passing.maker]
    passing_by = live_bytes(len(results), passing.first, passing.last, sizes)
    np.subtract.at(passing_by, passing.readers[1], sizes[passing.readers[0]])
    return np.maximum(passing_by, 0.0)


def least_above_saved(workspace: np.ndarray, saved: np.ndarray) -> float:
    """The least bytes that the peak of any backward pass is above all that is saved. [nodes]:
    smallest workspace of each operator, most that it saves."""
    after = np.append(np.cumsum(saved[:0:-1])[::-1], 0.0)
    return max(0.0, float((workspace - after).max(initial=0.0)))


def temporary_bytes(
    workspace: float, epilogue: float, only_in_blocks: float, prologue: float = 0.0
) -> float:
    """Bytes that live only for a while at the point of most memory of a program with a loop over
    blocks, above all that is there while the blocks run backward.

    There are three: the backward pass of the blocks, with the largest workspace of an operator;
    that of what follows them, which saves activations of its own (epilogue: with its workspace),
    and has nothing of what is there for the blocks' backward pass alone (only_in_blocks: their
    gradients, one repeat's activations where they are made again or cut out of stacks at once,
    what is gathered of a block); and that of what is before them (prologue: gradients made there
    that have room of their own, above the activations that are gone by then)."""
    return max(workspace, epilogue - only_in_blocks, prologue)


def gradient_takes_its_weights_place(recipe: Recipe, zero_stage: int, microbatches: int) -> bool:
    """Whether a weight's whole gradient lies where the weight lay, once no operator reads that any
    more (module docstring). Where the loss is scaled a step may leave weights as they were."""
    replaced = recipe.master_bytes > 0 and not recipe.loss_scaled
    return zero_stage < 3 and microbatches <= 1 and replaced
