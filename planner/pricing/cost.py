"""What a whole plan costs: the record that every search result, report and strategy file is filled
from. planner.pricing.add_up makes it of its parts; a saved plan is shown by it alone, so that this
file loads nothing that is slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from costmodels.capacity import Breakdown

OTHER_PARTS = {"tables_time_s": "tables pulled and pushed", "loop_copy_time_s": "copies of loops"}
"""Parts of a step beside arithmetic, communication, the optimizer and bubbles: field of Cost, and
key of the file's `cost` where it is not 0 -> its words in the summary."""

TOLD_APART = (*OTHER_PARTS, "newton_schulz_time_s")
"""What the file's `cost` has where it is not 0: these, and a part of the optimizer."""


@dataclass(frozen=True)
class IslandShare:
    """What devices of one kind do in a step. microbatches: of each of their islands; busy_s: what
    the busiest of these takes, the sum of gradients and the update included, without waiting."""

    device: str
    devices: int
    microbatches: tuple[int, ...]
    busy_s: float


@dataclass(frozen=True)
class Cost:
    """Price of a plan on one device, per optimizer step (training) or forward pass."""

    step_time_s: float
    compute_time_s: float
    recompute_time_s: float
    bubble_time_s: float
    """Arithmetic of ticks in which a pipeline stage has no microbatch of its own."""
    communication_time_s: float
    exposed_communication_time_s: float
    optimizer_time_s: float
    """The update, and of several microbatches the sums of their gradients."""
    flops_per_device: int
    """2MNK of products forward and backward; what is computed again is left out."""
    memory: Breakdown
    traffic: Mapping[str, Mapping[str, Mapping[str, object]]]
    distinct_work: float
    """Share of the devices' arithmetic that is neither duplicated nor padding."""
    exposed_by_axes: Mapping[tuple[str, str], float]
    tables_time_s: float = 0.0
    """Pulling rows of hosted tables before the step and pushing them after it
    (planner.workload.host_tables)."""
    loop_copy_time_s: float = 0.0
    """What loops over repeated blocks copy out of stacks and into them: weights and their
    gradients, what is saved for the backward pass (planner.pricing.loop_copies)."""
    newton_schulz_time_s: float = 0.0
    """Of the optimizer's time that in which it orthogonalises matrices
    (planner.pricing.orthogonalising)."""
    launch_time_s: float = 0.0
    """Launches of collectives that may go together (planner.pricing.bucketing)."""
    islands: tuple[IslandShare, ...] = ()
    """Of groups of unlike devices that run microbatches of their own (planner.pricing.islands)."""

    @property
    def other_time_s(self) -> float:
        """Seconds of OTHER_PARTS."""
        return float(sum(getattr(self, part) for part in OTHER_PARTS))

    def with_communication(self, communication: Communication) -> Cost:
        """The price of the same plan where its communication takes other times."""
        return replace(
            self,
            step_time_s=summed_s(
                self.compute_time_s,
                self.bubble_time_s,
                communication.exposed_s,
                self.optimizer_time_s,
                self.other_time_s,
            ),
            communication_time_s=communication.exposed_s + communication.hidden_s,
            exposed_communication_time_s=communication.exposed_s,
            exposed_by_axes=communication.by_axes,
            launch_time_s=communication.launching_s,
        )


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of kernels in a step: for microbatches of the device's own, those of them that run a
    second time, and in ticks without a microbatch."""

    compute_s: float
    recompute_s: float
    bubble_s: float


@dataclass(frozen=True)
class Communication:
    """Seconds of communication in a step, with the host too: what shows (of collectives also by
    kind and axes), what hides, and launches of what may go together."""

    exposed_s: float = 0.0
    hidden_s: float = 0.0
    by_axes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    launching_s: float = 0.0


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step by part. others: of OTHER_PARTS and of those of the optimizer that are told
    apart, by field of Cost."""

    kernels: KernelSeconds
    communication: Communication
    optimizer_s: float = 0.0
    others: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        others = sum(self.others.get(part, 0.0) for part in OTHER_PARTS)
        compute, bubble = self.kernels.compute_s, self.kernels.bubble_s
        return summed_s(compute, bubble, self.communication.exposed_s, self.optimizer_s, others)


def summed_s(
    compute_s: float, bubble_s: float, exposed_s: float, optimizer_s: float, others_s: float
) -> float:
    """Seconds of a step, whose parts follow one another."""
    return compute_s + bubble_s + exposed_s + optimizer_s + others_s
