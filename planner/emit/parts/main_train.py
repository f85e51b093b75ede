"""What a training program does when it is run."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from planner.emit.parts.adamw import start_state
from planner.emit.parts.frame import command_line, computed, initial_values, make_mesh, place, specs_of, stored_weights, synthetic_batch
from planner.emit.parts.step_shard_map import make_step
from planner.emit.parts.tables import FROZEN, GRADIENTS, INPUTS, PARAMS


def main():
    """Train for --steps steps on synthetic data."""
    args = command_line()
    mesh = make_mesh()
    weights = stored_weights(args, PARAMS, FROZEN)
    values = initial_values(PARAMS, args.seed, weights)
    params = place(computed(values), specs_of(PARAMS), mesh)
    frozen = place(computed(initial_values(FROZEN, args.seed + 1, weights)), specs_of(FROZEN), mesh)
    state = jax.jit(start_state, out_shardings={key: NamedSharding(mesh, row[-1]) for key, row in GRADIENTS.items()})(place(values, specs_of(GRADIENTS), mesh))
    step = make_step(mesh)
    for i in range(args.steps):
        batch = place(computed(synthetic_batch(args.seed + i)), specs_of(INPUTS), mesh)
        start = time.perf_counter()
        params, state, loss = step(params, state, frozen, batch, jnp.float32(i + 1))
        loss.block_until_ready()
        print(f"step {i}  loss {float(loss):.6f}  {1e3 * (time.perf_counter() - start):.1f} ms", flush=True)


if __name__ == "__main__":
    main()
