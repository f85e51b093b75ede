"""One row of `benchmarks.techniques` in a process of its own: the program's figures beside the compiler's, and three optimizer steps beside the unsharded program's.

    python -m benchmarks.technique_run STRATEGY.json SOURCE ANSWER.json        (with as many virtual CPU devices as the plan has)

Three steps of AdamW from seeded parameters, each on a batch of its own. The unsharded program gives loss and gradients at its own parameters, which numpy moves by
AdamW in float64. Compared in every step: the loss, every gradient (read from the program's first moments, m' = 0.9 m + 0.1 g) and every parameter after the step.
AdamW divides by the root of its second moment, so that where a gradient is noise the usual epsilon makes its sign a step of full length: epsilon is set to the largest
gradient of the first step, and the rate to 0.01, half the spread of the seeded parameters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 3
RATE = 0.01
BETA1, BETA2 = 0.9, 0.999


def errors(graph: Any, plan: Any, source_values: dict[str, np.ndarray]) -> dict[str, float]:
    """{"loss", "gradients", "parameters": largest relative error in any of the steps}, as `planner.verify.numerics` measures."""
    import jax
    import jax.numpy as jnp

    from planner.emit.program import Training, emit
    from planner.verify.numerics import Twin, load_program, placed, seeded_batch, unstacked, worst_error

    program = emit(graph, plan, workload="train", training=Training())
    module, twin = load_program(program), Twin(graph, "train", source_values)
    mesh = module.make_mesh()
    params, frozen = (placed(module, program, table, source_values, mesh) for table in ("PARAMS", "FROZEN"))
    trained = {label: np.asarray(source_values[label], np.float64) for label in sorted(twin.trained)}
    moments = {label: (np.zeros_like(p), np.zeros_like(p)) for label, p in trained.items()}
    worst, before = {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}, {label: np.zeros_like(p) for label, p in trained.items()}
    state: Any = None
    step: Any = None
    for count in range(1, STEPS + 1):
        feeds = seeded_batch(module, {}, count)
        twin.params = {key: trained[twin.labels[key]].astype(np.float32) for key in twin.params}
        loss, gradients = twin.gradients(feeds, plan.microbatches)
        if state is None:
            epsilon = max(float(np.abs(g).max()) for g in gradients.values() if g.size)
            module.__dict__.update(LEARNING_RATE=RATE, EPSILON=epsilon)  # read when the step is traced
            whole = {key: np.asarray(p)[tuple(slice(0, n) for n in module.PARAMS[key][0])] for key, p in params.items()}
            cuts = {key: module.state_at(mesh, row[-1]) for key, row in module.GRADIENTS.items()}
            state = jax.jit(module.start_state, out_shardings=cuts)(module.place(whole, module.specs_of(module.GRADIENTS), mesh))
            step = module.make_step(mesh)
        params, state, found = step(params, state, frozen, module.place(feeds, module.specs_of(module.INPUTS), mesh), jnp.float32(count))
        first = unstacked(module, program, {key: np.asarray(m[0]) for key, m in state.items()}, gradients)
        own = {label: (m - BETA1 * before[label]) / (1 - BETA1) for label, m in first.items()}
        before = first
        for label, g in gradients.items():
            m, v = moments[label]
            m, v = moments[label] = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * np.square(np.float64(g))
            p = trained[label]
            trained[label] = p - RATE * ((m / (1 - BETA1**count)) / (np.sqrt(v / (1 - BETA2**count)) + epsilon) + module.WEIGHT_DECAY * p)
        worst["loss"] = max(worst["loss"], abs(float(found) - float(loss)) / abs(float(loss)))
        worst["gradients"] = max(worst["gradients"], worst_error(own, gradients)[0])
        worst["parameters"] = max(worst["parameters"], worst_error(unstacked(module, program, params, gradients), trained)[0])
    return worst


def main(strategy_file: str, source: str, answer: str) -> int:
    """Figures, peak and errors of one strategy, written as JSON."""
    from planner.strategy import Strategy
    from planner.verify.numerics import seeded_values
    from planner.verify.worker import compile_program, figures, recorded_model
    from planner.weights import load

    strategy = Strategy.load(strategy_file)
    model = recorded_model(strategy, source)
    graph = model.graph(int(strategy.techniques["microbatches"]))
    plan = strategy.plan_for(graph)
    compiled = compile_program(graph, plan, "train", "shard_map", model.workload.optimizer)
    rows = figures(graph, plan, compiled, "train", "shard_map", model.workload.optimizer, int(strategy.costs["memory_per_device_bytes"]))
    apart = {f.what: [f.predicted, f.compiled] for f in rows if not f.ok}
    found = errors(graph, plan, seeded_values(graph, load(graph, model.folder, seed_missing=True)))
    Path(answer).write_text(json.dumps({"errors": found, "differs": apart, "judged": sum(f.judged for f in rows), "peak_bytes": compiled.peak_bytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
