"""Seconds of a step as a training framework runs it (runtime profiles `megatron` and `fsdp`), from
a record of what the program does and the rates that it reaches.

A stage s of p (p = 1 without a pipeline) takes, for each of m microbatches,

    t_s = max(kernels, launches) + collectives that kernels wait for, forward and backward
          beside which weights are gathered (ZeRO stage 3; costmodels.overlap)
          + adding gradients to their sums, where products do not (of all microbatches but one)
    step = m max t_s + (sum of t_s - max t_s) / interleave + gradient reduction (1 - overlap) +
    optimizer

The first stage has what comes before the blocks, the last what comes after them. Collectives of a
block that is recomputed run again, all of them. Layers before the blocks (dense layers before
mixtures of experts) are recomputed as blocks are.

A program's work is read once (`Work`): it does not depend on rates, so that many rates can be
tried. Errors against published runs: docs/published-runs.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from costmodels.collectives import DISPATCH, Span, collective_time_s
from costmodels.frameworks.kernels import (
    LARGE_FLOPS,
    KernelNeed,
    kernel_times_s,
    memory_bytes_per_s,
    product_efficiency,
)
from costmodels.hardware.device import Device
from costmodels.overlap import gather_beside_work_s
from costmodels.runtimes import Rates, Runtime

BEFORE, BLOCKS, AFTER = "before", "blocks", "after"
"""Where a node is: before, in, or after the repeated blocks."""
Axes = tuple[str, ...]
DUALPIPE = "dualpipe"
"""The schedule under which exchanges of experts' rows of one microbatch run beside kernels of
another."""
GPIPE = "gpipe"
"""The schedule under which all microbatches run forward before the first runs backward."""
SUMS = ("all-reduce", "reduce-scatter")
"""Collectives that add up what devices have."""
SENT_ON, STAGE = "collective-permute", "stage"
"""What hands on to the next pipeline stage, and the axis of the mesh it runs over."""
ONCE, SUMMED, EXCHANGED = "once", "summed", "exchanged"
"""Ways in which collectives hide: those of the whole step, sums that kernels wait for, experts'
rows. What is gathered hides by its phase, "forward" or "backward"."""


class CollectiveSeconds(Protocol):
    """Seconds of one collective of a payload over some axes of the mesh, under the same rates."""

    def __call__(
        self, kind: str, axes: Axes, payload_bytes: float, *, bucketed: bool = False
    ) -> float: ...


@dataclass(frozen=True)
class CollectiveWork:
    """A collective: `payload_bytes` each time, `count` times per optimizer step. place: of those
    that kernels wait for, where, else "". bucketed: it travels with others of its kind."""

    kind: str
    axes: Axes
    payload_bytes: int
    count: int
    phase: str
    place: str
    bucketed: bool


@dataclass(frozen=True)
class HandedTensor:
    """A tensor that a device hands to the next stage: its bytes, the axes over which devices hold
    the same of it, and how many devices these are."""

    size_bytes: float
    same_axes: Axes
    same: int


@dataclass(frozen=True)
class Work:
    """What one device's program does, whatever it costs.

    stage_blocks: how many blocks each stage has. repeats: blocks of all stages. kernels: (place,
    how many, what each needs); of the blocks, those of one. times: place -> how often the program's
    collectives there run for one block of one microbatch. neighbours: the links between stages.
    gradient_elements: of each stage, those that a device adds up. optimizer_elements: parameters
    that the fullest stage updates. layers_before: layers that come before the blocks. schedule: of
    pipeline stages. recomputed: of `kernels` those that recompute with saved collectives runs a
    second time (planner.pricing.frameworks.kernels.made_again). expert_axes: axes that experts are
    cut over. optimizer_bytes_less: what the update of the fullest stage does not move of what
    AdamW's does. orthogonalising_flops: products of its update (Muon), of one device.
    """

    stage_blocks: tuple[int, ...]
    repeats: int
    kernels: tuple[tuple[str, float, KernelNeed], ...]
    collectives: tuple[CollectiveWork, ...]
    times: Mapping[str, int]
    handed: tuple[HandedTensor, ...]
    neighbours: tuple[Span, ...]
    gradient_elements: tuple[float, ...]
    optimizer_elements: float
    microbatches: int
    recompute: str
    layers_before: int = 0
    schedule: str = ""
    overlapped: bool = False
    recomputed: tuple[tuple[str, float, KernelNeed], ...] = ()
    expert_axes: Axes = ()
    optimizer_bytes_less: float = 0.0
    orthogonalising_flops: float = 0.0

    def recompute_of(self, place: str) -> str:
        """How a place of the program is recomputed."""
        layers = place == BLOCKS or (place == BEFORE and self.layers_before > 0)
        return self.recompute if layers else "none"

    def exchanges(self, use: CollectiveWork) -> bool:
        """Whether a collective brings rows to their experts, or back."""
        return bool(self.expert_axes) and self.expert_axes[0] in use.axes and use.place == BLOCKS


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one optimizer step and of its parts. exposed: communication that nothing hides;
    hidden: the rest of it; by_axes: what is exposed of it by kind and axes, in the longest stage
    and each as far as that one hides what is sent in its way."""

    total: float
    kernels: float
    recomputed: float
    bubble: float
    exposed: float
    hidden: float
    optimizer: float
    by_axes: Mapping[tuple[str, str], float]


@dataclass
class _Place:
    """What one device does of one microbatch in one block, or before or after the blocks. launches:
    kernels of the forward pass; the backward pass starts twice as many. sent_s: seconds of
    collectives that kernels wait for, by phase; summed_s: those of the backward pass that add up
    what devices have; exchanged_s: those that bring rows to experts and back. again_s: of kernels
    that recompute with saved collectives runs a second time."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    launches: float = 0.0
    summed_s: float = 0.0
    exchanged_s: float = 0.0
    exchanged_again_s: float = 0.0
    again_s: float = 0.0
    sent_s: dict[str, float] = field(
        default_factory=lambda: {"forward": 0.0, "backward": 0.0, "recompute": 0.0}
    )


@dataclass(frozen=True)
class _Passes:
    """Seconds of a place's forward and backward pass, of the kernels in both, of what is
    recomputed, of what makes gradients of weights, of exchanges of experts' rows, and of sums that
    kernels of the backward pass wait for, and of these what hides."""

    forward: float
    backward: float
    kernels: float
    recomputed: float
    weights: float
    exchanged: float
    summed: float
    summed_hidden: float


@dataclass(frozen=True)
class _Stage:
    """Seconds of a stage for one microbatch: all, its backward pass, what makes gradients of
    weights, its kernels, what is recomputed, and by way (`_Sent`) collectives and what of them
    hides."""

    seconds: float
    backward: float
    weights: float
    kernels: float
    recomputed: float
    sent: Mapping[str, float]
    hidden: Mapping[str, float]
    places: Mapping[str, int]
    """how often it runs each place"""


@dataclass
class _Sent:
    """Seconds of gathering weights and scattering gradients in each microbatch, by phase; of what
    is sent once a step; and of all collectives by kind and axes: by the place that each is in
    (seconds of running it once in every microbatch; "" for none) and the ways in which it hides."""

    gathered: dict[str, float]
    once: float
    by_axes: dict[tuple[str, str], dict[tuple[str, tuple[str, ...]], float]]

    def add(
        self, kind: str, axes: Axes, seconds: float, ways: tuple[str, ...], place: str = ""
    ) -> None:
        """Count seconds under their kind and axes."""
        label = ("all-to-all" if kind == DISPATCH else kind, "+".join(axes))
        parts = self.by_axes.setdefault(label, {})
        parts[place, ways] = parts.get((place, ways), 0.0) + seconds

    def shown(self, stage: _Stage, overlap: float) -> dict[tuple[str, str], float]:
        """Seconds that are exposed in a stage, by kind and axes. overlap: what hides of what is
        sent once."""
        hides = {way: stage.hidden[way] / s for way, s in stage.sent.items() if s} | {ONCE: overlap}
        return {
            label: sum(
                s
                * (stage.places.get(place, 0) if place else 1)
                * max(0.0, 1 - sum(hides.get(way, 0.0) for way in ways))
                for (place, ways), s in parts.items()
            )
            for label, parts in self.by_axes.items()
        }


def step_time(
    work: Work, device: Device, runtime: Runtime, rates: Rates, collective_s: CollectiveSeconds
) -> StepSeconds:
    """Seconds of a step (module docstring)."""
    micro = work.microbatches
    places = _kernels(work, device, runtime, rates)
    sent = _communication(work, places, collective_s, runtime.wider_sums)
    handed = handed_s(work, collective_s)
    memory = memory_bytes_per_s(device, rates)
    stages = list[_Stage]()
    for s, blocks in enumerate(work.stage_blocks):
        counts = {BLOCKS: blocks}
        if s == 0:
            counts[BEFORE] = 1
        if s == len(work.stage_blocks) - 1:
            counts[AFTER] = 1
        passes = {
            place: _passes(places[place], work.recompute_of(place), rates.launch_s, runtime)
            for place in counts
        }
        summed = work.gradient_elements[s] * runtime.summing_bytes / memory * (micro - 1) / micro
        stages.append(_stage(work, runtime, counts, passes, sent.gathered, summed, handed))
    longest = max(stages, key=lambda stage: stage.seconds)
    kernels = max(stage.kernels for stage in stages)
    optimizer = work.optimizer_elements * runtime.optimizer_bytes / memory
    optimizer += orthogonalising_s(work.orthogonalising_flops, device, rates)
    optimizer -= work.optimizer_bytes_less / memory
    once, bubble = sent.once * runtime.overlap, _bubble_s(work, runtime, stages)
    return StepSeconds(
        total=micro * longest.seconds + bubble + sent.once - once + optimizer,
        kernels=micro * kernels,
        recomputed=micro * max(stage.recomputed for stage in stages),
        bubble=bubble,
        exposed=micro * (longest.seconds - kernels) + sent.once - once,
        hidden=once + micro * sum(longest.hidden.values()),
        optimizer=optimizer,
        by_axes=sent.shown(longest, runtime.overlap),
    )


def orthogonalising_s(flops: float, device: Device, rates: Rates) -> float:
    """Seconds of Muon's products, taken to be large ones in bfloat16."""
    return flops / (device.peak("bfloat16") * product_efficiency(device, rates, LARGE_FLOPS))


# Many parameters: what a stage runs, and what goes beside it.
def _stage(
    work: Work,
    runtime: Runtime,
    counts: Mapping[str, int],
    passes: Mapping[str, _Passes],
    gathered: Mapping[str, float],
    summed_s: float,
    handed_s: float,
) -> _Stage:
    """One stage. counts: how often it runs each place; summed_s, handed_s: of adding gradients to
    their sums, and of handing on."""

    def total(field: str) -> float:
        return sum(n * float(getattr(passes[place], field)) for place, n in counts.items())

    took = {
        which: gather_beside_work_s(total(which), gathered[which], runtime.gather_overlap)
        for which in ("forward", "backward")
    }
    kernels, beside = summed_s + total("kernels"), 0.0
    if work.overlapped or work.schedule == DUALPIPE:
        beside = min(total("exchanged"), kernels) * (1 - runtime.exchange_slows)
    return _Stage(
        sum(took.values()) + summed_s + handed_s - beside,
        took["backward"],
        total("weights"),
        kernels,
        total("recomputed"),
        {**gathered, SUMMED: total("summed"), EXCHANGED: total("exchanged")},
        {
            **{which: total(which) + gathered[which] - s for which, s in took.items()},
            SUMMED: total("summed_hidden"),
            EXCHANGED: beside,
        },
        counts,
    )


def _bubble_s(work: Work, runtime: Runtime, stages: Sequence[_Stage]) -> float:
    """Seconds that the stages wait for the first microbatches and the last.

    Under DualPipe half as many stages lie before a device, and gradients of weights fill in:
    (p / 2 - 1) (F&B + B - 3 W), F&B a forward and a backward pass that run together, B a backward
    pass, W gradients of weights (DeepSeek-V3, table 2)."""
    if work.schedule != DUALPIPE:
        longest = max(stage.seconds for stage in stages)
        return (sum(stage.seconds for stage in stages) - longest) / runtime.interleave
    waits = sum(s.seconds + s.backward - 3 * s.weights for s in stages) / len(stages)
    return (len(stages) / 2 - 1) * max(0.0, waits)


def _kernels(work: Work, device: Device, runtime: Runtime, rates: Rates) -> dict[str, _Place]:
    """Kernels of a microbatch by place; of the blocks, one of them."""
    assert runtime.kernels is not None
    places = {place: _Place() for place in (BEFORE, BLOCKS, AFTER)}
    for place, n, need in work.kernels:
        forward, backward = kernel_times_s(need, device, runtime.kernels, rates)
        places[place].forward_s += n * forward
        places[place].backward_s += n * backward
        places[place].launches += n
    for place, n, need in work.recomputed:
        places[place].again_s += n * kernel_times_s(need, device, runtime.kernels, rates)[0]
    return places


def _passes(place: _Place, recompute: str, launch_s: float, runtime: Runtime) -> _Passes:
    launched_s = place.launches * launch_s
    forward, backward = (
        kernels_s + n * launched_s if runtime.blocking else max(kernels_s, n * launched_s)
        for n, kernels_s in ((1, place.forward_s), (2, place.backward_s))
    )
    recomputed = {"none": 0.0, "block-keep": place.again_s}.get(recompute, forward)
    sent_again = {"none": 0.0, "block": place.sent_s["forward"]}.get(
        recompute, place.sent_s["recompute"]
    )
    # Half of the backward pass is for the weights.
    hidden = runtime.tensor_overlap * min(place.summed_s, backward / 2)
    return _Passes(
        forward + place.sent_s["forward"],
        recomputed + backward + place.sent_s["backward"] - hidden + sent_again,
        forward + recomputed + backward,
        recomputed,
        backward / 2,
        place.exchanged_s + (place.exchanged_again_s if recompute == "block" else 0.0),
        place.summed_s,
        hidden,
    )


def _communication(
    work: Work, places: Mapping[str, _Place], collective_s: CollectiveSeconds, wider_sums: float
) -> _Sent:
    """Seconds of collectives; what kernels wait for goes to the places. wider_sums: as in
    costmodels.runtimes.Runtime, of gradients that travel in buckets.

    The program that the work was read from runs its pipeline in lock-step and holds what is outside
    the blocks on every stage; here each stage runs its own part only. The weights of a block are
    gathered as one, and so are those outside (PyTorch's FSDP: a unit's flat parameter).
    """
    sent = _Sent({"forward": 0.0, "backward": 0.0}, 0.0, {})
    gathered_bytes: dict[tuple[str, Axes, str], float] = {}
    for use in work.collectives:
        if not use.place and not use.bucketed:
            key = use.kind, use.axes, "forward" if use.phase == "forward" else "backward"
            gathered_bytes[key] = gathered_bytes.get(key, 0.0) + use.count * use.payload_bytes
            continue
        wider = wider_sums if use.bucketed and use.kind in SUMS else 1.0
        seconds = use.count * collective_s(
            use.kind, use.axes, use.payload_bytes * wider, bucketed=use.bucketed
        )
        labels: tuple[str, ...] = ()
        if use.place:
            each_s = seconds / work.times[use.place]
            places[use.place].sent_s[use.phase] += each_s
            if use.phase == "backward" and use.kind in SUMS:
                places[use.place].summed_s += each_s
                labels += (SUMMED,)
            if work.exchanges(use):
                labels += (EXCHANGED,)
                recomputed = use.phase == "forward"  # runs again with a recomputed block
                places[use.place].exchanged_s += each_s * (use.phase != "recompute")
                places[use.place].exchanged_again_s += each_s * recomputed
            sent.add(use.kind, use.axes, work.microbatches * each_s, labels, use.place)
        else:
            sent.once += seconds
            sent.add(use.kind, use.axes, seconds, (ONCE,))
    micro, units = work.microbatches, work.repeats + 1
    for (kind, axes, phase), size in gathered_bytes.items():
        seconds = micro * units * collective_s(kind, axes, size / (micro * units))
        sent.gathered[phase] += seconds / micro
        sent.add(kind, axes, seconds, (phase,))
    for kind, axes, seconds in _handed(work, collective_s):
        if seconds:
            sent.add(kind, axes, micro * seconds, ())
    return sent


def handed_s(work: Work, collective_s: CollectiveSeconds) -> float:
    """Seconds a stage waits for one microbatch's values and gradients to reach its neighbours."""
    return sum(seconds for _, _, seconds in _handed(work, collective_s))


def _handed(work: Work, collective_s: CollectiveSeconds) -> Iterator[tuple[str, Axes, float]]:
    """Kind, axes and seconds of what hands one microbatch on. One message at a time, so the links
    give what they can.

    Devices that hold the same send a piece each, which those that receive gather (Narayanan et al.
    2021, section 4.1). Of a stage's two neighbours one is in the same node where nodes hold several
    stages.
    """
    for tensor in work.handed:
        sent = tensor.size_bytes / tensor.same
        for links in (work.neighbours, work.neighbours[:1]):
            yield SENT_ON, (STAGE,), collective_time_s(SENT_ON, sent, links)
        yield (
            "all-gather",
            tensor.same_axes,
            2 * collective_s("all-gather", tensor.same_axes, tensor.size_bytes),
        )
