"""Nodes that exporters spell out, put together into one operator: attention, experts, norms."""
