"""The training step: gradients, how they are reduced over devices, and the optimizer."""
