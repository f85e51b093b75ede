"""Runs an emitted program and its unsharded twin on the same values and compares outputs, loss and every gradient.

Needs jax and as many (virtual) devices as the plan's mesh: `planner.verify.worker` runs it in a process of its own.
Error of a tensor g against r: max|g - r| / max(max|r|, 1e-3 * max over all gradients of max|r|); for outputs max|o - r| / max|r|.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.emit.program import Program, Training, emit
from planner.flow import Plan
from planner.graph import Graph


@dataclass(frozen=True)
class Comparison:
    """Largest errors found and where; `values` are the unsharded outputs (inference) for a further check against another runtime."""

    outputs: float
    gradients: float
    worst: str
    loss: float
    reference_loss: float


def load_program(program: Program, name: str = "emitted") -> types.ModuleType:
    """Execute a program's text as a module, with its constants in place of the file it would read."""
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    text = re.sub(r"^CONSTANTS = .*$", "CONSTANTS = GIVEN_CONSTANTS", program.text, flags=re.M)
    module.__dict__["GIVEN_CONSTANTS"] = dict(program.constants)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


def seeded_values(graph: Graph, given: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """label -> array for every weight: given values where there are any, else seeded normal (norm scales and variances around one)."""
    from planner.emit.skeleton import initial_mean

    rng = np.random.default_rng(seed)
    out = {}
    for name in graph.weights:
        label, t = graph.labels.get(name, name), graph.tensors[name]
        fresh = rng.normal(0, 0.02, t.shape) + initial_mean(graph, name) if t.is_float else np.zeros(t.shape)
        value = given.get(label)
        out[label] = np.asarray(fresh if value is None else value).astype("float32" if t.is_float else {"int64": "int32"}.get(t.dtype, t.dtype))
    return out


def seeded_batch(module: types.ModuleType, given: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """The program's synthetic batch, with given inputs in place of synthetic ones."""
    return {**module.synthetic_batch(seed), **{k: v for k, v in given.items() if k in module.INPUTS}}


def compare(graph: Graph, plan: Plan, *, workload: str, backend: str, values: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray] | None = None,
            unroll: bool = False, reference: Graph | None = None, known: dict[str, Expected] | None = None) -> tuple[Comparison, list[np.ndarray]]:  # fmt: skip
    """Compare one program with the unsharded one. Returns the errors and the program's outputs (inference), unpadded.

    reference: the graph of the whole batch, where `graph` is that of one microbatch. known: unsharded results by workload, filled and reused
    between calls with the same graph, values and batch.
    """

    program = emit(graph, plan, workload=workload, backend=backend, unroll=unroll, training=Training())  # type: ignore[arg-type]
    module = load_program(program)
    feeds = seeded_batch(module, batch or {})
    mesh = module.make_mesh()
    trees = {}
    for table in ("PARAMS", "FROZEN"):
        rows = getattr(module, table)
        trees[table] = module.place({k: _stack([values[x] for x in program.labels[k]], len(row[0])) for k, row in rows.items()}, rows, mesh)
    data = module.place(feeds, module.INPUTS, mesh)
    known = {} if known is None else known
    if workload not in known:
        known[workload] = expected(reference or graph, workload, values, feeds)
    wanted = known[workload]
    if workload == "train":
        loss, grads = module.make_gradients(mesh)(trees["PARAMS"], trees["FROZEN"], data)
        want = wanted.gradients
        top = max((float(np.abs(g).max()) for g in want.values() if g.size), default=0.0)
        worst, where = 0.0, ""
        for key, g in grads.items():
            names, whole = program.labels[key], np.asarray(g)
            stacked = whole.ndim > want[names[0]].ndim
            for j, label in enumerate(names):
                got = whole[j] if stacked else whole
                error = _error(got, want[label], 1e-3 * top)
                if not error <= worst:
                    worst, where = error, label
        return Comparison(_error(np.asarray(loss), wanted.loss, 0.0), worst, where, float(loss), float(wanted.loss)), []
    outs = [np.asarray(o) for o in module.make_inference(mesh)(trees["PARAMS"], trees["FROZEN"], data)]
    errors = [_error(o, r, 0.0) for o, r in zip(outs, wanted.outputs, strict=True)]
    worst = max(errors, default=0.0)
    where = graph.outputs[errors.index(worst)] if errors else ""
    cropped = [o[tuple(slice(0, n) for n in r.shape)] for o, r in zip(outs, wanted.outputs, strict=True)]
    return Comparison(worst, 0.0, where, 0.0, 0.0), cropped


@dataclass(frozen=True)
class Expected:
    """What the unsharded program gives: outputs (inference), or loss and gradients by label (training)."""

    outputs: tuple[np.ndarray, ...]
    loss: np.ndarray
    gradients: Mapping[str, np.ndarray]


def expected(graph: Graph, workload: str, values: Mapping[str, np.ndarray], feeds: Mapping[str, np.ndarray]) -> Expected:
    """Run the unsharded program on one device. values by weight label, feeds by input name."""
    import jax

    plain = _reference(graph, workload)
    alone = {k: feeds[k] for k in plain.INPUTS}
    flat = {t: {k: values[row[2][0]] for k, row in getattr(plain, t).items()} for t in ("PARAMS", "FROZEN")}
    with jax.default_device(jax.devices()[0]):
        if workload == "infer":
            outs = jax.jit(plain.forward)(flat["PARAMS"], flat["FROZEN"], alone)
            return Expected(tuple(np.asarray(o) for o in outs), np.zeros(()), {})
        loss, grads = jax.jit(jax.value_and_grad(plain.loss_of))(flat["PARAMS"], flat["FROZEN"], alone)
    return Expected((), np.asarray(loss), {plain.PARAMS[k][2][0]: np.asarray(g) for k, g in grads.items()})


def _reference(graph: Graph, workload: str) -> types.ModuleType:
    """The unsharded program: no splits, no mesh."""
    return load_program(emit(graph, Plan((), {}), workload=workload, unroll=True), "unsharded")  # type: ignore[arg-type]


def _stack(arrays: list[np.ndarray], rank: int) -> np.ndarray:
    return np.stack(arrays) if arrays[0].ndim < rank else arrays[0]


def _error(got: Any, want: np.ndarray, floor: float) -> float:
    got = np.asarray(got)[tuple(slice(0, n) for n in want.shape)] if want.ndim else np.asarray(got)
    if not want.size:
        return 0.0
    got, want = got.astype(np.float64), want.astype(np.float64)
    error = float(np.abs(got - want).max()) / max(float(np.abs(want).max()), floor, 1e-30)
    return error if error == error else float("inf")  # a NaN anywhere must not hide behind a maximum
