"""What every program has: tables, mesh, weights, batches, checkpoints and main."""
