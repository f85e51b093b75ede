"""Runs an emitted program and its unsharded twin on the same values and compares outputs, loss and every gradient, in float32.

Needs jax and as many (virtual) devices as the plan's mesh.
Error of a tensor g against r: max|g - r| / max(max|r|, 1e-3 * max over all gradients of max|r|); for outputs max|o - r| / max|r|.
With microbatches the twin runs them one after another and takes the mean.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.emit.program import Program, Training, emit
from planner.emit.tables import initial_mean
from planner.flow import Plan
from planner.graph import Graph

Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """Largest errors found and where (a label or an output)."""

    outputs: float
    gradients: float
    worst: str
    loss: float
    reference_loss: float


def load_program(program: Program, name: str = "emitted", compute: str = "float32") -> types.ModuleType:
    """Execute a program's text as a module, computing in `compute`, with its constants in place of the file it would read."""
    import jax.numpy as jnp

    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    text = re.sub(r"^CONSTANTS = .*$", "CONSTANTS = GIVEN_CONSTANTS", program.text, flags=re.M)
    module.__dict__["GIVEN_CONSTANTS"] = dict(program.constants)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    module.__dict__["COMPUTE"] = jnp.dtype(compute)
    return module


def seeded_values(graph: Graph, given: Values, seed: int = 0) -> dict[str, np.ndarray]:
    """label -> array for every weight: given values where there are any, else seeded normal (norm scales and variances around one)."""
    rng = np.random.default_rng(seed)
    out = {}
    for name in graph.weights:
        label, t = graph.labels.get(name, name), graph.tensors[name]
        fresh = rng.normal(0, 0.02, t.shape) + initial_mean(graph, name) if t.is_float else np.zeros(t.shape)
        value = given.get(label)
        out[label] = np.asarray(fresh if value is None else value).astype("float32" if t.is_float else {"int64": "int32"}.get(t.dtype, t.dtype))
    return out


def seeded_batch(module: types.ModuleType, given: Values, seed: int = 0) -> dict[str, np.ndarray]:
    """The program's synthetic batch, with given inputs in place of synthetic ones."""
    return {**module.synthetic_batch(seed), **{k: v for k, v in given.items() if k in module.INPUTS}}


def compare(graph: Graph, plan: Plan, *, workload: str, backend: str, values: Values, batch: Values | None = None,
            unroll: bool = False, twin: Twin | None = None) -> tuple[Comparison, list[np.ndarray]]:  # fmt: skip
    """Compare one program with the unsharded one (`twin`: one made before from the same graph, workload and values, to compile it once).

    values: label -> array of every weight. batch: input -> array (with microbatches, their count is the first dim); what is missing is seeded.
    Returns the errors and the program's outputs (inference), unpadded.
    """
    program = emit(graph, plan, workload=workload, backend=backend, unroll=unroll, training=Training())  # type: ignore[arg-type]
    module = load_program(program)
    feeds = seeded_batch(module, batch or {})
    mesh = module.make_mesh()
    params, frozen = (_place(module, program, table, values, mesh) for table in ("PARAMS", "FROZEN"))
    data = module.place(feeds, module.specs_of(module.INPUTS), mesh)
    plain = twin or Twin(graph, workload, values)
    if workload == "train":
        loss, grads = module.make_gradients(mesh)(params, frozen, data)
        want_loss, want = plain.gradients(feeds, plan.microbatches)
        worst, where = _worst_gradient(program, grads, want)
        return Comparison(_error(np.asarray(loss), want_loss, 0.0), worst, where, float(loss), float(want_loss)), []
    outs = [np.asarray(o) for o in module.make_inference(mesh)(params, frozen, data)]
    wanted = plain.outputs(feeds)
    errors = [_error(o, r, 0.0) for o, r in zip(outs, wanted, strict=True)]
    worst = max(errors, default=0.0)
    where = graph.outputs[errors.index(worst)] if errors else ""
    cropped = [o[tuple(slice(0, n) for n in r.shape)] for o, r in zip(outs, wanted, strict=True)]
    return Comparison(worst, 0.0, where, 0.0, 0.0), cropped


class Twin:
    """The unsharded program on one device: no splits, no mesh, nothing stacked."""

    def __init__(self, graph: Graph, workload: str, values: Values) -> None:
        program = emit(graph, Plan((), {}), workload=workload, unroll=True)  # type: ignore[arg-type]
        self.module = load_program(program, "unsharded")
        self.labels = {key: names[0] for key, names in program.labels.items()}
        self._compiled: Any = None
        self.params, self.frozen = ({k: values[self.labels[k]] for k in getattr(self.module, table)} for table in ("PARAMS", "FROZEN"))

    def gradients(self, feeds: Values, microbatches: int = 1) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(mean loss, label -> gradient)."""
        import jax

        run = self._compiled = self._compiled or jax.jit(jax.value_and_grad(self.module.loss_of))
        pieces = [{k: v[i] if microbatches > 1 else v for k, v in feeds.items()} for i in range(microbatches)]
        with jax.default_device(jax.devices()[0]):
            results = [run(self.params, self.frozen, {k: p[k] for k in self.module.INPUTS}) for p in pieces]
        loss, grads = jax.tree.map(lambda *parts: np.mean([np.asarray(x) for x in parts], 0), *results)
        return loss, {self.labels[k]: g for k, g in grads.items()}

    def outputs(self, feeds: Values) -> list[np.ndarray]:
        """Outputs of an inference graph."""
        import jax

        run = self._compiled = self._compiled or jax.jit(self.module.forward)
        with jax.default_device(jax.devices()[0]):
            return [np.asarray(o) for o in run(self.params, self.frozen, {k: feeds[k] for k in self.module.INPUTS})]


def _place(module: types.ModuleType, program: Program, table: str, values: Values, mesh: Any) -> Any:
    rows = getattr(module, table)
    whole = {}
    for key, row in rows.items():
        arrays = [values[label] for label in program.labels[key]]
        whole[key] = np.stack(arrays) if row[2] else arrays[0]
    return module.place(whole, module.specs_of(rows), mesh)


def _worst_gradient(program: Program, grads: Mapping[str, Any], want: Values) -> tuple[float, str]:
    top = max((float(np.abs(g).max()) for g in want.values() if g.size), default=0.0)
    worst, where = 0.0, ""
    for key, g in grads.items():
        names, whole = program.labels[key], np.asarray(g)
        for j, label in enumerate(names):
            error = _error(whole[j] if whole.ndim > want[label].ndim else whole, want[label], 1e-3 * top)
            if not error <= worst:
                worst, where = error, label
    return worst, where


def _error(got: Any, want: np.ndarray, floor: float) -> float:
    got = np.asarray(got)[tuple(slice(0, n) for n in want.shape)] if want.ndim else np.asarray(got)
    if not want.size:
        return 0.0
    got, want = got.astype(np.float64), want.astype(np.float64)
    error = float(np.abs(got - want).max()) / max(float(np.abs(want).max()), floor, 1e-30)
    return error if error == error else float("inf")  # a NaN must not hide behind a maximum
