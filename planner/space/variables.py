"""What a space of plans is made of: decisions with their options, what each costs in seconds and
bytes, and what pairs of them cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.analysis.facts import GraphFacts
from planner.pricing.pricer import Pricer
from planner.sharding.layout import Layout
from planner.sharding.rule import Split


@dataclass
class Variable:
    """One decision: its options with their costs in seconds and bytes (arrays over options)."""

    name: str
    kind: str
    count: int
    node: int = -1
    splits: tuple[Split, ...] = ()
    layouts: tuple[tuple[Layout, Layout | None], ...] = ()
    forward_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    backward_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    not_recomputed_s: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # of the forward pass, not run again where results of collectives are kept
    grad_reduce_per_step_s: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> seconds once per optimizer step
    grad_reduce_per_microbatch_s: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> seconds per microbatch
    grad_accumulate_s: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> seconds per microbatch, of several, to add up gradients
    state_bytes: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> parameters + gradients + optimizer
    saved_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # activations the backward pass reads, of all its nodes
    saved_bytes_remat: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # the same when repeated blocks are recomputed
    saved_collective_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # what such blocks keep beside it at least, where they keep results of collectives
    saved_bytes_one_repeat: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # what of that is made in one repeat and alive while its backward pass runs
    pieces: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # into how many the graph's batch may be cut on and leave a row for every device of the split
    workspace_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # what lives only while one of its nodes runs
    grad_accumulator_bytes: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> sums of gradients that microbatches add up
    saved_bytes_epilogue: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # activations kept by nodes after the repeated blocks
    block_grad_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # gradients of one node of a repeated block: not there before its backward pass
    liveness_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros((0, 4))
        # [options, 4] as in costmodels.liveness: kept inputs of the graph, kept
        # results, made, waits
    )
    grad_buffer_bytes: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> [options, 2] the whole gradient of its weights, and the piece left of it
    workspace_without_weights_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # workspace_bytes where weights are gathered, which state_bytes has of a block
    flops: float = 0.0


@dataclass
class Link:
    """Conversion seconds between two variables: tables [options of a, options of b], times `count`.
    name: the first of the tensors that are converted; share: the part of one that a device has at
    least in the layout of each option of b."""

    a: int
    b: int
    forward_s: np.ndarray
    backward_s: np.ndarray
    count: int
    name: str
    share: np.ndarray


@dataclass
class Space:
    """All variables and links of one mesh."""

    base: GraphFacts
    pricer: Pricer
    variables: list[Variable]
    links: list[Link]
    op_of: Mapping[int, int]  # node class -> variable
    parts: int = 1
    """Microbatches of the batch, one of which the base's graph is."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What planner.space.assemble derives once per space."""
