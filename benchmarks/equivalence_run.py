"""One model of the equivalence benchmark: strategies that differ and use every device, each
emitted, run and compared.

    data-parallel      the batch over all devices
    dp, recursive, ilp what each solver chose freely; when that leaves a mesh axis without work or
    equals a strategy before it, what it chose
                       under pinned meshes and techniques, tried in a fixed order
    tensor-parallel    mesh data=2, tensor=the rest, by hand: every product whose rule allows it is
                       cut over "tensor", along a dim of its weight where it has one (see
                       `tensor_parallel`)
    exchange           (models whose kernels can exchange with neighbours) attention on a ring, rows
                       of images or experts over "tensor", the batch over "data"
    sharded-state      (training) a pinned mesh with optimizer sharding level 3, recompute and two
                       microbatches

An axis works when some product or recurrence (an operator with FLOPs) is cut over it. Planned for a
made-up device (eager.toml) whose links are nearly free: tiny models are then worth spreading;
prices do not matter here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.equivalence_models import Case, Shrunk, feeds_for, onnxruntime_outputs
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.ops.lookup import rule_of
from planner.pins.pins import Pins
from planner.sharding.candidates import candidates
from planner.sharding.rule import PENDING, Limits, Rule, Split, legal
from planner.strategy.strategy import Strategy
from planner.workload.model import Model

HARDWARE = Path(__file__).with_name("eager.toml")
TOLERANCE, RUNTIME_TOLERANCE = 1e-4, 1e-3
EXCHANGE = "exchange"
SEARCH_S = 20.0
"""Time limit of one search."""


@dataclass(frozen=True)
class HandPins(Pins):
    """Pins made by a rule instead of globs: see `tensor_parallel`."""

    def allowed(self, base: Any, mesh: Mapping[str, int]) -> dict[int, tuple[Split, ...]]:
        return tensor_parallel(base, mesh)


def tensor_parallel(base: Any, mesh: Mapping[str, int]) -> dict[int, tuple[Split, ...]]:
    """Per class of nodes: the batch over "data", and over "tensor" any other factor. A product of a
    weight is cut along a dim of the weight, any other product along what its rule allows; only
    where neither can be (a recurrence), both axes share the batch.
    """
    from planner.analysis.batch_factor import batch_factors

    factors, out = batch_factors(base), {}
    for i in range(len(base.graph.nodes)):
        if base.shared[i] != i:
            continue
        rule, batch = base.rules[i], factors[i]
        fixed = (
            {batch: ["data"]}
            if batch and legal(rule, Split.of({batch: ["data"]}), mesh, Limits())
            else {}
        )
        kept = []
        for s in candidates(rule, {"tensor": mesh["tensor"]}, Limits(pending=False)):
            both = Split.of({**fixed, **{f: list(a) for f, a in s.pairs}})
            if not any(f in (batch, PENDING) for f, _ in s.pairs) and legal(
                rule, both, mesh, Limits()
            ):
                kept.append(both)
        working = [s for s in kept if "tensor" in s.used]
        dims = weight_factors(base.graph, i, rule)
        working = [s for s in working if any("tensor" in s.axes(f) for f in dims)] or working
        if rule.flops and not working and batch:
            shared = Split.of({batch: ["data", "tensor"]})
            working = [shared] if legal(rule, shared, mesh, Limits()) else []
        out[i] = tuple(working if rule.flops and working else kept) or (Split.of(fixed),)
    return out


@dataclass(frozen=True)
class ExchangePins(Pins):
    """Pins made by a rule instead of globs: see `exchanges`."""

    def allowed(self, base: Any, mesh: Mapping[str, int]) -> dict[int, tuple[Split, ...]]:
        return exchanges(base, mesh)


def exchanges(base: Any, mesh: Mapping[str, int]) -> dict[int, tuple[Split, ...]]:
    """Per class of nodes whose kernel can exchange with neighbours the split that has it do so over
    "tensor", and the batch over "data"; others are free."""
    from planner.analysis.batch_factor import batch_factors

    factors = batch_factors(base)
    out: dict[int, tuple[Split, ...]] = {}
    for i, rule in enumerate(base.rules):
        inside = next(iter((*rule.paired, *sorted(rule.spatial))), "")
        if base.shared[i] != i or not inside:
            continue
        both = Split.of({inside: ["tensor"], **({factors[i]: ["data"]} if factors[i] else {})})
        usable = [
            s for s in (both, Split.of({inside: ["tensor"]})) if legal(rule, s, mesh, Limits())
        ]
        if usable:
            out[i] = (usable[0],)
    return out


def weight_factors(graph: Graph, index: int, rule: Rule) -> set[str]:
    """The factors of a node's operands that are weights, or views of weights."""

    def from_weights(name: str) -> bool:
        if name not in graph.producer:
            return name in graph.weights
        return all(
            n in graph.constants or from_weights(n)
            for n in graph.nodes[graph.producer[name]].inputs
            if n
        )

    return {
        f
        for slot, n in enumerate(graph.nodes[index].inputs)
        if n and from_weights(n)
        for dim in rule.operands[slot]
        for f in dim
    }


@dataclass(frozen=True)
class Attempt:
    """How a strategy is asked for."""

    solver: str = "dp"
    mode: str = "auto"
    pins: Pins = field(default_factory=Pins)


def attempts(name: str, devices: int, train: bool, batch: int) -> list[Attempt]:
    """What is tried for a row, in order; the first that differs and leaves no axis idle is used."""
    half = devices // 2
    wide, tall = {"data": (2,), "tensor": (half,)}, {"data": (half,), "tensor": (2,)}
    if name == "data-parallel":
        return [Attempt(mode="data-parallel")]
    if name == "tensor-parallel":
        return [Attempt(pins=HandPins(mesh=wide))]
    if name == EXCHANGE:
        return [Attempt(pins=ExchangePins(mesh=mesh)) for mesh in (wide, tall)]
    if name == "sharded-state":
        techniques = {
            "zero_stage": 3,
            "recompute": "block",
            "microbatches": 2 if batch % (2 * half) == 0 else 1,
        }
        one = {**techniques, "microbatches": 1}
        return [
            Attempt(pins=Pins(mesh=mesh, techniques=t))
            for mesh in (tall, unnamed(half, 2))
            for t in (techniques, one)
        ]
    deep = {"data": (2,), "sequence": (2,), "tensor": (devices // 4,)}
    choices: list[Mapping[str, Any]] = [
        {},
        {"mesh": wide},
        {"mesh": tall},
        {"mesh": {"tensor": (devices,)}},
        {"mesh": deep},
    ]
    if train:
        choices += [{"techniques": {"zero_stage": z}} for z in (1, 2, 3)]
    choices += [{"mesh": unnamed(*sizes)} for sizes in ((2, half), (half, 2), (2, 2, devices // 4))]
    choices += [{"mesh": wide, "forbidden_factors": frozenset({f})} for f in ("n", "k", "m", "d0")]
    return [Attempt(solver=name, pins=Pins(**c)) for c in choices]


def unnamed(*sizes: int) -> dict[str, tuple[int, ...]]:
    """A mesh of axes whose names ask for nothing: where only the batch of a product can be cut (a
    recurrence), all of them may cut it."""
    return {f"axis{i}": (n,) for i, n in enumerate(sizes)}


def choose(case: Case, model: Model, attempt: Attempt) -> Strategy:
    """Search, and the strategy through its file form. Raises PlanError when nothing is possible."""
    from planner.search.build_request import assumptions, make_request
    from planner.search.search import Search
    from planner.search.to_strategy import compose

    kind = model.workload.kind
    request = make_request(
        devices=case.devices,
        hardware=str(HARDWARE),
        topology=None,
        workload=kind,
        mode=attempt.mode,
        solver=attempt.solver,
        pins=attempt.pins,
        precision="fp32",
        time_limit_s=SEARCH_S,
        baselines=False,
    )
    found = Search(model, request).run()
    if found.best is None:
        raise PlanError("P021", "no plan is possible under these pins")
    return compose(model, request, found, {}, assumptions(model, request, "eager", None))


def idle_axes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """Mesh axes that cut no operator with FLOPs."""
    used: set[str] = set()
    for node in graph.nodes:
        rule, _ = rule_of(node, graph)
        split = plan.splits.get(node.id, Split())
        if rule.flops:
            used.update(a for f, axes in split.pairs if f != PENDING for a in axes)
    return tuple(a for a, n in plan.mesh if n > 1 and a not in used)


def identity(graph: Graph, plan: Plan, level: int) -> tuple:
    """Two plans are the same when this is: sizes of the mesh, techniques and splits; names of axes
    make no difference.

    level 0: splits of operators with FLOPs, neighbouring axes that always cut together taken as one
    (data=4,data2=2 is data=8); 1: without that; 2: splits of every operator.
    """
    rows = [
        plan.splits.get(node.id, Split()).pairs
        for node in graph.nodes
        if level == 2 or rule_of(node, graph)[0].flops
    ]
    axes: list[tuple[str, ...]] = [(a,) for a, n in plan.mesh if n > 1]
    cuts = [[c for _, c in pairs] for pairs in rows]
    i = 1
    while i < len(axes) and level == 0:
        both = (*axes[i - 1], *axes[i])
        if all(together(both, c, len(axes[i - 1])) for pairs in cuts for c in pairs):
            axes[i - 1 : i + 1] = [both]
        else:
            i += 1
    sizes, place = dict(plan.mesh), {a: i for i, group in enumerate(axes) for a in group}
    splits = tuple(
        tuple((f, tuple(dict.fromkeys(place[a] for a in c if a in place))) for f, c in pairs)
        for pairs in rows
    )
    return (
        tuple(prod(sizes[a] for a in group) for group in axes),
        splits,
        plan.zero_stage,
        plan.recompute,
        plan.microbatches,
    )


def together(both: tuple[str, ...], cut: tuple[str, ...], first: int) -> bool:
    """Whether a cut has all of these axes as neighbours in this order, or none of them."""
    at = cut.index(both[0]) if both[0] in cut else None
    return cut[at : at + len(both)] == both if at is not None else not set(both[first:]) & set(cut)


def strategies(
    case: Case, model: Model, names: tuple[str, ...]
) -> Iterator[tuple[str, Plan | None, str]]:
    """(row, plan or None, mesh and techniques or why there is none). Plans that differ from those
    before only in how the mesh is written, or in operators without FLOPs, are a last resort."""
    train = model.workload.kind == "train"
    seen: set[tuple] = set()
    for name in names:
        why, tried = "", []
        for attempt in attempts(name, case.devices, train, case.batch):
            try:
                strategy = choose(case, model, attempt)
            except PlanError as e:
                why = why or e.what
                continue
            graph = model.graph(int(strategy.techniques["microbatches"]))
            plan = strategy.plan_for(graph)
            idle = idle_axes(graph, plan)
            if idle or prod(n for _, n in plan.mesh) != case.devices:
                why = why or f"axis {', '.join(idle)} idle"
                continue
            tried.append((graph, plan, describe(plan, attempt)))
            if (0, identity(graph, plan, 0)) not in seen:
                break
            why = why or "same as a row above"
        chosen = next(
            (
                t
                for level in (0, 1, 2)
                for t in tried
                if (level, identity(t[0], t[1], level)) not in seen
            ),
            None,
        )
        if chosen is not None:
            seen |= {(level, identity(chosen[0], chosen[1], level)) for level in (0, 1, 2)}
        yield name, chosen[1] if chosen else None, chosen[2] if chosen else why


def describe(plan: Plan, attempt: Attempt) -> str:
    """Mesh and techniques, `*` after what was pinned; "without" the factors that were forbidden."""
    pins = attempt.pins
    star = lambda key: "*" if key in pins.techniques else ""  # noqa: E731
    mesh = ",".join(f"{a}={n}" for a, n in plan.mesh) + ("*" if pins.mesh else "")
    parts = [
        f"zero={plan.zero_stage}{star('zero_stage')}" if plan.zero_stage else "",
        f"recompute={plan.recompute}{star('recompute')}" if plan.recompute != "none" else "",
        f"micro={plan.microbatches}{star('microbatches')}" if plan.microbatches > 1 else "",
        f"without {','.join(sorted(pins.forbidden_factors))}*" if pins.forbidden_factors else "",
    ]
    return " ".join([mesh, *(p for p in parts if p)])


@dataclass
class Row:
    """One line of the table. error: of outputs (inference) or of the loss; update: of parameters
    after one step (training); runtime: error against onnxruntime (inference)."""

    model: str
    workload: str
    strategy: str
    backend: str
    plan: str
    error: float | None = None
    gradients: float | None = None
    update: float | None = None
    runtime: float | None = None
    worst: str = ""
    seconds: float = 0.0
    failure: str = ""

    @property
    def ok(self) -> bool:
        """Ran, with every error its workload has, each within its bound."""
        bounds = {
            "train": (
                (self.error, TOLERANCE),
                (self.gradients, TOLERANCE),
                (self.update, TOLERANCE),
            ),
            "infer": ((self.error, TOLERANCE), (self.runtime, RUNTIME_TOLERANCE)),
        }
        return (
            not self.failure
            and self.workload in bounds
            and all(e is not None and e <= bound for e, bound in bounds[self.workload])
        )


def run_case(
    case: Case, workload: str, names: tuple[str, ...], backends: tuple[str, ...]
) -> Iterator[Row | str]:
    """Rows, and lines of talk, of one model and workload. Needs jax and the devices."""
    from planner.verify.numerics import Twin, seeded_values
    from planner.workload.weights import load

    model = case.model(workload)
    graph = model.graph(1)
    feeds = {
        **feeds_for(graph),
        **feeds_for(model.plain),
    }  # the model's own inputs, and what the loss reads
    stored = load(model.plain, model.folder, seed_missing=True)
    if isinstance(
        model, Shrunk
    ):  # cut out of a file without weights, whose few stored ones may hold anything
        stored = {
            k: v
            for k, v in stored.items()
            if k not in {model.plain.labels[n] for n in model.plain.trainable}
        }
    values = seeded_values(model.plain, stored)
    wanted: list[np.ndarray] | None = None
    if workload == "infer":
        yield from about(case, model)
        try:
            outs, what = onnxruntime_outputs(model, values, feeds)
            wanted = [
                o
                for name, o in zip(model.plain.outputs, outs, strict=True)
                if name in graph.outputs
            ]
            yield f"  onnxruntime ran the {what}"
        except (
            Exception
        ) as e:  # onnxruntime's own exceptions have no base of their own; the row says which
            yield Row(case.name, workload, "onnxruntime", "-", "", failure=first_line(e))
    twins = {1: Twin(graph, workload, values)}
    said = False
    if workload == "train":
        yield from trained(model, graph, twins[1].trained)
    base = GraphFacts.of(graph, training=workload == "train")
    if EXCHANGE in names and not any(
        exchanges(base, {a: n for a, (n,) in t.pins.mesh.items()})
        for t in attempts(EXCHANGE, case.devices, False, case.batch)
    ):
        names = tuple(n for n in names if n != EXCHANGE)
    for name, plan, what in strategies(case, model, names):
        if plan is None:
            yield from (
                Row(case.name, workload, name, backend, "", failure=what) for backend in backends
            )
            continue
        micro = plan.microbatches
        twins[micro] = twins.get(micro) or Twin(model.graph(micro), workload, values)
        batch = {k: pieces(v, micro) for k, v in feeds.items()} if micro > 1 else feeds
        for backend in backends:
            row = Row(case.name, workload, name, backend, what)
            started = time.monotonic()
            try:
                found = _measure(row, model.graph(micro), plan, values, batch, twins[micro], wanted)
                if found.blind and not said:
                    said = True
                    yield (
                        f"  of {found.compared} gradients {len(found.blind)} are below 1e-7 of the"
                        f" largest, where zeros would pass: {listed(found.blind)}"
                    )
            except (
                Exception
            ) as e:  # a program that cannot run is a row of the table, not the end of it
                row.failure = first_line(e)
            row.seconds = round(time.monotonic() - started, 1)
            yield row


def _measure(
    row: Row,
    graph: Graph,
    plan: Plan,
    values: Mapping[str, np.ndarray],
    batch: Mapping[str, np.ndarray],
    twin: Any,
    wanted: list[np.ndarray] | None,
) -> Any:
    from planner.verify.numerics import compare

    train = row.workload == "train"
    found, outs = compare(
        graph,
        plan,
        workload=row.workload,
        backend=row.backend,
        values=values,
        batch=batch,
        twin=twin,
        step=train,
    )
    row.error, row.worst = found.outputs, found.worst
    row.gradients, row.update = (found.gradients, found.update) if train else (None, None)
    row.runtime = (
        max(distance(o, r) for o, r in zip(outs, wanted, strict=True))
        if wanted is not None
        else None
    )
    return found


def trained(model: Model, graph: Graph, compared: frozenset[str]) -> Iterator[str]:
    """A line about which parameters have gradients to compare. Raises RuntimeError when those of
    the unsharded program are not the graph's."""
    expected = {graph.labels[n] for n in graph.trainable}
    if compared != expected:
        raise RuntimeError(
            f"gradients of {listed(sorted(compared ^ expected))} would not be compared"
        )
    plain = model.plain
    frozen = [
        plain.labels[n]
        for n in plain.weights
        if plain.labels[n] not in expected and plain.tensors[n].is_float
    ]
    yield (
        f"  gradients of {len(expected)} parameters compared;"
        f" {f'{len(frozen)} not trained: {listed(frozen)}' if frozen else 'every parameter is trained'}"
    )


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first few names."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def pieces(value: np.ndarray, micro: int) -> np.ndarray:
    """A batch by microbatch; a scalar (a seed) differs in each."""
    return (
        value.reshape(micro, -1, *value.shape[1:])
        if value.ndim
        else value + np.arange(micro, dtype=value.dtype)
    )


def first_line(e: Exception) -> str:
    """An exception in one line."""
    return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """max |got - want| / max |want|; shapes must agree."""
    if got.shape != want.shape:
        return float("inf")
    a, b = got.astype(np.float64), want.astype(np.float64)
    error = float(np.abs(a - b).max()) / max(float(np.abs(b).max()), 1e-30) if b.size else 0.0
    return error if error == error else float("inf")


def about(case: Case, model: Model) -> Iterator[str]:
    """Lines that say what runs: parameters, dims, inputs, loss."""
    from planner.workload.loss import default_loss

    plain = model.plain
    inputs = ", ".join(f"{n}{list(plain.tensors[n].shape)}" for n in plain.inputs)
    dims = ", ".join(f"{k}={v}" for k, v in {**plain.dims, **case.dims}.items())
    yield (
        f"{case.name}: {plain.parameters:,} parameters, {dims}; inputs {inputs}; loss"
        f" {default_loss(plain)}"
    )
    for note in plain.notes:
        if note.startswith("shrunk from"):
            yield f"  {note}"
