"""JAX functions as models to plan: `from_jax` (planner.jaxpr.plan) traces a function and plans it like any other graph. The only room of planning that imports jax."""
