"""The exact communication, arithmetic and bytes of an emitted program, read from its flow (never
from a cost model).

One `CollectiveUse` per collective: kind, axes, payload of one device, how often it runs in an optimizer step,
and why. Payload is what semantics call it: operand bytes for all-reduce, reduce-scatter, all-to-all
and collective-permute, result bytes for all-gather. `traffic` adds them up by kind and axes.
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from planner.execution.layout_flow import Flow, cut_layout, stored_layout
from planner.execution.loops import (
    Carry,
    RepeatedBlock,
    dealt_run,
    inner_flow,
    outer_flow,
    passes_of,
)
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.execution.plan import WeightPlan
from planner.execution.recompute import (
    Product,
    Replay,
    block_mode,
    parts,
    products,
    repeated,
    replay,
    sharded,
)
from planner.execution.shared_collectives import Merged, around, merged
from planner.graph.ir import DTYPE_BYTES, Graph
from planner.sharding.layout import STAGE, Axes, Layout, Step, Tree, group, local_shape

ItemSize = Callable[[str], float]


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """A collective of the program: `payload_bytes` each time, `count` times per optimizer step."""

    kind: str
    axes: Axes
    payload_bytes: int
    count: int
    phase: str
    """forward | backward | gradient | optimizer | recompute"""
    what: str
    """the tensor (label) or node it serves"""
    bucketed: bool = False
    """the compiler may send it together with others like it: nothing waits for it but the
    optimizer, or the next step"""
    merged: bool = False
    """compilers send an equal one in its place: it takes no bytes (its seconds are still counted,
    as solvers price every weight for itself)"""
    stacked: int = 1
    """of how many equal ones, itself among them, one array is: the same weight of so many repeats
    of a block"""
    strided: bool = False
    """between two layouts of a tensor: its pieces may lie along an inner dim"""
    place: str = ""
    """of collectives that kernels wait for: before | blocks | after the repeated blocks that a
    pipeline deals out"""
    inside: bool = False
    """of a kernel"""

    @property
    def total_bytes(self) -> int:
        """Payload of one optimizer step."""
        return self.payload_bytes * self.count


def collectives(
    flow: Flow, runs: Iterable[RepeatedBlock] = (), itemsize: ItemSize | None = None
) -> tuple[CollectiveUse, ...]:
    """Every collective of one optimizer step (training) or one forward pass. `runs` as emitted
    (none: every node by itself)."""
    size = itemsize or float32_sizes
    if flow.plan.cuts:
        from planner.execution import uneven_collectives as unequal_account

        return tuple(
            u for u in unequal_account.collectives(flow, size) if u.payload_bytes and u.count
        )
    return tuple(u for u in _uses(flow, tuple(runs), size) if u.payload_bytes and u.count)


def float32_sizes(dtype: str) -> float:
    """Bytes per element of a float32 program: 64-bit integers become 32-bit."""
    return {
        "float64": 4,
        "float32": 4,
        "bfloat16": 4,
        "float16": 4,
        "int64": 4,
        "uint64": 4,
        "bool": 1,
    }.get(dtype) or _plain(dtype)


def item_sizes(compute: str) -> ItemSize:
    """Bytes per element of a graph's dtype in a program that computes in `compute`."""
    if compute == "float32":
        return float32_sizes
    return lambda dtype: (
        2.0
        if dtype in ("float64", "float32")
        else float32_sizes(dtype)
        if dtype not in ("bfloat16", "float16")
        else 2.0
    )


def _plain(dtype: str) -> float:

    return DTYPE_BYTES[dtype]


def _uses(flow: Flow, runs: tuple[RepeatedBlock, ...], size: ItemSize) -> Iterator[CollectiveUse]:
    micro = flow.plan.microbatches if flow.training else 1
    graph, pipeline = flow.graph, pipeline_of(flow.graph, flow.plan)
    ticks, ends = (pipeline.ticks, pipeline.after_times) if pipeline else (micro, micro)
    turns, passes = micro // flow.plan.copies, passes_of(flow, runs)
    last = {c.leaves[-1] for run in runs for c in run.carries}
    varying = differing(flow)
    outside = around(flow, runs)
    outer, once = outside.flow, outside.once
    alike = once.gradients if pipeline is None else dict[str, str]()
    for name, tree in outside.trees.items():
        # Forward collectives of values that no input reaches are the same in every microbatch:
        # compilers take them out of the loop.
        for path in tree.paths():
            with_ends = _with_ends(outer, name, path, pipeline, last) if pipeline else {False}
            times = (
                (ticks if False in with_ends else 0) + (ends if True in with_ends else 0)
                if pipeline
                else passes(name)
            )
            yield from way_uses(
                outer,
                name,
                path,
                times,
                times if name in varying else 1,
                once,
                size,
                "before" if False in with_ends else "after",
            )
    for i in outside.nodes:
        late = pipeline is not None and pipeline.late(i)
        yield from kernel_uses(
            flow,
            i,
            int(pipeline.turns(i)) if pipeline else passes(made_by(graph, i)),
            size,
            "after" if late else "before",
        )
    if (
        pipeline and pipeline.schedule == "gpipe"
    ):  # head and loss are one function that keeps nothing but what it is given
        ending = [i for i in outside.nodes if pipeline.late(i)]
        yield from again_uses(
            outer,
            replay(outer, ending, "all", (*graph.inputs, *last)),
            "all",
            lambda name: ends,
            once,
            size,
            "after",
        )
    stacked: dict[
        str, tuple[int, int]
    ] = {}  # weight of a block -> blocks that a device holds, and those of them that run in a turn
    gathered: dict[
        str, list[tuple[bool, bool]]
        # sharded weight -> per function that gathers it, whether forward does, and backward again
    ] = {}
    for run in runs:
        dealt = pipeline is not None and run.first == pipeline.first
        often = _often(
            pipeline.per_tick if pipeline and dealt else run.repeats,
            (lambda name: ticks) if pipeline else passes,
        )
        body = inner_flow(outer, run)
        again = repeated(body, run)
        own = range(run.first, run.first + run.period)
        local = [o for i in own for o in graph.nodes[i].outputs if o]
        trees = {
            n: body.trees[n]
            for n in (
                *local,
                *(c.enters for c in run.carries),
                *(names[0] for names in run.weights),
            )
            if n in body.trees
        }
        once = merged(body, own, trees, [c.leaves[0] for c in run.carries])
        place = "blocks" if dealt or pipeline is None else "before"
        for name, tree in trees.items():
            yield from _tree(body, name, tree, often(name), once, size, place)
        for i in own:
            yield from kernel_uses(flow, i, often(made_by(graph, i)), size, place)
        yield from again_uses(body, again, block_mode(flow), often, once, size, place)
        for names in run.weights:
            stacked.update(
                dict.fromkeys(
                    names,
                    (
                        (pipeline.per_stage, pipeline.per_tick)
                        if pipeline and dealt
                        else (run.repeats, run.repeats)
                    ),
                )
            )
            for name in names[: pipeline.per_stage] if pipeline and dealt else names:
                gathered.setdefault(name, []).append(
                    (True, again is not None and names[0] in again.weights)
                )
        for name in run.shared:
            if name in graph.weights and sharded(flow, name):
                gathered.setdefault(name, []).append((True, False))
    at_once: set[str] = set()
    for part in parts(flow, runs):
        again = replay(outer, part, "part")
        for name in dict.fromkeys(
            n for i in part for n in graph.nodes[i].inputs if n and sharded(flow, n)
        ):
            waits = _waits(flow, part, name)
            gathered.setdefault(name, []).append(
                (waits or name not in at_once, name in again.weights)
            )
            at_once |= set() if waits else {name}
    if flow.training:
        elsewhere, held, first = frozenset[str](), frozenset[str](), frozenset[str]()
        if pipeline:
            run = dealt_run(flow, runs, pipeline)
            elsewhere, held = (
                of_other_stages(graph, pipeline),
                frozenset(n for names in run.weights for n in names),
            )
            first = frozenset(n for names in run.weights for n in names[: pipeline.per_tick])
            for carry in run.carries:
                yield from _handed(flow, carry, pipeline, size)
            loss = graph.outputs[0]
            yield CollectiveUse(
                "all-reduce",
                (STAGE,),
                int(size(graph.tensors[loss].dtype)),
                1,
                "forward",
                graph.labels.get(loss, loss),
            )

        def reductions(name: str) -> int:
            """How often a gradient that is scattered in every microbatch is: with the blocks, with
            what follows them, or with both. Every tick scatters one chunk's: all are counted at the
            first."""
            assert pipeline is not None
            if name in held:
                return ticks if name in first else 0
            ends = {pipeline.late(i) for i, _ in graph.consumers[name]}
            return (ticks if False in ends else 0) + (pipeline.after_times if True in ends else 0)

        known: dict[tuple, tuple[CollectiveUse, ...]] = {}  # weights of repeats are reduced alike
        for name, plan in flow.weights.items():
            if name in flow.grad and name not in elsewhere:
                tensor = graph.tensors[name]
                over = (
                    (STAGE,) if pipeline and name not in held else ()
                )  # every stage holds what is outside the blocks, and adds to its gradient
                times = reductions(name) if pipeline else turns
                often_gathered, stack = tuple(gathered.get(name, ())), stacked.get(name, (1, 1))
                key = (
                    tensor.shape,
                    tensor.dtype,
                    id(plan),
                    times,
                    often_gathered,
                    over,
                    name in alike,
                    stack,
                )
                if key not in known:
                    known[key] = tuple(
                        _reduction(
                            flow,
                            name,
                            plan,
                            times,
                            size,
                            often_gathered,
                            over,
                            name in alike,
                            stack,
                        )
                    )
                what = graph.labels.get(name, name)
                for use in known[key]:
                    yield (
                        use
                        if use.what == what
                        else CollectiveUse(
                            use.kind,
                            use.axes,
                            use.payload_bytes,
                            use.count,
                            use.phase,
                            what,
                            use.bucketed,
                            use.merged,
                            use.stacked,
                        )
                    )


def _often(repeats: int, passes: Callable[[str], int]) -> Callable[[str], int]:
    """How often blocks compute a tensor of one repeat."""
    return lambda name: repeats * passes(name)


def _waits(flow: Flow, part: range, name: str) -> bool:
    """Whether a part gathers a weight after a float operand beside it. Others (tables read at
    integers) gather at once, and compilers make one of two such gathers."""
    graph = flow.graph
    first = next(graph.nodes[i] for i in part if name in graph.nodes[i].inputs)
    return any(
        n and n not in graph.weights and n not in graph.constants and graph.tensors[n].is_float
        for n in first.inputs
    )


def _with_ends(
    flow: Flow, name: str, path: tuple[Step, ...], pipeline: Pipeline, last: Iterable[str]
) -> set[bool]:
    """Whether a conversion outside the blocks runs with what follows them (True), with what comes
    before (False), or with both: where its readers do."""
    late = _late(flow.graph, name, pipeline, last)
    if name in flow.graph.weights and not late:
        return {
            pipeline.late(i)
            for i, slot in flow.graph.consumers[name]
            if flow.trees[name].path(flow.need[i, slot])[: len(path)] == path
        }
    return {late}


def _late(graph: Graph, name: str, pipeline: Pipeline, last: Iterable[str]) -> bool:
    """Whether a tensor outside the blocks belongs to what follows them."""
    made = graph.producer.get(name, -1)
    return name in last or (
        pipeline.late(made)
        if made >= 0
        else all(pipeline.late(i) for i, _ in graph.consumers.get(name, ()))
    )


def _handed(
    flow: Flow, carry: Carry, pipeline: Pipeline, size: ItemSize
) -> Iterator[CollectiveUse]:
    """A carried tensor on its way to the next stage, and its gradient on the way back. Between two
    stages the last way back is a loop of one tick, which compilers unroll: nobody reads what it
    sends."""
    tensor = flow.graph.tensors[carry.enters]
    payload = int(
        prod(local_shape(tensor.shape, carry.layout, dict(flow.plan.mesh))) * size(tensor.dtype)
    )
    back = pipeline.ticks - (pipeline.schedule == "1f1b" and pipeline.stages == 2)
    yield CollectiveUse(
        "collective-permute", (STAGE,), payload, pipeline.ticks, "forward", carry.enters
    )
    yield CollectiveUse("collective-permute", (STAGE,), payload, back, "backward", carry.enters)


def of_other_stages(graph: Graph, pipeline: Pipeline) -> frozenset[str]:
    """Weights of blocks beyond the first stage's; where the blocks do not divide evenly the first
    stages hold the most."""
    key = (
        "of other stages",
        pipeline.first,
        pipeline.period,
        pipeline.repeats,
        pipeline.stages,
        pipeline.virtual,
    )
    if key not in graph.memo:
        beyond = [i for i in pipeline.nodes if pipeline.holder(i)]
        mine = {
            n for i in range(pipeline.end) if pipeline.holder(i) < 1 for n in graph.nodes[i].inputs
        }
        graph.memo[key] = frozenset(
            n for i in beyond for n in graph.nodes[i].inputs if n in graph.weights and n not in mine
        )
    found: frozenset[str] = graph.memo[key]
    return found


def differing(flow: Flow) -> frozenset[str]:
    """Tensors that microbatches do not share: those that depend on an input of the graph, or on a
    weight gathered in each microbatch."""
    found = set(flow.graph.inputs) | {n for n in flow.weights if sharded(flow, n)}
    for node in flow.graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(o for o in node.outputs if o)
    return frozenset(found)


def made_by(graph: Graph, i: int) -> str:
    """A result of node i."""
    return next(o for o in graph.nodes[i].outputs if o)


def _tree(
    flow: Flow, name: str, tree: Tree, times: int, once: Merged, size: ItemSize, where: str
) -> Iterator[CollectiveUse]:
    for path in tree.paths():
        yield from way_uses(flow, name, path, times, times, once, size, where)


def way_uses(
    flow: Flow,
    name: str,
    path: tuple[Step, ...],
    times: int,
    forward_times: int,
    once: Merged,
    size: ItemSize,
    where: str,
) -> Iterator[CollectiveUse]:
    """The collectives of the last step of a way: backward so many times, forward so many."""
    yield from _step(
        flow,
        name,
        path[-1],
        0 if (name, path) in once.backward else times,
        0 if (name, path) in once.forward else forward_times,
        size,
        where,
    )


def _step(
    flow: Flow,
    name: str,
    step: Step,
    times: int,
    forward_times: int,
    size: ItemSize,
    where: str,
    forward_phase: str = "forward",
) -> Iterator[CollectiveUse]:
    tensor = flow.graph.tensors[name]
    what = flow.graph.labels.get(name, name)
    if step.forward and forward_times:
        yield CollectiveUse(
            step.forward,
            step.axes,
            int(step.forward_elements * size(tensor.dtype)),
            forward_times,
            forward_phase,
            what,
            strided=True,
            place=where,
        )
    if step.backward and times and name in flow.grad:
        yield CollectiveUse(
            step.backward,
            step.axes,
            int(step.backward_elements * size(tensor.dtype)),
            times,
            "backward",
            what,
            strided=True,
            place=where,
        )


def again_uses(
    flow: Flow,
    again: Replay | None,
    mode: str,
    times: Callable[[str], int],
    once: Merged,
    size: ItemSize,
    where: str,
) -> Iterator[CollectiveUse]:
    """Collectives of a function's forward pass that its backward pass runs again. mode: how it is
    wrapped (planner.execution.recompute); times: how often what a tensor needs runs."""
    if again is None:
        return
    for name, path in again.steps:
        if (name, path) in once.forward:
            continue
        yield from _step(flow, name, path[-1], 0, times(name), size, where, "recompute")
    for i, wanted in again.nodes.items() if mode in ("all", "keep") else ():
        for use in kernel_uses(flow, i, times(made_by(flow.graph, i)), size, where, mode, wanted):
            if use.phase == "forward":
                yield CollectiveUse(
                    use.kind,
                    use.axes,
                    use.payload_bytes,
                    use.count,
                    "recompute",
                    use.what,
                    place=where,
                    inside=True,
                )


def kernel_uses(
    flow: Flow, i: int, times: int, size: ItemSize, where: str, again: str = "", wanted: bool = True
) -> Iterator[CollectiveUse]:
    """Collectives inside a node's kernel. again: how its function is wrapped, for what its second
    run has; wanted: whether that makes the node's result."""
    rule, split, node = flow.rules[i], flow.split(i), flow.graph.nodes[i]
    local = rule.local(split, dict(flow.plan.mesh))
    differentiated = any(o in flow.grad for o in node.outputs)
    for inner in rule.inner:
        axes = inner.axes(split, flow.plan.order)
        if axes and not (again == "keep" and inner.kept) and (wanted or not inner.for_result):
            devices = group(axes, dict(flow.plan.mesh))
            payload, (forward, backward) = (
                inner.payload_bytes(local, devices, size("float32")),
                inner.times(devices),
            )
            yield CollectiveUse(
                inner.kind,
                axes,
                payload,
                times * forward,
                "forward",
                node.id,
                place=where,
                inside=True,
            )
            if differentiated and (inner.operand < 0 or node.inputs[inner.operand] in flow.grad):
                yield CollectiveUse(
                    inner.kind,
                    axes,
                    payload,
                    times * backward,
                    "backward",
                    node.id,
                    place=where,
                    inside=True,
                )


def _reduction(
    flow: Flow,
    name: str,
    plan: WeightPlan,
    micro: int,
    size: ItemSize,
    gathered: Sequence[tuple[bool, bool]],
    over: Axes,
    alike: bool,
    stacked: tuple[int, int],
) -> Iterator[CollectiveUse]:
    """The reduction of one weight's gradient (alike: equal to another's, which is reduced once for
    both) and, with sharded state, the gathering of the parameter. stacked: of how many repeats it
    is one array when the optimizer runs, and in each microbatch."""
    tensor, mesh = flow.graph.tensors[name], dict(flow.plan.mesh)
    what = flow.graph.labels.get(name, name)
    level = plan.zero if plan.dim >= 0 else 0
    piece = int(
        prod(local_shape(tensor.shape, cut_layout(plan) if level else plan.layout, mesh))
        * size(tensor.dtype)
    )
    full = piece * group(plan.axes, mesh) if level else piece  # padded where the pieces are
    rest = (*over, *(a for a in plan.fan if not level or a not in plan.axes))
    if level == 3:
        yield CollectiveUse(
            "all-gather",
            plan.axes,
            full,
            micro * sum(forward for forward, _ in gathered),
            "forward",
            what,
        )
        yield CollectiveUse(
            "all-gather",
            plan.axes,
            full,
            micro * sum(again for _, again in gathered),
            "recompute",
            what,
        )
        yield CollectiveUse(
            "reduce-scatter", plan.axes, full, micro * len(gathered), "gradient", what
        )
    elif level:
        yield CollectiveUse(
            "reduce-scatter",
            plan.axes,
            full,
            micro if level == 2 else 1,
            "gradient",
            what,
            True,
            alike,
            stacked[level == 2],
        )
        yield CollectiveUse(
            "all-gather", plan.axes, full, 1, "optimizer", what, True, stacked=stacked[0]
        )
    if rest:
        yield CollectiveUse("all-reduce", rest, piece, 1, "gradient", what, True, alike, stacked[0])


def traffic(
    uses: Iterable[CollectiveUse], order: Axes, mesh: Mapping[str, int]
) -> dict[str, dict[str, dict[str, int | Fraction]]]:
    """kind -> axes (names in mesh order joined by +) -> {payload, wire} bytes per device and
    optimizer step; wire is the exact ring figure."""
    total: dict[tuple[str, Axes], int] = {}
    for use in uses:
        if not use.merged:
            total[use.kind, use.axes] = total.get((use.kind, use.axes), 0) + use.total_bytes
    out: dict[str, dict[str, dict[str, int | Fraction]]] = {}
    for (kind, axes), payload in total.items():
        cell = out.setdefault(kind, {}).setdefault(
            "+".join(a for a in order if a in axes), {"payload": 0, "wire": Fraction(0)}
        )
        n = group(axes, mesh)
        sent = Fraction(payload) if kind == "collective-permute" else Fraction(payload * (n - 1), n)
        cell["payload"] += payload
        cell["wire"] += sent * (2 if kind == "all-reduce" else 1)
    return out


def dot_flops(flow: Flow, runs: Iterable[RepeatedBlock] = (), *, again: bool = True) -> int:
    """2MNK of every product per device and step: forward and backward. again: as compiled, with
    what kernels and blocks in `runs` compute again and without what is multiplied."""
    found = flops_by_index(flow, runs, again=again).values()
    alike, times = {id(f): f for f in found}, Counter(map(id, found))  # of repeats one term
    return int(sum((alike[key] * n for key, n in times.items()), Fraction(0)))


def flops_by_index(
    flow: Flow, runs: Iterable[RepeatedBlock] = (), *, again: bool = True
) -> dict[int, Fraction]:
    """2MNK per node, as in `dot_flops`; of blocks on pipeline stages what one stage runs, spread
    over all repeats."""
    if flow.plan.cuts:
        from planner.execution import uneven_collectives as unequal_account

        return unequal_account.flops_by_index(flow, again=again)
    runs, graph, pipeline = tuple(runs), flow.graph, pipeline_of(flow.graph, flow.plan)
    total: dict[int, Fraction] = {}
    alike: dict[tuple, tuple[Product, ...]] = {}

    def made(i: int) -> tuple[Product, ...]:
        """The node's products; repeats of a block share a rule."""
        node, rule = graph.nodes[i], flow.rules[i]
        if not rule.flops:
            return ()
        key = (
            id(rule),
            id(flow.split(i)),
            tuple(map(flow.grad.__contains__, node.inputs)),
            flow.grad.isdisjoint(node.outputs),
        )
        if key not in alike:
            alike[key] = products(flow, i)
        return alike[key]

    each: dict[tuple[int, bool], Fraction] = {}
    for i in range(len(graph.nodes)):
        if not (dots := made(i)):
            continue
        twice = (
            pipeline is not None and again and pipeline.schedule == "gpipe" and pipeline.late(i)
        )  # head and loss are computed again
        if (id(dots), twice) not in each:
            back = {
                id(dot): dot.backward + again * (dot.again - dot.multiplied) if flow.training else 0
                for dot in dots
            }
            each[id(dots), twice] = sum(
                (dot.flops * (1 + twice + back[id(dot)]) + dot.beyond for dot in dots), Fraction(0)
            )
        total[i] = each[id(dots), twice]
    outer = flow
    for run in runs:
        outer = outer_flow(outer, run)
    for run in runs:
        replayed = repeated(inner_flow(outer, run), run)
        for i, result in (replayed.nodes if replayed and again else {}).items():
            total[i] = total.get(i, Fraction(0)) + run.repeats * sum(
                (dot.flops for dot in made(i) if result or dot.inside), Fraction(0)
            )
    passes = passes_of(flow, runs)
    known: dict[tuple, Fraction] = {}
    for i, f in list(total.items()):
        times = 0 if pipeline else passes(made_by(graph, i))
        place = (
            id(f),
            *(
                (pipeline.late(i), i in pipeline.nodes, i in pipeline.twice)
                if pipeline
                else (times,)
            ),
        )  # by id: nodes that are alike share one
        if place not in known:
            known[place] = f * (pipeline.turns(i) * pipeline.share(i) if pipeline else times)
        total[i] = known[place]
    return {i: f for i, f in total.items() if f}


def argument_bytes(flow: Flow, optimizer: str = "", size: ItemSize = float32_sizes) -> int:
    """Bytes of what one device passes to the step (training) or the forward pass: parameters,
    optimizer state, batch, step count."""
    graph, mesh = flow.graph, dict(flow.plan.mesh)
    used = {n for node in graph.nodes for n in node.inputs}

    def local(name: str, layout: Layout, itemsize: float) -> int:
        return int(prod(local_shape(graph.tensors[name].shape, layout, mesh)) * itemsize)

    pipeline = pipeline_of(graph, flow.plan)
    elsewhere = of_other_stages(graph, pipeline) if pipeline else frozenset()
    total = 4 if flow.training and optimizer == "adamw" else 0  # the step count
    if flow.plan.cuts:
        from planner.execution import uneven_collectives as unequal_account

        total += unequal_account.parameter_bytes(flow, size) + (
            8 * unequal_account.state_elements(flow) if optimizer == "adamw" else 0
        )
    for name, plan in flow.weights.items() if not flow.plan.cuts else ():
        if name in used and name not in elsewhere:
            total += local(name, stored_layout(plan), size(graph.tensors[name].dtype))
            if flow.training and name in flow.grad and optimizer == "adamw":
                total += 2 * local(name, cut_layout(plan), 4)
    for name in graph.inputs:
        if name in used:
            total += local(name, flow.source[name], size(graph.tensors[name].dtype)) * (
                flow.plan.microbatches if flow.training else 1
            )
    return total
