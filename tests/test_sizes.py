"""No function over 60 lines and none with more than eight parameters, but with a reason beside it.

A reason is a comment right above the function (above its decorators) that begins `# Long: ` or
`# Many parameters: `.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("costmodels", "planner", "models_zoo")
MOST_LINES, MOST_PARAMETERS = 60, 8


def oversized() -> Iterator[tuple[str, str, int]]:
    """(what is too much, file::function, how much of it) of every function without a reason."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
                above = first
                while above and lines[above - 1].lstrip().startswith("#"):
                    above -= 1
                reasons = "\n".join(line.strip() for line in lines[above:first])
                name = f"{path.relative_to(ROOT)}::{node.name}"
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                a = node.args
                parameters = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)
                if length > MOST_LINES and "# Long: " not in reasons:
                    yield "long", name, length
                if parameters > MOST_PARAMETERS and "# Many parameters: " not in reasons:
                    yield "many parameters", name, parameters


def test_functions_are_short_and_take_few_parameters() -> None:
    assert list(oversized()) == []
