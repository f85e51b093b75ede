"""What a whole plan costs: the record that every search result, report and strategy file is filled
from, and the one place that adds up a step of an emitted program, whatever its
pipeline stages are:

    step = kernels + bubble + communication that shows + optimizer + other parts

Who calls `add_up` says how long each of these takes: planner.pricing.step_time for equal stages or
none, planner.pricing.uneven_step for uneven ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from costmodels.capacity import Breakdown
from planner.analysis.facts import GraphFacts
from planner.execution import collectives
from planner.execution.collective import CollectiveUse, traffic
from planner.execution.layout_flow import Flow

OTHER_PARTS = {"tables_time_s": "tables pulled and pushed"}
"""Parts of a step beside arithmetic, communication, the optimizer and bubbles: field of Cost, and
key of the file's `cost` where it is not 0 -> its words in the summary."""


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
    """The update, of several microbatches the sums of their gradients, and of virtual devices what
    loops over blocks copy (Pricer.loop_s)."""
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
    launch_time_s: float = 0.0
    """Launches of collectives that may go together (planner.pricing.bucketing)."""

    @property
    def other_time_s(self) -> float:
        """Seconds of OTHER_PARTS."""
        return float(sum(getattr(self, part) for part in OTHER_PARTS))

    def with_communication(self, communication: Communication) -> Cost:
        """The price of the same plan where its communication takes other times."""
        return replace(
            self,
            step_time_s=self.compute_time_s
            + self.bubble_time_s
            + communication.exposed_s
            + self.optimizer_time_s
            + self.other_time_s,
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

    @classmethod
    def of(cls, rows: Iterable[tuple[CollectiveUse, float, float]]) -> Communication:
        """Of collectives with their seconds, and those of them that hide."""
        exposed = hidden = 0.0
        by_axes: dict[tuple[str, str], float] = {}
        for use, seconds, under in rows:
            exposed += seconds - under
            hidden += under
            label = (use.kind, "+".join(use.axes))
            by_axes[label] = by_axes.get(label, 0.0) + seconds - under
        return cls(exposed, hidden, by_axes)


def add_up(
    base: GraphFacts,
    flow: Flow,
    uses: Iterable[CollectiveUse],
    *,
    kernels: KernelSeconds,
    communication: Communication,
    optimizer_s: float,
    memory: Breakdown,
    others: Mapping[str, float] | None = None,
) -> Cost:
    """The price of a derived flow from what its parts take. uses: all its collectives; others:
    seconds of OTHER_PARTS."""
    flops = collectives.dot_flops(flow, again=False)
    return Cost(
        step_time_s=0.0,
        compute_time_s=kernels.compute_s,
        recompute_time_s=kernels.recompute_s,
        bubble_time_s=kernels.bubble_s,
        communication_time_s=0.0,
        exposed_communication_time_s=0.0,
        optimizer_time_s=optimizer_s,
        flops_per_device=flops,
        memory=memory,
        traffic=traffic(uses, flow.plan.order, dict(flow.plan.mesh)),
        distinct_work=_distinct_work(base, flow, flops),
        exposed_by_axes={},
        **(others or {}),
    ).with_communication(communication)


def _distinct_work(base: GraphFacts, flow: Flow, flops: int) -> float:
    """Share of the devices' arithmetic that is neither duplicated nor padding."""
    plan = flow.plan
    if not flops:
        return 1.0
    once = base.model_flops * (plan.microbatches if base.training else 1)
    share = float(once / (flops * max(plan.devices, 1)))
    if plan.overlapped_microbatches > 1:
        share = min(1.0, share)  # overlapped microbatches share products of weights alone
    assert share <= 1 + 1e-9, f"{share} of the devices' arithmetic is useful"
    return share
