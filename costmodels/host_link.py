"""Bytes and seconds over the link between a device and its host's memory: weights, gradients and
optimizer state that are offloaded there, and rows of embedding tables that live there.

Offloaded weights. Of one weight of which a device stores s bytes, with a gradient of g bytes as its
backward pass leaves it, a as it is summed over m microbatches and r reduced, the link carries

    each microbatch   2 s + g                                  and of several 2 a + g more: the sum
                      and the new gradient here, the sum back
    once a step       a + r   where anything is left to reduce or to divide; r + s, and s more
                      without a master copy: the gradient and the old parameter here, the new one
                      back

A table that is brought once in a microbatch moves s instead of 2 s, and of several microbatches 2 a
instead of 2 a + 2 g (planner.execution.weight_offload says why).

Hosted tables. With T bytes of the rows that a step reads, of which a node's devices need I <= T and
one device L, pulling them takes the sum of these, one after the other, and pushing them back as
long:

    gathering    I / HOST_ROWS_BYTES_PER_S
    network      I (H - 1)/H / node's rate on H nodes; from servers I / node's rate; one latency
    host link    L / host_bytes_per_s

The rate of the link is the device file's `host.bandwidth`, that of rows in the host's memory a
guess; neither is compared with a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.hardware.device import Device
from costmodels.kernels import Amount
from costmodels.precision import Recipe
from costmodels.trained_weight import TrainedWeight

HOST_ROWS_BYTES_PER_S = 5e9
"""Rows of a few hundred bytes gathered from a host's memory, or scattered, by one process: a
guess."""
FLOAT_BYTES = 4


def host_link_s(device: Device, size_bytes: Amount) -> Amount:
    """Seconds of so many bytes on their way between a device and its host's memory."""
    return size_bytes / device.host_bytes_per_s


@dataclass(frozen=True)
class OffloadedBytes:
    """Bytes of one offloaded weight over the host's link of one device. each: in every microbatch;
    added: of several microbatches, for the sum of gradients, in each; once: in every step."""

    each: float
    added: float
    once: float


def offloaded_weight(
    weight: TrainedWeight[float], pending: bool, recipe: Recipe, times: int = 2
) -> OffloadedBytes:
    """What an offloaded weight moves that is brought so many times in a microbatch. pending:
    whether its gradient is to be reduced, or divided, after the last microbatch."""
    parameter, size = weight.stored * recipe.parameter_bytes, recipe.gradient_bytes
    gradient, summed, reduced = weight.stored * size, weight.summed * size, weight.piece * size
    once = (
        (summed + reduced if pending else 0.0)
        + reduced
        + parameter * (1 if recipe.master_bytes else 2)
    )
    return OffloadedBytes(
        times * parameter + gradient, 2 * summed + (gradient if times > 1 else -gradient), once
    )


def table_row_bytes(recipe: Recipe) -> float:
    """Bytes of an element of a hosted table's row: float32 with its optimizer state."""
    moments = (recipe.state_bytes - recipe.master_bytes) / recipe.moment_bytes
    return FLOAT_BYTES * (1 + moments)


def pull_push_s(
    device: Device, devices: int, total_bytes: float, local_bytes: float, from_servers: bool
) -> float:
    """Seconds that pulling and pushing rows of hosted tables add to a step, one after the other.

    total_bytes: of the rows that a step reads; local_bytes: of those that one device needs. An
    upper figure where every id of a batch is taken to be another row.
    """
    inside = min(device.node_size, devices)
    nodes = -(-devices // inside)
    into = min(total_bytes, local_bytes * inside)
    rate = device.outer.bandwidth_bytes_per_s * device.outer.efficiency * inside
    network = (
        into / rate + device.outer.latency_s
        if from_servers
        else into * (nodes - 1) / nodes / rate + device.outer.latency_s * (nodes > 1)
    )
    return 2 * (into / HOST_ROWS_BYTES_PER_S + network + host_link_s(device, local_bytes))
