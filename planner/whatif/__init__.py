"""Several searches compared: the gate, sweeps, remedies, and what pins or alike layers cost."""
