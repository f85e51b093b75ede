"""Runs an emitted program and its unsharded twin on the same values and compares outputs, loss,
every gradient and the update, in float32.

Needs jax and as many (virtual) devices as the plan's mesh. Error of a tensor g against r: max|g -
r| / max(max|r|, 1e-3 * max over all gradients of max|r|); for outputs max|o - r| / max|r|. A
gradient the program does not have, has beside the twin's, or has in another shape is an infinite
error. With microbatches the twin runs them one after another and takes the mean.

Step: the program's own optimizer makes one step from zero moments; its first moment is a tenth of
the gradient, which is read from there, and its update is held against AdamW's formula. With the
usual epsilon a first update is the sign of the gradient, noise where gradients are noise: epsilon
is set to the largest gradient, and the learning rate high enough that rounding of p - update hides
nothing. Error of an update as of a gradient.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.emit.program import emit
from planner.emit.tables import initial_mean
from planner.emit.writer import Program, Training
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.ops.loss import counted_rows
from planner.verify.failure import remember

Values = Mapping[str, np.ndarray]
FLOOR = 1e-3
"""Of the largest gradient: what smaller ones are measured against."""
BLIND = 1e-4 * FLOOR
STEP_RATE = 1e3
"""Learning rate of the step that is checked: parameters are noise beside their update."""


@dataclass(frozen=True)
class Comparison:
    """Largest errors found and where (a label or an output). update: of the parameters after one
    step, None when none was made.

    compared: gradients compared. blind: labels of those whose reference is so small (below BLIND of
    the largest gradient) that zeros would pass.
    """

    outputs: float
    gradients: float
    worst: str
    loss: float
    reference_loss: float
    update: float | None = None
    compared: int = 0
    blind: tuple[str, ...] = ()


def load_program(
    program: Program, name: str = "emitted", compute: str = "float32"
) -> types.ModuleType:
    """Execute a program's text as a module, computing in `compute`, with its constants in place of
    the file it would read."""
    import jax.numpy as jnp

    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    text = re.sub(r"^CONSTANTS = .*$", "CONSTANTS = GIVEN_CONSTANTS", program.text, flags=re.M)
    module.__dict__["GIVEN_CONSTANTS"] = dict(program.constants)
    remember(f"{name}.py", text)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    module.__dict__["COMPUTE"] = jnp.dtype(compute)
    if compute == "float32":
        module.__dict__["STATE"] = jnp.dtype(compute)  # as --float32 does
    return module


def seeded_values(graph: Graph, values: Values, seed: int = 0) -> dict[str, np.ndarray]:
    """label -> array for every weight: that of `values` where there is one, else seeded normal
    (norm scales and variances around one)."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name in graph.weights:
        label, t = graph.labels.get(name, name), graph.tensors[name]
        fresh = (
            rng.normal(0, 0.02, t.shape) + initial_mean(graph, name)
            if t.is_float
            else np.zeros(t.shape)
        )
        value = values.get(label)
        arrays[label] = np.asarray(fresh if value is None else value).astype(
            "float32" if t.is_float else {"int64": "int32"}.get(t.dtype, t.dtype)
        )
    return arrays


def seeded_batch(module: types.ModuleType, inputs: Values, seed: int = 0) -> dict[str, np.ndarray]:
    """The program's synthetic batch, with `inputs` in place of synthetic ones."""
    return {
        **module.synthetic_batch(seed),
        **{k: v for k, v in inputs.items() if k in module.INPUTS},
    }


# Many parameters: a plan, what it is checked with, and programs that are there already.
def compare(
    graph: Graph,
    plan: Plan,
    *,
    workload: str,
    backend: str,
    values: Values,
    batch: Values | None = None,
    unroll: bool = False,
    twin: Twin | None = None,
    step: bool = False,
    program: Program | None = None,
) -> tuple[Comparison, list[np.ndarray]]:
    """Compare one program with the unsharded one (`twin`: one made before from the same graph,
    workload and values, to compile it once).

    values: label -> array of every weight. batch: input -> array (with microbatches, their count is
    the first dim); what is missing is seeded. step: compile the whole training step and check what
    it does to the parameters, instead of gradients alone. program: the plan's, where it was emitted
    before. Returns the errors and the program's outputs (inference), unpadded.
    """
    program = program or emit(
        graph,
        plan,
        workload=workload,  # type: ignore[arg-type]
        backend=backend,  # type: ignore[arg-type]
        unroll=unroll,
        training=Training(),
    )
    module = load_program(program)
    feeds = seeded_batch(module, batch or {})
    mesh = module.make_mesh()
    params, frozen = (
        placed(module, program, table, values, mesh) for table in ("PARAMS", "FROZEN")
    )
    data = module.place(feeds, module.specs_of(module.INPUTS), mesh)
    plain = twin or Twin(graph, workload, values)
    if workload == "train":
        arrays = params, frozen, data
        wanted = plain.gradients(_of_microbatches(feeds, plan.islands), plan.microbatches)
        return _compared_gradients(module, program, arrays, wanted, step), []
    outs = [np.asarray(o) for o in module.make_inference(mesh)(params, frozen, data)]
    references = plain.outputs(feeds)
    errors = [_error(o, r, 0.0) for o, r in zip(outs, references, strict=True)]
    worst = max(errors, default=0.0)
    where = graph.outputs[errors.index(worst)] if errors else ""
    cropped = [
        o[tuple(slice(0, n) for n in r.shape)] for o, r in zip(outs, references, strict=True)
    ]
    return Comparison(
        outputs=worst, gradients=0.0, worst=where, loss=0.0, reference_loss=0.0
    ), cropped


def _of_microbatches(feeds: Values, islands: Sequence[int]) -> Values:
    """A program's inputs by microbatch: of islands without those that none of them runs."""
    most = max(islands, default=0)
    run = [i * most + turn for i, turns in enumerate(islands) for turn in range(turns)]
    return {key: value[run] for key, value in feeds.items()} if islands else feeds


def _compared_gradients(
    module: types.ModuleType,
    program: Program,
    arrays: tuple[Any, Any, Any],
    wanted: tuple[Any, Mapping[str, np.ndarray]],
    step: bool,
) -> Comparison:
    """Loss and gradients of a program beside those of the unsharded one (`wanted`), or with `step`
    those behind a whole training step. arrays: parameters, frozen weights and batch."""
    want_loss, want = wanted
    top = max((float(np.abs(g).max()) for g in want.values() if g.size), default=0.0)
    update = None
    if step:
        loss, gradients, update = _step(module, program, arrays, want, top)
    else:
        loss, grads = module.make_gradients(module.make_mesh())(*arrays)
        gradients = unstacked(module, program, grads, want)
    worst, where = worst_error(gradients, want)
    if update is not None and update[0] > worst:
        where = f"update of {update[1]}"
    return Comparison(
        outputs=_error(np.asarray(loss), want_loss, 0.0),
        gradients=worst,
        worst=where,
        loss=float(loss),
        reference_loss=float(want_loss),
        update=update and update[0],
        compared=len(want),
        blind=tuple(
            label for label, g in want.items() if g.size and float(np.abs(g).max()) <= BLIND * top
        ),
    )


def _step(
    module: types.ModuleType,
    program: Program,
    arguments: tuple[Any, Any, Any],
    want: Values,
    top: float,
) -> tuple[Any, dict[str, np.ndarray], tuple[float, str]]:
    """(loss, gradients by label, (error of the update, its label)) of one step; see the module
    docstring. Parameters are used up."""
    import jax
    import jax.numpy as jnp

    params, frozen, data = arguments
    mesh, old, epsilon = (
        module.make_mesh(),
        unstacked(module, program, params, want),
        max(top, 1e-30),
    )
    module.__dict__.update(
        LEARNING_RATE=STEP_RATE, EPSILON=epsilon
    )  # read when the step is traced, below
    cuts = {key: module.state_at(mesh, row[-1]) for key, row in module.GRADIENTS.items()}
    unpadded = {
        key: np.asarray(p)[tuple(slice(0, n) for n in module.PARAMS[key][0])]
        for key, p in params.items()
    }
    state = jax.jit(module.start_state, out_shardings=cuts)(
        module.place(unpadded, module.specs_of(module.GRADIENTS), mesh)
    )
    state |= module.state_beside(mesh)
    new, moments, loss, *_ = module.make_step(mesh)(params, state, frozen, data, jnp.float32(1))
    gradients = unstacked(
        module,
        program,
        {key: np.asarray(moments[key][0]) / (1 - module.BETA1) for key in params},
        want,
    )
    moved, wanted = {}, {}
    spared = {
        label
        for key, labels in program.labels.items()
        for label in labels
        if module.NO_DECAY & {key, label}
    }
    for label, p in unstacked(module, program, new, want).items():
        before, g = old[label].astype(np.float64), gradients[label].astype(np.float64)
        moved[label] = (before - p) / STEP_RATE
        wanted[label] = g / (np.abs(g) + epsilon)
        wanted[label] += module.WEIGHT_DECAY * before * (label not in spared)
    return loss, gradients, worst_error(moved, wanted)


class Twin:
    """The unsharded program on one device: no splits, no mesh, nothing stacked."""

    def __init__(self, graph: Graph, workload: str, values: Values) -> None:
        self.graph = graph
        program = emit(graph, Plan((), {}), workload=workload, unroll=True)  # type: ignore[arg-type]
        self.module = load_program(program, "unsharded")
        self.labels = {key: names[0] for key, names in program.labels.items()}
        self._compiled: Any = None
        self.params, self.frozen = (
            {k: values[self.labels[k]] for k in getattr(self.module, table)}
            for table in ("PARAMS", "FROZEN")
        )

    @property
    def trained(self) -> frozenset[str]:
        """Labels of the parameters that get a gradient."""
        return frozenset(self.labels[k] for k in self.module.PARAMS)

    def gradients(
        self, feeds: Values, microbatches: int = 1
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(mean loss, label -> gradient)."""
        import jax

        run = self._compiled = self._compiled or jax.jit(jax.value_and_grad(self.module.loss_of))
        pieces = [
            {k: v[i] if microbatches > 1 else v for k, v in feeds.items()}
            for i in range(microbatches)
        ]
        with jax.default_device(jax.devices()[0]):
            results = [
                run(self.params, self.frozen, {k: p[k] for k in self.module.INPUTS}) for p in pieces
            ]
        weights = self._rows(pieces) if microbatches > 1 and counted_rows(self.graph) else None
        loss, grads = jax.tree.map(
            lambda *parts: np.average([np.asarray(x) for x in parts], 0, weights), *results
        )
        return loss, {self.labels[k]: g for k, g in grads.items()}

    def _rows(self, pieces: list[dict[str, np.ndarray]]) -> list[int]:
        """Rows that count in the loss of each microbatch, by its labels (by numpy: the program has
        its own way). All 1 where none counts anywhere."""
        loss = self.graph.nodes[self.graph.producer[self.graph.outputs[0]]]
        name, first = loss.inputs[1], 0
        while name in self.graph.producer:  # shifted: the first label of a sequence is no row's
            name, first = self.graph.nodes[self.graph.producer[name]].inputs[0], 1
        counts = [
            int(((p[name][:, first:] if first else p[name]) != loss.attrs["ignore_index"]).sum())
            for p in pieces
        ]
        return counts if any(counts) else [1] * len(counts)

    def outputs(self, feeds: Values) -> list[np.ndarray]:
        """Outputs of an inference graph."""
        import jax

        run = self._compiled = self._compiled or jax.jit(self.module.forward)
        with jax.default_device(jax.devices()[0]):
            return [
                np.asarray(o)
                for o in run(self.params, self.frozen, {k: feeds[k] for k in self.module.INPUTS})
            ]


def placed(
    module: types.ModuleType, program: Program, table: str, values: Values, mesh: Any
) -> Any:
    """The parameters of a program's table on its mesh, from label -> array; repeats of a block
    stacked, weights of uneven stages packed."""
    rows = getattr(module, table)
    arrays_by_key = {}
    for key, row in rows.items():
        if hasattr(module, "STAGE_BUFFERS"):
            arrays_by_key[key] = module.packed(
                key, row, {label: values[label] for label in program.labels[key]}
            )
            continue
        arrays = [values[label] for label in program.labels[key]]
        arrays_by_key[key] = np.stack(arrays).reshape(row[0]) if row[2] else arrays[0]
    return module.place(arrays_by_key, module.specs_of(rows), mesh)


def unstacked(
    module: types.ModuleType, program: Program, values: Mapping[str, Any], want: Values
) -> dict[str, np.ndarray]:
    """label -> array of a program's parameters or gradients: repeats and what is packed apart,
    padding left out where `want` says how large an array is."""
    arrays: dict[str, np.ndarray] = {}
    for key, value in values.items():
        if hasattr(module, "STAGE_BUFFERS"):
            row = module.PARAMS[key]
            arrays |= module.unpacked(
                key, row, np.asarray(value)[tuple(slice(0, n) for n in row[0])]
            )
            continue
        names, array_of_key = program.labels[key], np.asarray(value)
        extra_dims = array_of_key.ndim - want.get(names[0], array_of_key).ndim
        stacked = len(names) > 1 or extra_dims > 0
        array_of_key = (
            array_of_key.reshape(-1, *array_of_key.shape[2:]) if extra_dims > 1 else array_of_key
        )  # in chunks, each with a piece of every pipeline stage
        for label, array in zip(
            names, array_of_key[: len(names)] if stacked else [array_of_key], strict=True
        ):  # stages that do not divide the repeats pad them
            shape = want.get(label, array).shape
            arrays[label] = (
                array[tuple(slice(0, n) for n in shape)] if array.ndim == len(shape) else array
            )
    return arrays


def worst_error(values: Values, want: Values) -> tuple[float, str]:
    """The largest error of gradients (or updates) and its label."""
    for label in (*want, *values):
        if label not in values or label not in want or values[label].shape != want[label].shape:
            return float("inf"), label
    top = max((float(np.abs(g).max()) for g in want.values() if g.size), default=0.0)
    errors = {label: _error(values[label], want[label], FLOOR * top) for label in want}
    where = max(errors, key=lambda label: errors[label], default="")
    return errors.get(where, 0.0), where


def _error(got: Any, want: np.ndarray, floor: float) -> float:
    got = np.asarray(got)[tuple(slice(0, n) for n in want.shape)] if want.ndim else np.asarray(got)
    if got.shape != want.shape:
        return float("inf")  # a shape that broadcasts is a wrong shape
    if not want.size:
        return 0.0
    got, want = got.astype(np.float64), want.astype(np.float64)
    error = float(np.abs(got - want).max()) / max(float(np.abs(want).max()), floor, 1e-30)
    return error if error == error else float("inf")  # a NaN must not hide behind a maximum
