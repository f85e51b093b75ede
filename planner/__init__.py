"""Meshwright: an offline planner for distributed deep learning."""
