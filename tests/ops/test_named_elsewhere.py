"""An operator is named by its entry in planner/ops, by what writes graphs, and by nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

from planner.ops import OPERATORS

ROOT = Path(__file__).parents[2]
WRITERS = ("planner/ops/", "planner/reader/", "planner/onnx_backend/", "planner/emit/runtime/")
"""The table; the two that bring ONNX's operators to those of the table; and the kernels."""
REWRITES = {
    "planner/serving/latent.py",
    "planner/serving/quantize.py",
    "planner/serving/rewrite.py",
    "planner/serving/states.py",
    "planner/workload/lora.py",
    "planner/workload/loss.py",
    "planner/workload/train_eval_mode.py",
    "planner/workload/trainable.py",
}
"""They add nodes to graphs or put others in their place, and so say which."""
LEFT = {"planner/report/notation.py", "costmodels/frameworks/kernels.py"}
"""A saved plan is shown without numpy, which the table needs; formulas over numbers know no table.
May only shrink."""


def test_nothing_else_names_an_operator() -> None:
    found = set()
    for path in (
        p for package in ("planner", "costmodels") for p in (ROOT / package).rglob("*.py")
    ):
        name = str(path.relative_to(ROOT))
        if name.startswith(WRITERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in OPERATORS:
                found.add(name)
    assert found == REWRITES | LEFT
