"""A traced jax function as a graph."""
