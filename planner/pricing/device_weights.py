"""What a device has of the weights of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from costmodels.trained_weight import TrainedWeight
from planner.execution.layout_flow import Flow, cut_layout
from planner.sharding.layout import local_shape


def device_weights(flow: Flow) -> Mapping[str, TrainedWeight[float]]:
    """Elements that a device has of every weight; of one without a gradient piece and whole are the
    same. Worked out once a flow."""
    if "device weights" not in flow.memo:
        flow.memo["device weights"] = _device_weights(flow)
    known: Mapping[str, TrainedWeight[float]] = flow.memo["device weights"]
    return known


def _device_weights(flow: Flow) -> dict[str, TrainedWeight[float]]:
    mesh, tensors = dict(flow.plan.mesh), flow.graph.tensors
    # Weights of repeats share one plan: by id, as plans take long to hash.
    known: dict[tuple[tuple[int, ...], int, bool], TrainedWeight[float]] = {}
    weights = {}
    for name, w in flow.weights.items():
        matrix = name in flow.graph.orthogonalised
        key = tensors[name].shape, id(w), matrix
        weight = known.get(key)
        if weight is None:
            whole, piece = (
                float(prod(local_shape(key[0], layout, mesh)))
                for layout in (w.layout, cut_layout(w))
            )
            zero_stage = w.zero_stage if w.zero_dim >= 0 else 0
            weight = TrainedWeight(whole, piece, zero_stage, piece * matrix)
            known[key] = weight
        weights[name] = weight
    return weights
