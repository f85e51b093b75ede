"""docs/operators.md is what the tables say today."""

from __future__ import annotations

from pathlib import Path

from planner.onnx_backend.handlers import HANDLERS
from planner.ops import OPERATORS
from tests.ops.operator_page import onnx_rows, page


def test_the_page_is_current() -> None:
    written = (Path(__file__).parents[2] / "docs" / "operators.md").read_text()
    assert written == page(), "regenerate it: python -m tests.ops.operator_page > docs/operators.md"


def test_every_operator_is_on_the_page() -> None:
    text = page()
    assert not [op for op in OPERATORS if f"\n| {op} | `" not in text]
    rows = onnx_rows()
    assert len(rows) > 190 and not [r for r in rows if r.endswith("| no |")]
    names = {r.split("|")[1].strip() for r in rows}
    assert {op for domain, op in HANDLERS if not domain} <= names
