"""Muon as a training framework runs it: whole parameters are shared out over the replicas, each of
which orthogonalises its own (Megatron-LM, core/optimizer/layer_wise_optimizer.py), and of a matrix
that tensor parallelism cuts every device takes its own block (`--muon-tp-mode blockwise`, the
default there). New parameters are gathered as a ZeRO stage has it; without one every replica does
all. That the parts of all replicas weigh the same is a guess, and so are other frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from planner.execution.layout_flow import Flow
from planner.execution.orthogonalising import Matrices
from planner.execution.plan import WeightPlan
from planner.sharding.layout import group, local_shape


def weight_flops(shape: tuple[int, ...], weight: WeightPlan, mesh: Mapping[str, int]) -> float:
    """FLOPs of a device's part of the products of a weight's matrices."""
    *before, rows, columns = local_shape(shape, weight.layout, mesh)
    blocks = Matrices(1, prod(before), (rows, columns), ((), ()), (1, 1))
    return blocks.flops / group(weight.zero_axes if weight.zero_stage else (), mesh)


def orthogonalising_flops(flow: Flow, name: str) -> float:
    """FLOPs of a device's part of the products of a weight, 0 of one that has none."""
    if name not in flow.graph.orthogonalised or name not in flow.grad:
        return 0.0
    shape = flow.graph.tensors[name].shape
    return weight_flops(shape, flow.weights[name], dict(flow.plan.mesh))
