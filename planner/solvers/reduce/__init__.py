"""Exact reduction: a smaller problem with the same optimum, and the way back."""
