"""TODO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from planner.sharding.layout import STAGE, Axes, Layout
from planner.sharding.rule import Split


@dataclass(frozen=True)
class WeightPlan:
    """How a weight is kept: cut as `layout` says; `zero` is the optimizer-sharding level over
    `axes`, along dim `dim` (-1: none possible).

    fan: the axes over which its gradient is pending when the backward pass leaves it (axes of
    `zero` included).
    """

    layout: Layout
    zero: int = 0
    axes: Axes = ()
    dim: int = -1
    fan: Axes = ()


@dataclass(frozen=True)
class Plan:
    """Every decision an emitted program depends on. mesh: (axis, size) pairs, outermost first;
    splits by node id.

    runs: repeated blocks as (first node, nodes per block, repeats). recompute: "none", "block"
    (collectives replayed) or "block-keep" (collective results kept). microbatches:
    gradient-accumulation steps; the graph is that of one microbatch. schedule: "" or how
    microbatches pass through pipeline stages (planner.execution.pipeline); the mesh then has an
    axis "stage". virtual: chunks a stage holds. cuts: of unequal pipeline stages
    (planner.execution.uneven_pipeline) the first node of every chunk after the first. widths:
    places along the axis "stage" that each of them takes, () one each. offload: what waits in the
    host's memory between its uses, of OFFLOAD (planner.strategy.types). bucket_bytes: collectives
    of gradients and updated parameters travel together up to it (planner.pricing.bucketing); 0: as
    the compiler has them. copies: microbatches that run at the same time, the communication of one
    under the products of another (planner.pricing.microbatch_overlap); a divisor of their number.
    """

    mesh: tuple[tuple[str, int], ...]
    splits: Mapping[str, Split]
    zero: int = 0
    zero_axes: Axes = ()
    recompute: str = "none"
    microbatches: int = 1
    runs: tuple[tuple[int, int, int], ...] = ()
    weight_plans: Mapping[str, WeightPlan] = field(default_factory=dict)
    schedule: str = ""
    virtual: int = 1
    offload: tuple[str, ...] = ()
    cuts: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    bucket_bytes: int = 0
    copies: int = 1

    @property
    def stages(self) -> int:
        """Places of the mesh for pipeline stages, which take one each but for `widths`; 1 without a
        pipeline."""
        return dict(self.mesh).get(STAGE, 1) if self.schedule else 1

    @property
    def order(self) -> Axes:
        """Mesh axis names, outermost first."""
        return tuple(a for a, _ in self.mesh)

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return prod(n for _, n in self.mesh)

    @property
    def turns(self) -> int:
        """Turns of the loop over microbatches, each of `copies` microbatches."""
        return self.microbatches // self.copies
