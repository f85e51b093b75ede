"""Meshwright: an offline planner for distributed deep learning.

strategy = planner.plan("model.onnx", devices=64)       # no jax imported
print(strategy); strategy.save("model.plan.json")
source = planner.emit(strategy, "model.onnx", backend="shard_map")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner import emit
    from planner.api import Strategy, plan
    from planner.errors import PlanError
    from planner.from_jax import from_jax

__all__ = ["PlanError", "Strategy", "emit", "from_jax", "plan"]
_HOMES = {
    "plan": "planner.api",
    "Strategy": "planner.api",
    "PlanError": "planner.errors",
    "from_jax": "planner.from_jax",
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when first used, so that importing the package costs nothing."""
    import importlib

    if name == "emit":  # the package is callable, see planner.emit
        return importlib.import_module("planner.emit")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'planner' has no attribute {name!r}")
