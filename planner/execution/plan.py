"""A plan: every decision that the emitted program of a graph depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from planner.execution.save_policies import offloaded_values
from planner.sharding.layout import STAGE, Axes, Layout
from planner.sharding.rule import Split


@dataclass(frozen=True)
class WeightPlan:
    """How a weight is stored: cut as `layout` says.

    Its ZeRO stage cuts state (and at stage 3 the weight itself) over `zero_axes`, along dim
    `zero_dim` (-1: none possible). grad_partial: the axes over which its gradient is partial when
    the backward pass leaves it, those of `zero_axes` included.
    """

    layout: Layout
    zero_stage: int = 0
    zero_axes: Axes = ()
    zero_dim: int = -1
    grad_partial: Axes = ()


@dataclass(frozen=True, kw_only=True)
class StepTechniques:
    """What a plan decides once for the whole step: a field for each record of
    planner.execution.techniques, which say what it does. The defaults are those of a step that does
    nothing of the kind.

    zero_axes: mesh axes that ZeRO shards over. microbatches: gradient-accumulation steps. schedule:
    "" without pipeline stages. virtual_stages: parts of the model that each stage holds.
    stage_widths: places along the axis "stage" that each uneven stage takes, () for one each.
    overlapped_microbatches: microbatches that run at the same time, a divisor of `microbatches`.
    islands: how many of the microbatches each place along the axis "island" runs, () without.
    exchanges: whether kernels wait for experts' rows, or other microbatches' run beside them.
    blocks: whether the program loops over its repeated blocks, or has them written out.
    """

    zero_stage: int = 0
    zero_axes: Axes = ()
    recompute: str = "none"
    microbatches: int = 1
    schedule: str = ""
    virtual_stages: int = 1
    stage_widths: tuple[int, ...] = ()
    offload: tuple[str, ...] = ()
    bucket_bytes: int = 0
    overlapped_microbatches: int = 1
    islands: tuple[int, ...] = ()
    exchanges: str = "waiting"
    blocks: str = "looped"


@dataclass(frozen=True)
class Plan(StepTechniques):
    """Every decision that an emitted program depends on.

    mesh: (axis, size) pairs, outermost first; with a schedule it has an axis "stage". splits: by
    node id; nodes without one are whole on every device. repeated_blocks: (first node, nodes per
    block, repeats) of each; the graph is that of one microbatch. stage_cuts: the first node of
    every part after the first, where stages are uneven (planner.execution.uneven_pipeline).
    """

    mesh: tuple[tuple[str, int], ...]
    splits: Mapping[str, Split]
    repeated_blocks: tuple[tuple[int, int, int], ...] = ()
    weight_plans: Mapping[str, WeightPlan] = field(default_factory=dict)
    stage_cuts: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Places along the mesh axis "stage", 1 without a pipeline. A stage takes one, or as many
        as `stage_widths` says."""
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
    def in_host_memory(self) -> tuple[str, ...]:
        """What waits in the host's memory: what `offload` says, and values of blocks by name."""
        return (*self.offload, *offloaded_values(self.recompute))

    @property
    def device_microbatches(self) -> int:
        """Microbatches that a device runs: of islands, one of that with the most."""
        return max(self.islands, default=self.microbatches)

    @property
    def accumulation_steps(self) -> int:
        """Iterations of the loop over microbatches, each of `overlapped_microbatches`."""
        return self.device_microbatches // self.overlapped_microbatches
