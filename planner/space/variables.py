"""What a space of plans is made of: decisions with their options, what each costs in seconds and
bytes, and what pairs of them cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.analysis.facts import Base
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
    spared_s: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # of the forward pass, not run again where results of collectives are kept
    reduce_s: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> seconds once per optimizer step
    each_s: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> seconds per microbatch
    sum_s: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> seconds per microbatch, of several, to add up gradients
    state_bytes: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> parameters + gradients + optimizer
    kept_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # activations the backward pass reads, of all its nodes
    again_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # the same when repeated blocks are recomputed
    collected_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # what such blocks keep beside it at least, where they keep results of collectives
    inner_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # what of that is made in one repeat and alive while its backward pass runs
    pieces: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # into how many the graph's batch may be cut on and leave a row for every device of the split
    work_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # what lives only while one of its nodes runs
    held_bytes: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> sums of gradients that microbatches add up
    tail_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # activations kept by nodes after the repeated blocks
    late_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # gradients of one node of a repeated block: not there before its backward pass
    moment_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros((0, 4))
        # [options, 4] as in planner.pricing.backward_liveness: kept inputs of the graph, kept
        # results, made, waits
    )
    room_bytes: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # zero level -> [options, 2] the whole gradient of its weights, and the piece left of it
    bare_bytes: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # work_bytes where weights are gathered, which state_bytes has of a block
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

    base: Base
    pricer: Pricer
    variables: list[Variable]
    links: list[Link]
    op_of: Mapping[int, int]  # node class -> variable
    parts: int = 1
    """Microbatches of the batch, one of which the base's graph is."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What planner.space.assemble derives once per space."""
