"""What recomputation by name costs every option of a space: what runs again, and what named values
take (planner.execution.save_policies).

Which nodes run again does not depend on layouts. What a value takes does: it is saved as its node
leaves it. Of pending sums what their reduction leaves is saved, which no option of one variable
tells: an even share is counted, so that a space's costs are at most those of the whole plan.
Of values that wait in the host's memory those on their way are on the device, and the host's link
carries all of them out and in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

import numpy as np

from planner.analysis.recompute_demand import Demand, demand_of
from planner.execution.block_values import block_values
from planner.execution.save_policies import offloaded_values, saved_names
from planner.ops import operator_of
from planner.pricing.kernels import named_beside
from planner.pricing.loop_copies import copied
from planner.pricing.saved_activations import PARKED_ARRAYS
from planner.sharding.layout import local_shape
from planner.sharding.rule import Split
from planner.space.variables import Space


@dataclass(frozen=True)
class PolicyCosts:
    """recompute_s: seconds of one node that run again [options]. saved_bytes: of named values that
    are saved on the device, in all repeats, without what an allocator leaves unused; sent_bytes: of
    those that wait in the host's memory; on_way_bytes: of the latter what is on the device at a
    time; copied_bytes: of saved_bytes what is copied into stacks and out of them [options]."""

    demand: Demand
    recompute_s: np.ndarray
    saved_bytes: np.ndarray
    sent_bytes: np.ndarray
    on_way_bytes: np.ndarray
    copied_bytes: np.ndarray


def policy_costs(space: Space, recompute: str) -> PolicyCosts:
    """The costs of a policy, kept in the space's memo."""
    key = "policy", recompute
    if key not in space.memo:
        space.memo[key] = _costs(space, recompute)
    costs: PolicyCosts = space.memo[key]
    return costs


def _costs(space: Space, recompute: str) -> PolicyCosts:
    base, names = space.base, frozenset(saved_names(recompute))
    offloaded, values = offloaded_values(recompute), block_values(base.graph, base.loops)
    demand = demand_of(base, frozenset(t for t, name in values.items() if name in names))
    recompute_s, saved_bytes, sent_bytes, on_way_bytes, copied_bytes = (
        [np.zeros(v.options) for v in space.variables] for _ in range(5)
    )
    recomputed = Counter(base.shared[i] for i in demand.recomputed)
    for k, v in enumerate(space.variables):
        if v.kind == "op" and v.node in recomputed:
            recompute_s[k] = v.costs.forward_s * (recomputed[v.node] / v.count)
    for tensor, repeats in demand.asked_for.items():
        k = space.op_of[base.shared[base.graph.producer[tensor]]]
        value_bytes = bytes_of_value(space, tensor, k)
        if values[tensor] not in offloaded:
            saved_bytes[k] = saved_bytes[k] + repeats * value_bytes
            copied_bytes[k] = copied_bytes[k] + repeats * value_bytes * copied(
                base, tensor, space.pricer
            )
            continue
        sent_bytes[k] = sent_bytes[k] + repeats * value_bytes
        if len(base.loops) == 1:  # of several blocks those of the largest are, whichever that is
            on_way_bytes[k] = on_way_bytes[k] + PARKED_ARRAYS * value_bytes
    return PolicyCosts(
        demand,
        *map(np.concatenate, (recompute_s, saved_bytes, sent_bytes, on_way_bytes, copied_bytes)),
    )


def bytes_of_value(space: Space, tensor: str, k: int) -> np.ndarray:
    """Bytes of a device of a tensor under each option of its variable, at least. [options]"""
    base, mesh = space.base, space.pricer.sizes
    i, value = base.graph.producer[tensor], base.graph.tensors[tensor]
    slot = [o for o in base.graph.nodes[i].outputs if o].index(tensor)
    itemsize, order, rule = space.pricer.itemsize(value.dtype), tuple(mesh), base.rules[i]
    names_itself = operator_of(base.graph.nodes[i].op).names_itself

    def saved_under(split: Split) -> float:
        layout = rule.result(slot, split, order)
        if not names_itself and any(inner.axes(split, order) for inner in rule.inner):
            return 0.0  # its backward pass needs more: it is not saved
        if layout.partial:
            return value.elements * itemsize / prod(mesh.values())
        named_too = named_beside(base, i, split, space.pricer)
        shape = local_shape(value.shape, layout, mesh)
        return space.pricer.stored_bytes(shape, value.dtype, base.kind_of(value.shape)) + named_too

    return np.array([saved_under(split) for split in space.variables[k].splits])
