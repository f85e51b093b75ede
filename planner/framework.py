"""The price of a plan as a training framework runs it (runtime profiles `megatron` and `fsdp`): used to price published runs, never what is emitted.

The flow is the emitted program's, so that collectives and their bytes are those of planner.account; how they and the kernels follow one another is the
framework's. A stage s of p (p = 1 without a pipeline) takes, for each of m microbatches,

    t_s = max(kernels, launches) + collectives inside, forward and backward        weights gathered meanwhile (optimizer level 3): planner.framework.beside
    step = m max t_s + (sum of t_s - max t_s) / interleave + gradient reduction (1 - overlap) + optimizer

The first stage has what comes before the blocks, the last what comes after them; blocks are dealt out as evenly as whole blocks go, the longer stages
first. Collectives of a block that is computed again run again, all of them. Kernels: products at the device's efficiency for their size, everything else
by the bytes that `costmodels.runtime.Kernels` says it moves. What a stage holds: planner.held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from costmodels.collectives import collective_time_s
from planner import account
from planner.base import Base
from planner.emit.runs import Run
from planner.evaluate import Cost
from planner.flow import Flow, cut_layout
from planner.graph import Graph
from planner.layout import STAGE, local_shape
from planner.pipeline import Pipeline, pipeline_of
from planner.price import Pricer
from planner.rule import Split

LARGE = 1e11
"""FLOPs of a product beyond which the files' curves are level; what large ones still gain is the framework's."""
FREE = frozenset({"Reshape", "Identity"})
BEFORE, BLOCKS, AFTER = "before", "blocks", "after"


@dataclass
class Part:
    """What one device does of one microbatch in one block, or before or after the blocks. launches: kernels of the forward pass; the backward pass starts
    twice as many. sent_s: seconds of collectives that kernels wait for, by phase."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    launches: float = 0.0
    sent_s: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0, "recompute": 0.0})


def role(graph: Graph, i: int) -> str:
    """What a node is to a framework's kernels: a key of Kernels.passes and Kernels.kept."""
    node = graph.nodes[i]
    if node.op == "Attention":
        return "attention"
    if node.op in ("LayerNormalization", "RMSNormalization"):
        return "norm"
    if node.op == "Add":
        return "bias" if any(n in graph.weights for n in node.inputs) else "residual"
    if node.op in ("MatMul", "Gemm"):
        readers = [j for o in node.outputs for j, _ in graph.consumers.get(o, ())]
        for j in tuple(readers):
            if role(graph, j) == "bias":
                readers += [k for o in graph.nodes[j].outputs for k, _ in graph.consumers.get(o, ())]
        return "into residual" if any(graph.nodes[j].op == "Add" and role(graph, j) == "residual" for j in readers) else "product"
    return node.op


def times(base: Base, i: int, split: Split, ins: float, outs: float, pricer: Pricer) -> tuple[float, float]:
    """(forward, backward) seconds of a node's kernels. ins, outs: bytes of its local operands and results."""
    from planner.kernels import _share

    graph, node, rule, runtime = base.graph, base.graph.nodes[i], base.rules[i], pricer.runtime
    kernels, rates, device = runtime.kernels, pricer.rates, pricer.topology.device
    assert kernels is not None
    if node.op in FREE:
        return 0.0, 0.0
    dtype = pricer.recipe.compute if graph.tensors[next(o for o in node.outputs if o)].is_float else "float32"
    memory = _memory_rate(pricer)
    share, trained = _share(rule, split, pricer.sizes), base.training and any(o in base.grad for o in node.outputs)
    flops = rule.flops * share
    kind = role(graph, i)
    if kind == "attention":
        scores = flops / (2 * (graph.tensors[node.inputs[0]].shape[3] + graph.tensors[node.inputs[2]].shape[3]))
        if kernels.flash:
            causal = 0.5 if node.attrs.get("causal") else 1.0
            rate = device.peak(dtype) * rates.attention
            forward, backward = (causal * flops * n / (rate * share_of_peak) for n, share_of_peak in zip((1.0, 2.5), kernels.attention, strict=True))
        else:
            product = flops / (device.peak(dtype) * _efficiency(pricer, flops / 2))
            forward, backward = product + scores * kernels.score_bytes[0] / memory, 2 * product + scores * kernels.score_bytes[1] / memory
        return forward, (backward + forward * kernels.again) if trained else 0.0
    if kind == "CrossEntropyLoss":
        logits = prod(graph.tensors[node.inputs[0]].shape) * share
        return logits * kernels.logit_bytes[0] / memory, logits * kernels.logit_bytes[1] / memory if trained else 0.0
    if flops:
        alike = sum(bool(base.rules[j].flops) for j, _ in graph.consumers.get(node.inputs[0], ()))  # products of one operand run as one
        forward = max(flops / (device.peak(dtype) * _efficiency(pricer, flops * alike)), (ins + outs) / memory)
        return forward, base.backward[i] * forward if trained else 0.0
    f, b = kernels.passes.get(kind, ((ins + outs) / outs if outs else 0.0, 2.0))
    return f * outs / memory, b * outs / memory if trained else 0.0


def _efficiency(pricer: Pricer, flops: float) -> float:
    """Fraction of peak that a product of so many FLOPs reaches."""
    rates = pricer.rates
    return min(1.0, pricer.topology.device.efficiency(flops) * rates.matmul * (max(flops, LARGE) / LARGE) ** rates.growth)


def _memory_rate(pricer: Pricer) -> float:
    """Bytes per second that element-wise kernels reach."""
    device = pricer.topology.device
    return device.memory_bytes_per_s * device.memory_efficiency * pricer.rates.memory


@dataclass(frozen=True)
class Deal:
    """Which nodes the repeated blocks are (first, end, repeats), and how many blocks each stage has."""

    first: int
    end: int
    repeats: int
    blocks: tuple[int, ...]
    pipeline: Pipeline | None

    @classmethod
    def of(cls, base: Base, flow: Flow, balance: bool) -> Deal:
        """Of a plan: the pipeline's blocks, else those of its longest run, all in one stage. balance: stages have even numbers of parameters, not of blocks."""
        pipeline = pipeline_of(flow.graph, flow.plan)
        if pipeline is None:
            first, period, repeats = max(base.runs, key=lambda run: run[1] * run[2], default=(len(base.graph.nodes), 0, 1))
            return cls(first, first + period * repeats, repeats, (repeats,), None)
        dealt = balanced(base, pipeline) if balance else ()
        less, more = divmod(pipeline.repeats, pipeline.stages)
        return cls(pipeline.first, pipeline.end, pipeline.repeats, dealt or tuple(less + (s < more) for s in range(pipeline.stages)), pipeline)

    def place(self, i: int) -> str:
        """Where node i is."""
        return BEFORE if i < self.first else BLOCKS if i < self.end else AFTER


def balanced(base: Base, pipeline: Pipeline) -> tuple[int, ...]:
    """Blocks of each stage such that the most parameters of a stage are the fewest, what is outside the blocks included; () where a stage would have none."""
    graph, period = base.graph, (pipeline.end - pipeline.first) // pipeline.repeats
    sizes = {BEFORE: 0, BLOCKS: 0, AFTER: 0}
    for n in graph.weights:
        for i in sorted({i for i, _ in graph.consumers.get(n, ())}):
            if not pipeline.first + period <= i < pipeline.end:
                sizes[BEFORE if i < pipeline.first else BLOCKS if i < pipeline.end else AFTER] += graph.tensors[n].elements
    ends = [sizes[BEFORE], *[0] * (pipeline.stages - 2), sizes[AFTER]]
    blocks = [0] * pipeline.stages
    for _ in range(pipeline.repeats):
        s = min(range(pipeline.stages), key=lambda k: (ends[k] + (blocks[k] + 1) * sizes[BLOCKS], -k))
        blocks[s] += 1
    return tuple(blocks) if all(blocks) else ()


@dataclass(frozen=True)
class Work:
    """What a plan does, whatever it costs: read from its flow once, priced under as many rates as are tried.

    kernels: (node, split, place, how many like it). optimizer_elements: parameters that the fullest stage updates.
    """

    deal: Deal
    kernels: tuple[tuple[int, Split, str, float], ...]
    uses: tuple[account.Use, ...]
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


def price(base: Base, flow: Flow, runs: tuple[Run, ...], pricer: Pricer) -> Cost:
    """Price of a derived flow as the framework runs it."""
    from planner.held import held_of, peak

    plan, runtime = flow.plan, pricer.runtime
    work = work_of(base, flow, runs, pricer)
    step = step_time(base, work, pricer)
    flops = account.dot_flops(flow, again=False)
    distinct = float(base.model_flops * work.microbatches / (flops * max(plan.devices, 1))) if flops else 1.0
    return Cost(step.total, step.kernels, step.again, step.bubble, step.exposed + step.hidden, step.exposed, step.optimizer, flops,
                peak(held_of(base, flow, work.deal, pricer), runtime), account.traffic(work.uses, plan.order, dict(plan.mesh)), distinct, step.by_axes)  # fmt: skip


def work_of(base: Base, flow: Flow, runs: tuple[Run, ...], pricer: Pricer) -> Work:
    """Read a flow. pricer: for the bytes of types and how stages are dealt blocks; no rate of it matters."""
    deal, counts = Deal.of(base, flow, pricer.runtime.balance), dict[tuple[int, Split, str], float]()
    for i in range(len(base.graph.nodes)):
        place = deal.place(i)
        key = (base.shared[i], flow.split(i), place)
        counts[key] = counts.get(key, 0.0) + (1 / deal.repeats if place == BLOCKS else 1.0)
    elements = 0.0
    if base.training:
        graph, mesh = flow.graph, dict(flow.plan.mesh)
        local = {n: float(prod(local_shape(graph.tensors[n].shape, cut_layout(w), mesh))) if n in flow.grad else 0.0 for n, w in flow.weights.items()}
        elements = max(stage_sums(base, flow, deal, local))
    kernels = tuple((i, split, place, n) for (i, split, place), n in counts.items())
    uses = account.collectives(flow, runs, pricer.itemsize)
    return Work(deal, kernels, uses, elements, flow.plan.microbatches if base.training else 1, flow.plan.recompute)


def step_time(base: Base, work: Work, pricer: Pricer) -> Step:
    """Seconds of a step (module docstring)."""
    runtime, deal, micro = pricer.runtime, work.deal, work.microbatches
    parts = _parts(base, work, pricer)
    gathers, once, by_axes = _communication(work, parts, pricer)
    handed = _handed_s(work.uses, pricer)
    turns, kernels, again = [], 0.0, 0.0
    for s, blocks in enumerate(deal.blocks):
        mine = [(BLOCKS, blocks), *([(BEFORE, 1)] if s == 0 else []), *([(AFTER, 1)] if s == len(deal.blocks) - 1 else [])]
        passes = [(n, _passes(parts[place], work.recompute if place == BLOCKS else "none", pricer.rates.launch_s)) for place, n in mine]
        forward, backward, busy, replayed = (sum(n * p[k] for n, p in passes) for k in range(4))
        turns.append(_beside(forward, gathers["forward"], runtime.gather_overlap) + _beside(backward, gathers["backward"], runtime.gather_overlap) + handed)
        kernels, again = max(kernels, busy), max(again, replayed)
    longest = max(turns)
    bubble = (sum(turns) - longest) / runtime.interleave
    optimizer = work.optimizer_elements * runtime.optimizer_bytes / _memory_rate(pricer)
    hidden = once * runtime.overlap
    return Step(micro * longest + bubble + once - hidden + optimizer, micro * kernels, micro * again, bubble, micro * (longest - kernels) + once - hidden, hidden, optimizer,
                by_axes)  # fmt: skip


def _parts(base: Base, work: Work, pricer: Pricer) -> dict[str, Part]:
    """Kernels of a microbatch by place; of the blocks, one of them."""
    from planner.kernels import kernel_times

    parts = {place: Part() for place in (BEFORE, BLOCKS, AFTER)}
    for i, split, place, n in work.kernels:
        forward, backward = kernel_times(base, i, split, pricer)
        part = parts[place]
        part.forward_s, part.backward_s = part.forward_s + n * forward, part.backward_s + n * backward
        part.launches += n * (base.graph.nodes[i].op not in FREE)
    return parts


def _passes(part: Part, recompute: str, launch_s: float) -> tuple[float, float, float, float]:
    """Seconds of the forward pass, of the backward pass, of the kernels in both, and of what is computed again."""
    forward = max(part.forward_s, part.launches * launch_s)
    replayed = forward if recompute != "none" else 0.0
    backward = max(part.backward_s, 2 * part.launches * launch_s)
    sent_again = {"none": 0.0, "block": part.sent_s["forward"]}.get(recompute, part.sent_s["recompute"])
    return forward + part.sent_s["forward"], replayed + backward + part.sent_s["backward"] + sent_again, forward + replayed + backward, replayed


def _beside(work_s: float, gather_s: float, overlap: float) -> float:
    """Work with weights on their way: the longer, and of the shorter what does not hide under it."""
    return max(work_s, gather_s) + (1 - overlap) * min(work_s, gather_s)


def _communication(work: Work, parts: dict[str, Part], pricer: Pricer) -> tuple[dict[str, float], float, dict[tuple[str, str], float]]:
    """Seconds of gathering weights and scattering gradients in each microbatch, and of what is sent once a step; what kernels wait for goes to the parts.

    The flow's pipeline runs in lock-step and holds what is outside the blocks on every stage; here each stage runs its own part only.
    """
    gathers, once, by_axes = {"forward": 0.0, "backward": 0.0}, 0.0, dict[tuple[str, str], float]()
    deal, micro, pipeline = work.deal, work.microbatches, work.deal.pipeline
    turns = {BEFORE: pipeline.ticks, BLOCKS: pipeline.ticks * pipeline.per_tick, AFTER: pipeline.after_times} if pipeline else {
        BEFORE: micro, BLOCKS: micro * deal.repeats, AFTER: micro}  # fmt: skip
    for use in work.uses:
        axes = tuple(a for a in use.axes if a != STAGE)
        if not axes:
            continue
        seconds = use.count * pricer.collective_s(use.kind, axes, use.payload_bytes, bucketed=use.bucketed)
        if use.place:
            parts[use.place].sent_s[use.phase] += seconds / turns[use.place]
        elif use.bucketed:
            once += seconds
        else:
            gathers["forward" if use.phase == "forward" else "backward"] += seconds / micro
        label = (use.kind, "+".join(axes))
        by_axes[label] = by_axes.get(label, 0.0) + seconds
    return gathers, once, by_axes


def _handed_s(uses: tuple[account.Use, ...], pricer: Pricer) -> float:
    """Seconds a stage waits for one microbatch's values and gradients to reach the next stage. One message at a time, so the links give what they can."""
    group = pricer.topology.group(pricer.mesh, (STAGE,))
    messages = [u.payload_bytes for u in uses if u.kind == "collective-permute" and u.axes == (STAGE,) and u.phase == "forward"]
    return sum(2 * collective_time_s("collective-permute", size, group) for size in messages)


def of_stage(base: Base, flow: Flow, deal: Deal) -> list[tuple[str, str]]:
    """(weight, place) of every weight, a block's once: a weight read in two places (a tied table) belongs to the first."""
    found, period = [], (deal.end - deal.first) // deal.repeats
    for name in flow.weights:
        i = min((i for i, _ in base.graph.consumers.get(name, ())), default=-1)
        if i >= 0 and not deal.first + period <= i < deal.end:
            found.append((name, deal.place(i)))
    return found


def stage_sums(base: Base, flow: Flow, deal: Deal, sizes: Mapping[str, float]) -> list[float]:
    """What each stage has of a figure per weight."""
    sums = {place: sum(sizes[n] for n, at in of_stage(base, flow, deal) if at == place) for place in (BEFORE, BLOCKS, AFTER)}
    last = len(deal.blocks) - 1
    return [blocks * sums[BLOCKS] + (s == 0) * sums[BEFORE] + (s == last) * sums[AFTER] for s, blocks in enumerate(deal.blocks)]
