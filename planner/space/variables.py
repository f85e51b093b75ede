"""What a space of plans is made of: decisions with their options, what each costs in seconds and
bytes, and what pairs of them cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from planner.analysis.facts import GraphFacts
from planner.pricing.gradient_sync import WeightCosts
from planner.pricing.pricer import Pricer
from planner.sharding.layout import Layout
from planner.sharding.rule import Split


@dataclass(frozen=True)
class OptionCosts(WeightCosts):
    """Seconds and bytes of options, those of their weights included. Of every array the last axis
    is the options; fields of weights have one of ZeRO stages before it."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    not_recomputed_s: np.ndarray
    """Of the forward pass, not run again where results of collectives are saved."""
    weights_apart_s: np.ndarray
    """Of the backward pass, gradients of weights that may be made apart from it."""
    handed_on_bytes: np.ndarray
    """What the backward pass hands on to these, of one node."""
    handed_on_bytes_remat: np.ndarray
    """The same when repeated blocks are recomputed, and operands are handed on too: those of
    several products in equal parts."""
    saved_bytes: np.ndarray
    """Activations the backward pass reads, of all nodes that decide alike but those of the
    epilogue."""
    saved_bytes_remat: np.ndarray
    """The same when repeated blocks are recomputed."""
    saved_bytes_one_repeat: np.ndarray
    """What of that is made in one repeat and alive while its backward pass runs."""
    saved_bytes_epilogue: np.ndarray
    """Activations saved by nodes after the repeated blocks."""
    stacked_bytes: np.ndarray
    """What of `saved_bytes` loops over blocks put into stacks, without what an allocator leaves
    unused."""
    stacked_bytes_remat: np.ndarray
    """The same when repeated blocks are recomputed."""
    saved_collective_bytes: np.ndarray
    """What recomputed blocks save beside `saved_bytes_remat` at least, where they save results of
    collectives; of frameworks, which then count nothing that enters, the difference."""
    saved_input_bytes: np.ndarray
    """Of `saved_bytes` what inputs of the graph take. Of programs without a loop over blocks, as
    are the next two (costmodels.liveness); 0 elsewhere."""
    passing_bytes: np.ndarray
    """Results with a gradient; of a forward pass alone results but for the graph's."""
    postponed_bytes: np.ndarray
    """Operands and results of products with a weight that has a gradient."""
    workspace_bytes: np.ndarray
    """What lives only while one of the nodes runs."""
    workspace_without_weights_bytes: np.ndarray
    """The same where weights are gathered, which `state_bytes` has of a block."""
    workspace_apart_bytes: np.ndarray
    """What lives only while one of the nodes runs beside all that a repeat of its block has at
    once (planner.pricing.saved_activations.repeat_is_apart)."""
    workspace_apart_without_weights_bytes: np.ndarray
    """The same where weights are gathered."""
    max_batch_pieces: np.ndarray
    """Into how many pieces the graph's batch may be cut and leave a row for every device of the
    split."""

    def take(self, options: np.ndarray) -> Self:
        """The costs of some of the options, by number."""
        return type(self)(**{f: getattr(self, f).take(options, axis=-1) for f in OPTION_FIELDS})

    @classmethod
    def joined(cls, costs: Iterable[OptionCosts]) -> OptionCosts:
        """The options of several, one behind the other."""
        costs = tuple(costs)
        return OptionCosts(
            **{f: np.concatenate([getattr(c, f) for c in costs], axis=-1) for f in OPTION_FIELDS}
        )

    @classmethod
    def of_layouts(
        cls, weights: WeightCosts, forward_s: np.ndarray, backward_s: np.ndarray
    ) -> Self:
        """The costs of ways to bring a tensor to other layouts: seconds, and costs of a weight that
        lies so; nothing of them is run again, saved, or a piece of the batch."""
        zeros = np.zeros(len(forward_s))
        fields = dict.fromkeys(OPTION_FIELDS, zeros) | vars(weights)
        fields |= {"forward_s": forward_s, "backward_s": backward_s, "not_recomputed_s": forward_s}
        return cls(**fields | {"max_batch_pieces": np.full(len(forward_s), np.inf)})


OPTION_FIELDS = tuple(f.name for f in fields(OptionCosts))


@dataclass
class Variable:
    """One decision: its options with their costs. kind: op | shared_layout | weight
    (planner.space.build); count: nodes, or tensors, that decide so."""

    name: str
    kind: str
    count: int
    costs: OptionCosts
    node: int = -1
    splits: tuple[Split, ...] = ()
    layouts: tuple[tuple[Layout, Layout | None], ...] = ()
    flops: float = 0.0

    @property
    def options(self) -> int:
        """How many there are."""
        return len(self.costs.forward_s)


@dataclass
class Link:
    """Reshard seconds between two variables: tables [options of a, options of b], times `count`.
    name: the first of the tensors that are resharded; share: the part of one that a device has at
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
