"""One row of `benchmarks.techniques` in a process of its own: the program's figures beside the
compiler's, and three optimizer steps beside the unsharded program's.

    python -m benchmarks.technique_run STRATEGY.json SOURCE ANSWER.json        (with as many virtual
        CPU devices as the plan has)

The training step is compiled once, repeated blocks as loops (as `plan emit` writes them): what is
judged against the prediction is what runs.

Three steps of AdamW from seeded parameters, each on a batch of its own. The unsharded program gives
loss and gradients at its own parameters, which numpy moves by AdamW in float64. Compared in every
step: the loss, every gradient (read from the program's first moments, m' = 0.9 m + 0.1 g) and every
parameter after the step. AdamW divides by the root of its second moment, so that where a gradient
is noise the usual epsilon makes its sign a step of full length: epsilon is set to the largest
gradient of the first step, and the rate to 0.01, half the spread of the seeded parameters.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 3
RATE = 0.01
BETA1, BETA2 = 0.9, 0.999

Arrays = dict[str, np.ndarray]


class Reference:
    """The unsharded program under AdamW: float32 gradients, moments and updates in float64.
    Parameters by label."""

    def __init__(self, graph: Any, values: Arrays, microbatches: int) -> None:
        from planner.verify.numerics import Twin

        self.twin, self.microbatches = Twin(graph, "train", values), microbatches
        self.parameters = {
            label: np.asarray(values[label], np.float64) for label in sorted(self.twin.trained)
        }
        self.moments = {
            label: (np.zeros_like(p), np.zeros_like(p)) for label, p in self.parameters.items()
        }

    def gradients(self, feeds: Arrays) -> tuple[np.ndarray, Arrays]:
        """(loss, gradients) of a batch at the parameters of now."""
        self.twin.params = {
            key: self.parameters[self.twin.labels[key]].astype(np.float32)
            for key in self.twin.params
        }
        return self.twin.gradients(feeds, self.microbatches)

    def update(self, gradients: Arrays, count: int, epsilon: float, decay: float) -> None:
        """Step number `count` (from 1)."""
        spared = {self.twin.labels[key] for key in self.twin.module.NO_DECAY}
        for label, g in gradients.items():
            m, v = self.moments[label]
            m, v = self.moments[label] = (
                BETA1 * m + (1 - BETA1) * g,
                BETA2 * v + (1 - BETA2) * np.square(np.float64(g)),
            )
            p, pull = self.parameters[label], decay * (label not in spared)
            self.parameters[label] = p - RATE * (
                (m / (1 - BETA1**count)) / (np.sqrt(v / (1 - BETA2**count)) + epsilon) + pull * p
            )


def started(program: Any, module: types.ModuleType, values: Arrays) -> tuple[Any, Any, Any]:
    """(parameters, optimizer state, frozen weights) on the program's mesh."""
    import jax

    from planner.verify.numerics import placed

    mesh = module.make_mesh()
    params, frozen = (
        placed(module, program, table, values, mesh) for table in ("PARAMS", "FROZEN")
    )
    whole = {
        key: np.asarray(p)[tuple(slice(0, n) for n in module.PARAMS[key][0])]
        for key, p in params.items()
    }
    cuts = {key: module.state_at(mesh, row[-1]) for key, row in module.GRADIENTS.items()}
    return (
        params,
        jax.jit(module.start_state, out_shardings=cuts)(
            module.place(whole, module.specs_of(module.GRADIENTS), mesh)
        ),
        frozen,
    )


def compare(
    program: Any, module: types.ModuleType, step: Any, reference: Reference, values: Arrays
) -> dict[str, float]:
    """{"loss", "gradients", "parameters": largest relative error in any of the steps}, as
    `planner.verify.numerics` measures. step: the compiled one of `module`."""
    import jax.numpy as jnp

    from planner.verify.numerics import seeded_batch, unstacked, worst_error

    mesh = module.make_mesh()
    params, state, frozen = started(program, module, values)
    worst, before = (
        {"loss": 0.0, "gradients": 0.0, "parameters": 0.0},
        {label: np.zeros_like(p) for label, p in reference.parameters.items()},
    )
    for count in range(1, STEPS + 1):
        feeds = seeded_batch(module, {}, count)
        loss, gradients = reference.gradients(feeds)
        params, state, found = step(
            params,
            state,
            frozen,
            module.place(feeds, module.specs_of(module.INPUTS), mesh),
            jnp.float32(count),
        )
        first = unstacked(
            module, program, {key: np.asarray(m[0]) for key, m in state.items()}, gradients
        )
        own = {label: (m - BETA1 * before[label]) / (1 - BETA1) for label, m in first.items()}
        before = first
        reference.update(gradients, count, module.EPSILON, module.WEIGHT_DECAY)
        worst["loss"] = max(worst["loss"], abs(float(found) - float(loss)) / abs(float(loss)))
        worst["gradients"] = max(worst["gradients"], worst_error(own, gradients)[0])
        worst["parameters"] = max(
            worst["parameters"],
            worst_error(unstacked(module, program, params, gradients), reference.parameters)[0],
        )
    return worst


def main(strategy_file: str, source: str, answer: str) -> int:
    """Figures, peak and errors of one strategy, written as JSON."""
    from planner.emit.program import emit
    from planner.emit.writer import Training
    from planner.strategy.strategy import Strategy
    from planner.verify.compiled import compile_module
    from planner.verify.numerics import load_program, seeded_batch, seeded_values
    from planner.verify.predicted import predict
    from planner.verify.worker import figures, measured, recorded_model
    from planner.workload.weights import load

    strategy = Strategy.load(strategy_file)
    model = recorded_model(strategy, source)
    graph = model.graph(int(strategy.techniques["microbatches"]))
    plan, optimizer = strategy.plan_for(graph), model.workload.optimizer
    program = emit(graph, plan, workload="train", training=Training(optimizer))
    module, values = (
        load_program(program),
        seeded_values(graph, load(graph, model.folder, seed_missing=True)),
    )
    reference = Reference(graph, values, plan.microbatches)
    _, gradients = reference.gradients(seeded_batch(module, {}, 1))
    module.__dict__.update(
        LEARNING_RATE=RATE,
        EPSILON=max(float(np.abs(g).max()) for g in gradients.values() if g.size),
    )  # read when the step is traced
    step = compile_module(module, "train")
    compiled = measured(step)
    rows = figures(
        predict(graph, plan, workload="train", optimizer=optimizer),
        plan,
        compiled,
        "shard_map",
        int(strategy.costs["memory_per_device_bytes"]),
    )
    found = {
        "errors": compare(program, module, step, reference, values),
        "differs": {f.what: [f.predicted, f.compiled] for f in rows if not f.ok},
        "judged": sum(f.judged for f in rows),
        "peak_bytes": compiled.peak_bytes,
    }
    Path(answer).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
