"""What an inference program does when it is run."""

from __future__ import annotations

import time

import jax

from planner.emit.runtime.files.frame import (
    command_line,
    computed,
    initial_values,
    make_mesh,
    place,
    say,
    specs_of,
    stored_weights,
    synthetic_batch,
)
from planner.emit.runtime.files.tables import FROZEN, INPUTS, PARAMS
from planner.emit.runtime.step.infer_shard_map import make_inference


def main():
    """Run the model --steps times on synthetic data."""
    args = command_line()
    mesh = make_mesh()
    weights = stored_weights(args, PARAMS, FROZEN)
    params, frozen = (
        place(computed(initial_values(t, args.seed + i, weights)), specs_of(t), mesh)
        for i, t in enumerate((PARAMS, FROZEN))
    )
    run = make_inference(mesh)
    for i in range(args.steps):
        batch = place(computed(synthetic_batch(args.seed + i)), specs_of(INPUTS), mesh)
        start = time.perf_counter()
        outputs = jax.block_until_ready(run(params, frozen, batch))
        shapes = ", ".join(str(o.shape) for o in outputs)
        say(f"step {i}  outputs {shapes}  {1e3 * (time.perf_counter() - start):.1f} ms")


if __name__ == "__main__":
    main()
