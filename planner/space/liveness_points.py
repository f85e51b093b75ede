"""What of a space's bytes is on a device at some points of a step and not at others, as
planner.pricing.peak_memory has it of one plan. zero, micro: ZeRO stage and microbatches."""

from __future__ import annotations

import numpy as np

from costmodels.liveness import OperatorBytes, backward_liveness, gradient_buffers, passing_bytes
from planner.pricing.outside_gradients import outside_gradient
from planner.pricing.workspaces import GATHERED_BLOCKS, gathered_blocks, scatters_later
from planner.space.option_arrays import TrainedVariables, arrays_of
from planner.space.variables import Space


def outside_gradients(space: Space, zero: int, micro: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of gradients that have no room while the blocks run backward, and those of them that
    have it later (planner.pricing.outside_gradients). [options] each"""
    key = "outside gradients", zero, micro <= 1
    if key not in space.memo:
        arrays, sizes = arrays_of(space), [v.options for v in space.variables]
        of_variables = [
            outside_gradient(space.base, space.pricer, v.node, zero, micro) for v in space.variables
        ]
        absent, waits, made_later = (
            np.repeat([getattr(one, what) for one in of_variables], sizes)
            for what in ("absent", "waits", "made_later")
        )
        gradients, remaining = arrays.outside_grad_bytes[zero], arrays.outside_remaining_bytes[zero]
        space.memo[key] = absent * gradients - waits * remaining, made_later * gradients
    result: tuple[np.ndarray, np.ndarray] = space.memo[key]
    return result


def gathered_beside(space: Space, zero: int, recompute: str) -> np.ndarray | float:
    """Bytes that stage 3 gathers of blocks beyond what their weights cost says, and gradients that
    are not scattered yet (planner.pricing.peak_memory). [options]"""
    if zero < 3 or space.pricer.runtime.kernels is not None:
        return 0.0
    factor = gathered_blocks(space.base, space.pricer) / GATHERED_BLOCKS - 1
    factor += scatters_later(space.base, space.pricer, recompute)
    return factor * arrays_of(space).gathered_bytes


def beside_sums(space: Space, zero: int, micro: int) -> np.ndarray | float:
    """Bytes of a microbatch's gradients of blocks that lie beside their sums over microbatches
    under stage 3. [options]"""
    pricer = space.pricer
    if zero < 3 or micro <= 1 or pricer.mesh.stages > 1 or pricer.runtime.kernels is not None:
        return 0.0
    return arrays_of(space).block_grad_bytes[zero]


def only_in_blocks(
    space: Space, zero: int, micro: int, recompute: str, repeats: float
) -> np.ndarray:
    """Bytes that are there while the blocks run backward and not while what follows them does:
    their gradients, what is gathered of them, and what one repeat has at once (of so many repeats).
    All of them: a device of a pipeline has its share. [options]"""
    arrays, stages = arrays_of(space), space.pricer.mesh.stages
    result = arrays.block_grad_bytes[zero] * (zero < 3 or (micro <= 1 and stages == 1))
    result = result + beside_sums(space, zero, micro)
    if zero == 3 and stages == 1:
        result = result + arrays.gathered_bytes + gathered_beside(space, zero, recompute)
    if repeats and stages == 1:
        result = result + repeats * arrays.one_repeat_bytes
    return result


def gone_before(space: Space, saved: np.ndarray, one_repeat: np.ndarray) -> np.ndarray:
    """How much less of activations there is in each turn of the backward pass than when it enters
    the last repeated blocks (GraphFacts.turns). [turns]

    saved: of every variable, of the last blocks with what one repeat has at once; one_repeat: that
    of every variable, of whatever blocks. [variables] each"""
    base, turn = space.base, arrays_of(space).turn
    if not base.training or space.pricer.mesh.stages > 1:
        return np.zeros(base.last_run + 2)
    kept, own_bytes = (
        np.bincount(turn, of_options, minlength=base.last_run + 2)
        for of_options in (saved, one_repeat)
    )
    own_bytes[base.last_run] = 0.0
    gone: np.ndarray = kept[: base.last_run + 1].sum() - np.cumsum(kept) - own_bytes
    return gone


def above_saved(
    space: Space,
    zero: int,
    micro: int,
    choice: np.ndarray,
    pieces: float,
    trained: TrainedVariables,
) -> float:
    """Bytes at the peak of a program without a loop over blocks, above the activations that are
    saved."""
    arrays = arrays_of(space)
    chosen = arrays.first + choice
    costs = arrays.costs.take(chosen[[v.kind == "op" for v in space.variables]])
    whole, remaining = (
        part[zero, chosen[trained.rows]]
        for part in (arrays.costs.grad_buffer_bytes, arrays.costs.grad_remaining_bytes)
    )
    inputs, saved = costs.saved_input_bytes / pieces, costs.saved_bytes / pieces
    input_bytes = float(inputs.sum())
    live = backward_liveness(
        space.base.passing,
        OperatorBytes(
            saved - inputs,
            costs.passing_bytes / pieces,
            costs.workspace_bytes / pieces,
            costs.postponed_bytes / pieces,
        ),
        gradient_buffers(
            trained.read,
            whole,
            remaining,
            space.pricer.recipe,
            zero,
            micro,
            space.pricer.topology.device.kind == "gpu",
        ),
        input_bytes,
    )
    return live.peak - input_bytes - float((saved - inputs).sum())


def variables_of_nodes(space: Space) -> np.ndarray:
    """The variable that decides each node of the graph. [nodes]"""
    key = "variables of nodes"
    if key not in space.memo:
        rows = {v.node: k for k, v in enumerate(space.variables) if v.kind == "op"}
        space.memo[key] = np.array([rows[i] for i in space.base.shared], np.int64)
    result: np.ndarray = space.memo[key]
    return result


def forward_bytes(space: Space, choice: np.ndarray) -> float:
    """The most bytes that a forward pass alone has beside weights and the graph's results."""
    arrays = arrays_of(space)
    chosen = (arrays.first + choice)[variables_of_nodes(space)]
    passing = passing_bytes(space.base.passing, arrays.costs.passing_bytes[chosen])
    return float((passing + arrays.workspace[False, False][chosen]).max(initial=0.0))
