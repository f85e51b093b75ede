"""`planner.from_jax`: a JAX function planned, and its shardings for `jax.jit`.

    planned = planner.from_jax(loss, params, ids, labels, devices=8)     arrays or
        jax.ShapeDtypeStruct, in any pytrees
    step = jax.jit(jax.value_and_grad(loss), in_shardings=planned.in_shardings)
    planned.strategy, planned.shardings(params), planned.shardings(optimizer_state, optimizer=True)

The first argument holds the parameters; the leading dim of the first leaf of the others is the
batch. A function with one number as its result is trained (that number is its loss), any other is
run. The whole batch is one microbatch and nothing is computed again, because `jax.jit` runs the
function as it is: the compiler places the collectives (runtime jax-jit) and keeps what
`jax.checkpoint` says. The precision is the function's own, too: the type that most of its products
are in, and that of its parameters.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from planner.errors import PlanError
from planner.graph.ir import Graph, WeightRef
from planner.pins.pins import Pins, parse_pins
from planner.reader import read_model
from planner.reader.draft.weight_transforms import stored_axes
from planner.reader.jax.precision import precision_of
from planner.reader.jax.random_bits import PRIMITIVES
from planner.reader.jax.trace import Trace, Value, number_of
from planner.strategy.jax_shardings import mesh_of, partition, shardings
from planner.strategy.strategy import Strategy


@dataclass(frozen=True)
class Planned:
    """A function's plan. rows: leaf of the parameters or of the other arguments -> its layout, as
    in a strategy's tensors. replicated: primitives without a translation -> how many of them are
    planned whole on every device."""

    strategy: Strategy
    rows: Mapping[str, Mapping[str, Any]]
    in_shardings: tuple[Any, ...]
    replicated: Mapping[str, int]

    def shardings(self, tree: Any, *, optimizer: bool = False) -> Any:
        """NamedSharding for every leaf of the parameters, or of an optimizer's state."""
        return shardings(self.strategy, tree, optimizer=optimizer, rows=self.rows)


def from_jax(
    fn: Callable[..., Any],
    params: Any,
    *inputs: Any,
    devices: int,
    pins: Any = None,
    runtime: str = "jax-jit",
    **options: Any,
) -> Planned:
    """Plan a function of parameters and inputs (module docstring). options: those of
    `planner.plan`.

    Raises PlanError: P195 for what cannot be traced, else as `planner.plan`.
    """
    import jax

    from planner.api import plan

    trace, leaves, tree, results = traced(fn, params, *inputs)
    data = [v for v in leaves if not v.parameter]
    train = len(results) == 1 and prod(results[0].shape) == 1 and "loss" not in options
    if not data or not data[0].shape:
        raise PlanError(
            "P195",
            "the function takes no batch: its second argument has no dims",
            help=["from_jax(fn, params, batch, ...)"],
        )
    proto = trace.model(data, results)
    if train:
        options = {
            "workload": "train",
            "loss": f"output:{proto.graph.output[0].name}",
            "trainable": ("+*",),
            **options,
        }
    options = {"workload": "infer", **options} if not train and "loss" not in options else options
    strategy = plan(
        proto,
        devices=devices,
        pins=_as_it_is(pins),
        runtime=runtime,
        batch=data[0].shape[0],
        **{"precision": precision_of(trace, leaves), **options},
    )
    rows = _rows(strategy, leaves, trace.stacked, read_model(proto))
    mesh = mesh_of(strategy)
    where = [
        partition(mesh, rows[v.parameter or v.name], dict(strategy.mesh_shape), False)
        for v in leaves
    ]
    return Planned(
        strategy, rows, tuple(jax.tree_util.tree_unflatten(tree, where)), dict(trace.replicated)
    )


def traced(
    fn: Callable[..., Any], params: Any, *inputs: Any
) -> tuple[Trace, list[Value], Any, list[Value]]:
    """The trace of a function, its arguments' leaves, their tree, and its results. Raises PlanError
    P195."""
    import jax

    shapes, tree = jax.tree_util.tree_flatten_with_path((params, *inputs))
    try:
        closed = jax.make_jaxpr(fn)(params, *inputs)
    except Exception as e:  # the user's function may raise anything
        reason = f"{type(e).__name__}: {e}".partition("\n")[0]
        raise PlanError(
            "P195",
            f"the function cannot be traced: {reason}",
            help=["jax.make_jaxpr(fn)(params, ...) says more"],
        ) from e
    words = list(inspect.signature(fn).parameters)
    trace = Trace(getattr(fn, "__name__", "function"), primitives=PRIMITIVES)
    leaves = [
        _leaf(path, aval, words) for (path, _), aval in zip(shapes, closed.in_avals, strict=True)
    ]
    return trace, leaves, tree, trace.jaxpr(closed.jaxpr, closed.consts, leaves)


def _as_it_is(pins: Any) -> Pins:
    """Pins, and what jax.jit does: one microbatch, nothing computed again."""
    pinned = pins if isinstance(pins, Pins) else parse_pins(pins)
    return replace(pinned, techniques={"microbatches": 1, "recompute": "none", **pinned.techniques})


def _leaf(path: Any, aval: Any, words: list[str]) -> Value:
    """An argument's leaf: parameters are called by their path, inputs by the argument's name and
    their path."""
    first, *rest = (str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
    number = int(first)
    name = (
        ".".join(rest)
        if number == 0
        else ".".join([words[number] if number < len(words) else f"input{number}", *rest])
    )
    name = name or "parameters"
    try:
        dtype = number_of(aval.dtype)
    except TypeError as e:
        raise PlanError(
            "P195",
            f"argument {name!r} is of type {aval.dtype}, which is no array of numbers",
            help=["arrays of numbers and keys are planned"],
        ) from e
    return Value(name, tuple(aval.shape), dtype, name if number == 0 else "")


def _rows(
    strategy: Strategy, leaves: list[Value], stacked: Mapping[str, int], graph: Graph
) -> dict[str, dict[str, Any]]:
    """Leaf -> layout in the leaf's own dims: the graph's weights may be transposed or reshaped. Of
    stacked weights that of the first iteration, the stack's own dim whole; of what the plan has no
    use for, none."""
    by_label = {row["label"]: name for name, row in strategy.tensors.items() if row.get("label")}
    out = {}
    for v in leaves:
        name = v.parameter or v.name
        one = f"{name}.0" if name in stacked else name
        tensor = by_label.get(one, one)
        own = _own_dims(
            strategy.tensors.get(tensor),
            v.shape[name in stacked :],
            graph.weights.get(tensor),
            dict(strategy.mesh_shape),
        )
        if name in stacked:
            zero = own.get("zero")
            own["layout"] = [[], *own["layout"]]
            own |= {"zero": {**zero, "dim": zero["dim"] + 1}} if zero else {}
        out[name] = {**own, "shape": list(v.shape), "label": name}
    return out


def _own_dims(
    row: Mapping[str, Any] | None,
    shape: tuple[int, ...],
    weight: WeightRef | None,
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """A row of a strategy's tensors in the dims of a leaf of that shape; whole where it has none.
    A ZeRO stage cuts what is kept, not what is computed with: where the dim it cuts is no dim of
    the leaf, or not a multiple, it cuts another one."""
    steps = () if weight is None else weight.transform
    if row is None or (not steps and len(row["layout"]) != len(shape)):
        return {"layout": [[]] * len(shape)}
    leaf_row = {key: value for key, value in row.items() if key != "zero"}
    cuts = [tuple(axes) for axes in row["layout"]]
    leaf_cuts = stored_axes(cuts, shape, steps)
    leaf_row["layout"] = [list(axes) for axes in leaf_cuts]
    if zero := row.get("zero"):
        zero_cuts = [tuple(zero["axes"]) if d == zero["dim"] else () for d in range(len(cuts))]
        first = [d for d, axes in enumerate(stored_axes(zero_cuts, shape, steps)) if axes]
        fits = [
            d
            for d in (*first, *sorted(range(len(shape)), key=lambda d: -shape[d]))
            if shape[d] % prod(sizes[a] for a in {*leaf_cuts[d], *zero["axes"]}) == 0
        ]
        leaf_row |= {"zero": {**zero, "dim": fits[0]}} if fits else {}
    return leaf_row


class _Module(types.ModuleType):
    """The public function has the name of its module: whichever of the two somebody holds, it can
    be called."""

    __call__ = staticmethod(from_jax)


sys.modules[__name__].__class__ = _Module
