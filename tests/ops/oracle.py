"""The oracle: an operator under any split equals the unsharded kernel, in outputs and in gradients.

The text that is emitted is the text that is run here: one node goes through
planner.execution.layout_flow and planner.emit.body, is compiled under shard_map on a 2x4 mesh, and
is compared with the same kernel on one device. All candidates of an operator compile in one
function.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from planner.emit.body import Body
from planner.emit.source import helper_sources, user_function
from planner.emit.text import spec_text
from planner.execution.layout_flow import derive
from planner.execution.plan import Plan
from planner.graph.ir import Graph, Node, Tensor
from planner.ops.attention_pairs import QUERY_BLOCK
from planner.ops.lookup import rule_of
from planner.sharding.candidates import candidates
from planner.sharding.layout import Layout, padded
from planner.sharding.rule import Rule, Split, legal

MESH = (("data", 2), ("model", 4))


@dataclass(frozen=True)
class Case:
    """One operator on given operands; `values` are float (normal), or explicit arrays for integers
    and booleans. query_block: how many queries a block of attention has here, 0 for as many as in
    programs; with few, short sequences go through the code of long ones."""

    name: str
    op: str
    inputs: tuple[object, ...]
    outputs: tuple[tuple[int, ...], ...]
    attrs: dict
    dtypes: tuple[str, ...] = ("float32",)
    constants: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    bodies: tuple[Graph, ...] = ()
    query_block: int = 0


def build(case: Case) -> tuple[Graph, dict[str, np.ndarray]]:
    """A one-node graph with every float operand trainable, and values for its operands."""
    rng = np.random.default_rng(sum(map(ord, case.name)))
    values, tensors = {}, {}
    names = []
    for i, spec in enumerate(case.inputs):
        if spec is None:
            names.append("")
            continue
        array = (
            rng.normal(size=spec).astype(np.float32)
            if isinstance(spec, tuple)
            else np.asarray(spec)
        )
        trained = array.dtype == np.float32 and i not in case.frozen
        role = "constant" if i in case.constants else "weight" if trained else "input"
        values[f"x{i}"] = array
        tensors[f"x{i}"] = Tensor(f"x{i}", array.shape, str(array.dtype), role)
        names.append(f"x{i}")
    outs = tuple(f"y{i}" for i in range(len(case.outputs)))
    for i, (o, shape) in enumerate(zip(outs, case.outputs, strict=True)):
        tensors[o] = Tensor(o, shape, case.dtypes[i % len(case.dtypes)])
    node = Node("node", case.op, tuple(names), outs, case.attrs, bodies=case.bodies)
    weights = tuple(n for n in tensors if tensors[n].role == "weight")
    graph = Graph(
        "oracle",
        (node,),
        tensors,
        tuple(n for n in tensors if tensors[n].role == "input"),
        outs,
        weights=dict.fromkeys(weights),
        constants={n: values[n] for n in tensors if tensors[n].role == "constant"},
        trainable=frozenset(weights),
    )
    return graph, values


def orders(split: Split) -> list[Split]:
    """The split with the axes of every multi-axis factor in both orders."""
    choices = [[(f, p) for p in itertools.permutations(axes)] for f, axes in split.pairs]
    return [Split.of(dict(c)) for c in itertools.product(*choices)]


def all_splits(case: Case) -> list[Split]:
    """Every candidate, axis orders included; pending axes are covered by conversions, not here."""
    graph, _ = build(case)
    rule, reason = rule_of(graph.nodes[0], graph)
    assert not reason, reason
    found = []
    for split in candidates(rule, dict(MESH)):
        if any(f == "+" for f, _ in split.pairs):
            continue
        found += [s for s in orders(split) if legal(rule, s, dict(MESH))]
    return found


def program(
    case: Case, splits: list[Split], rule: Rule | None = None
) -> tuple[str, Graph, dict[str, np.ndarray]]:
    """Source with one function per split: operands (padded, local) -> outputs and gradients."""
    graph, values = build(case)
    rules = (rule or rule_of(graph.nodes[0], graph)[0],)
    grad = frozenset(n for n in graph.trainable) | frozenset(
        o for o in graph.outputs if graph.tensors[o].is_float
    )
    grad = grad if any(graph.tensors[o].is_float for o in graph.outputs) else frozenset()
    text, helpers = [], set()
    for i, split in enumerate(splits):
        flow = derive(graph, Plan(MESH, {"node": split}), training=True, rules=rules, grad=grad)
        body = Body(flow, "shard_map", helpers=helpers, counter=[i * 1000])
        names = [n for n in graph.nodes[0].inputs if n and n not in graph.constants]
        floats = [n for n in names if n in grad]
        for n in names:
            hub = flow.trees[n].shared_layout
            body.bind(n, hub, n)
            body.bind(n, flow.source[n], n)
        body.node(0)
        results = [body.value(o, flow.source[o].stored) for o in graph.outputs]
        hubs = {n: flow.trees[n].shared_layout for n in names}
        fans = {n: hubs[n].grad_partial for n in floats}
        specs = {n: Layout(hubs[n].dims) for n in names}
        outs = [flow.source[o].stored for o in graph.outputs]
        text.append(f"def local_{i}({', '.join([*names, 'cts'])}):")
        text.append(f"    def f({', '.join(floats)}):")
        text += [f"        {line}" for line in body.lines]
        text.append("        total = jnp.zeros(())")
        for k, (o, layout) in enumerate(zip(graph.outputs, outs, strict=True)):
            if o in grad:
                axes = tuple(a for a in ("data", "model") if any(a in d for d in layout.dims))
                term = f"jnp.sum({results[k]} * cts[{k}])"
                text.append(
                    f"        total = total + ({f'lax.psum({term}, {axes!r})' if axes else term})"
                )
        text.append(f"        return total, ({', '.join(results)},)")
        varied = ", ".join(
            f"lax.pcast({n}, {fans[n]!r}, to='varying')" if fans[n] else n for n in floats
        )
        if floats and grad:
            slots = tuple(range(len(floats)))
            text.append(
                f"    (_, outs), grads = jax.value_and_grad(f, {slots}, has_aux=True)({varied})"
            )
            reduced = ", ".join(
                f"lax.psum(grads[{j}], {fans[n]!r})" if fans[n] else f"grads[{j}]"
                for j, n in enumerate(floats)
            )
            text.append(f"    return outs, ({reduced},)")
        else:
            text.append(f"    return f({varied})[1], ()")
        grads_spec = "".join(spec_text(specs[n]) + ", " for n in floats) if floats and grad else ""
        text.append(
            f"run_{i} = (local_{i},"
            f" ({''.join(spec_text(specs[n]) + ', ' for n in names)}({''.join(spec_text(o) + ', ' for o in outs)})),"
            f" (({''.join(spec_text(o) + ', ' for o in outs)}), ({grads_spec})),"
            f" {[specs[n].dims for n in names]!r}, {[o.dims for o in outs]!r})"
        )
    header = [
        "import functools",
        "import jax",
        "import jax.numpy as jnp",
        "import numpy as np",
        "from jax import lax",
        "from jax.ad_checkpoint import checkpoint_name",
        "from jax.experimental.layout import Layout, with_layout_constraint",
        "from jax.sharding import PartitionSpec as P",
    ]
    header += [user_function(n) for n in graph.nodes if n.op == "UserLoss"]
    helping = "\n".join(helper_sources(helpers))
    if case.query_block:
        own = f"QUERY_BLOCK = {QUERY_BLOCK}\n"
        assert own in helping
        helping = helping.replace(own, f"QUERY_BLOCK = {case.query_block}\n")
    return "\n".join([*header, helping, *text]), graph, values


def pad(array: np.ndarray, dims) -> np.ndarray:
    mesh = dict(MESH)
    if array.ndim == 0:
        return array
    return np.pad(
        array, [(0, padded(s, a, mesh) - s) for s, a in zip(array.shape, dims, strict=True)]
    )


def mismatch(case: Case, splits: list[Split], rule: Rule | None = None) -> list[str]:
    """Descriptions of every split whose outputs or gradients differ from the unsharded kernel
    (relative 1e-4); empty when all agree."""
    import jax

    text, graph, values = program(case, [Split(), *splits], rule)
    space: dict = {"CONSTANTS": {f"c{i}": v for i, v in enumerate(graph.constants.values())}}
    exec(compile(text, case.name, "exec"), space)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(1)
    cts = [rng.normal(size=graph.tensors[o].shape).astype(np.float32) for o in graph.outputs]
    names = [n for n in graph.nodes[0].inputs if n and n not in graph.constants]
    jobs, feeds = [], []
    for i in range(len(splits) + 1):
        local, in_specs, out_specs, in_dims, out_dims = space[f"run_{i}"]
        jobs.append(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
        feeds.append(
            (
                *(pad(values[n], d) for n, d in zip(names, in_dims, strict=True)),
                tuple(pad(c, d) for c, d in zip(cts, out_dims, strict=True)),
            )
        )
    results = jax.jit(
        lambda all_feeds: [job(*feed) for job, feed in zip(jobs, all_feeds, strict=True)]
    )(feeds)
    results = jax.tree.map(np.asarray, results)
    floats = [n for n in names if n in graph.trainable]
    wrong = []
    (ref_out, ref_grad), *rest = results
    top = max([float(np.abs(g).max()) for g in ref_grad], default=0.0)
    for split, (outs, grads) in zip(splits, rest, strict=True):
        for label, ref, got, floor in (
            *((o, r, g, 0.0) for o, r, g in zip(graph.outputs, ref_out, outs, strict=True)),
            *(
                (f"d{n}", r, g, 1e-3 * top)
                for n, r, g in zip(floats, ref_grad, grads, strict=False)
            ),
        ):
            got = got[tuple(slice(0, s) for s in ref.shape)]
            scale = max(float(np.abs(ref.astype(np.float64)).max()), floor, 1e-30)
            error = float(np.abs(got.astype(np.float64) - ref.astype(np.float64)).max()) / scale
            if not error <= 1e-4:
                wrong.append(f"{case.name} {split.as_dict()} {label}: {error:.2g}")
    return wrong
