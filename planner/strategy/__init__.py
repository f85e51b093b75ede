"""The plan as a file: types, schema, reading, checking, difference, JAX shardings."""
