"""Seconds of a step as a training framework runs it (runtime profiles `megatron` and `fsdp`): what
a plan does, and what that takes under given rates.

A stage s of p (p = 1 without a pipeline) takes, for each of m microbatches,

    t_s = max(kernels, launches) + collectives inside, forward and backward        weights gathered
        meanwhile (ZeRO stage 3): `_beside`
    step = m max t_s + (sum of t_s - max t_s) / interleave + gradient reduction (1 - overlap) +
    optimizer

The first stage has what comes before the blocks, the last what comes after them. Collectives of a
block that is computed again run again, all of them. Kernels: products at the device's efficiency
for their size, everything else by the bytes that `costmodels.runtimes.Kernels` says it moves.

A plan is read once (`Work`): what its kernels need does not depend on rates, so that many rates can
be tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from costmodels.collectives import collective_time_s
from planner.execution.collective import CollectiveUse
from planner.execution.pipeline import Pipeline
from planner.pricing.frameworks.kernels import Need, memory_rate, seconds
from planner.pricing.pricer import Pricer
from planner.sharding.layout import STAGE, Axes

BEFORE, BLOCKS, AFTER = "before", "blocks", "after"


@dataclass(frozen=True)
class Deal:
    """Which nodes the repeated blocks are (first, end, repeats), and how many blocks each stage
    has."""

    first: int
    end: int
    repeats: int
    blocks: tuple[int, ...]
    pipeline: Pipeline | None

    def place(self, i: int) -> str:
        """Where node i is."""
        return BEFORE if i < self.first else BLOCKS if i < self.end else AFTER


@dataclass(frozen=True)
class Work:
    """What a plan does, whatever it costs: read from its flow once, priced under as many rates as
    are tried.

    kernels: (place, how many, what each needs); of the blocks, those of one. handed: bytes of each
    tensor that a device hands to the next stage, and the axes over which devices hold the same of
    it. optimizer_elements: parameters that the fullest stage updates.
    """

    deal: Deal
    kernels: tuple[tuple[str, float, Need], ...]
    uses: tuple[CollectiveUse, ...]
    handed: tuple[tuple[float, Axes], ...]
    optimizer_elements: float
    microbatches: int
    recompute: str


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step and of its parts; exposed: communication that nothing hides."""

    total: float
    kernels: float
    again: float
    bubble: float
    exposed: float
    hidden: float
    optimizer: float
    by_axes: Mapping[tuple[str, str], float]


@dataclass
class Part:
    """What one device does of one microbatch in one block, or before or after the blocks. launches:
    kernels of the forward pass; the backward pass starts twice as many. sent_s: seconds of
    collectives that kernels wait for, by phase."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    launches: float = 0.0
    sent_s: dict[str, float] = field(
        default_factory=lambda: {"forward": 0.0, "backward": 0.0, "recompute": 0.0}
    )


def step_time(work: Work, pricer: Pricer) -> Step:
    """Seconds of a step (module docstring)."""
    runtime, deal, micro = pricer.runtime, work.deal, work.microbatches
    parts = _parts(work, pricer)
    gathers, once, by_axes = _communication(work, parts, pricer)
    handed = handed_s(work.handed, pricer)
    turns, kernels, again = [], 0.0, 0.0
    for s, blocks in enumerate(deal.blocks):
        mine = [
            (BLOCKS, blocks),
            *([(BEFORE, 1)] if s == 0 else []),
            *([(AFTER, 1)] if s == len(deal.blocks) - 1 else []),
        ]
        passes = [
            (
                n,
                _passes(
                    parts[place],
                    work.recompute if place == BLOCKS else "none",
                    pricer.rates.launch_s,
                ),
            )
            for place, n in mine
        ]
        forward, backward, busy, replayed = (sum(n * p[k] for n, p in passes) for k in range(4))
        turns.append(
            _beside(forward, gathers["forward"], runtime.gather_overlap)
            + _beside(backward, gathers["backward"], runtime.gather_overlap)
            + handed
        )
        kernels, again = max(kernels, busy), max(again, replayed)
    longest = max(turns)
    bubble = (sum(turns) - longest) / runtime.interleave
    optimizer = work.optimizer_elements * runtime.optimizer_bytes / memory_rate(pricer)
    hidden = once * runtime.overlap
    return Step(
        micro * longest + bubble + once - hidden + optimizer,
        micro * kernels,
        micro * again,
        bubble,
        micro * (longest - kernels) + once - hidden,
        hidden,
        optimizer,
        by_axes,
    )


def _parts(work: Work, pricer: Pricer) -> dict[str, Part]:
    """Kernels of a microbatch by place; of the blocks, one of them."""
    parts = {place: Part() for place in (BEFORE, BLOCKS, AFTER)}
    for place, n, need in work.kernels:
        forward, backward = seconds(need, pricer)
        part = parts[place]
        part.forward_s, part.backward_s, part.launches = (
            part.forward_s + n * forward,
            part.backward_s + n * backward,
            part.launches + n,
        )
    return parts


def _passes(part: Part, recompute: str, launch_s: float) -> tuple[float, float, float, float]:
    """Seconds of the forward pass, of the backward pass, of the kernels in both, and of what is
    computed again."""
    forward = max(part.forward_s, part.launches * launch_s)
    replayed = forward if recompute != "none" else 0.0
    backward = max(part.backward_s, 2 * part.launches * launch_s)
    sent_again = {"none": 0.0, "block": part.sent_s["forward"]}.get(
        recompute, part.sent_s["recompute"]
    )
    return (
        forward + part.sent_s["forward"],
        replayed + backward + part.sent_s["backward"] + sent_again,
        forward + replayed + backward,
        replayed,
    )


def _beside(work_s: float, gather_s: float, overlap: float) -> float:
    """Work with weights on their way: the longer, and of the shorter what does not hide under
    it."""
    return max(work_s, gather_s) + (1 - overlap) * min(work_s, gather_s)


def _communication(
    work: Work, parts: dict[str, Part], pricer: Pricer
) -> tuple[dict[str, float], float, dict[tuple[str, str], float]]:
    """Seconds of gathering weights and scattering gradients in each microbatch, and of what is sent
    once a step; what kernels wait for goes to the parts.

    The flow's pipeline runs in lock-step and holds what is outside the blocks on every stage; here
    each stage runs its own part only. The weights of a block are gathered as one, and so are those
    outside (PyTorch's FSDP: a unit's flat parameter).
    """
    gathers, once, by_axes = {"forward": 0.0, "backward": 0.0}, 0.0, dict[tuple[str, str], float]()
    deal, micro, pipeline = work.deal, work.microbatches, work.deal.pipeline
    turns = (
        {
            BEFORE: pipeline.ticks,
            BLOCKS: pipeline.ticks * pipeline.blocks_per_tick,
            AFTER: pipeline.epilogue_passes,
        }
        if pipeline
        else {BEFORE: micro, BLOCKS: micro * deal.repeats, AFTER: micro}
    )
    together: dict[tuple[str, Axes, str], float] = {}
    for use in work.uses:
        axes = tuple(a for a in use.axes if a != STAGE)
        if not axes:
            continue
        if not use.place and not use.bucketed:
            key = use.kind, axes, "forward" if use.phase == "forward" else "backward"
            together[key] = together.get(key, 0.0) + use.count * use.payload_bytes
            continue
        seconds = use.count * pricer.collective_s(
            use.kind, axes, use.payload_bytes, bucketed=use.bucketed
        )
        if use.place:
            parts[use.place].sent_s[use.phase] += seconds / turns[use.place]
        else:
            once += seconds
        label = (use.kind, "+".join(axes))
        by_axes[label] = by_axes.get(label, 0.0) + seconds
    units = deal.repeats + 1
    for (kind, axes, phase), size in together.items():
        seconds = micro * units * pricer.collective_s(kind, axes, size / (micro * units))
        gathers[phase] += seconds / micro
        label = (kind, "+".join(axes))
        by_axes[label] = by_axes.get(label, 0.0) + seconds
    return gathers, once, by_axes


def handed_s(handed: tuple[tuple[float, Axes], ...], pricer: Pricer) -> float:
    """Seconds a stage waits for one microbatch's values and gradients to reach its neighbours. One
    message at a time, so the links give what they can.

    Devices that hold the same send a piece each, which those that receive gather (Narayanan et al.
    2021, section 4.1). Of a stage's two neighbours one is in the same node where nodes hold several
    stages.
    """
    group = pricer.topology.group(pricer.mesh, (STAGE,))
    total = 0.0
    for size, same in handed:
        copies = prod(dict(pricer.mesh.shape)[a] for a in same)
        total += sum(
            collective_time_s("collective-permute", size / copies, way)
            for way in (group, group[:1])
        ) + 2 * pricer.collective_s("all-gather", same, size)
    return total
