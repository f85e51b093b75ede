"""Planning never imports jax: looked up in the list of imported modules of a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(text: str) -> list[str]:
    """Standard output of a program run in the repository, in lines."""
    return subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_planning_never_imports_jax() -> None:
    text = (
        "import sys, planner; planner.plan('zoo:mlp', devices=4); print(*sorted(m for m in"
        " sys.modules if m.split('.')[0] in ('jax', 'jaxlib', 'planner')))"
    )
    (line,) = run(text)
    modules = line.split()
    assert "planner.search.search" in modules
    assert not [m for m in modules if m.startswith("jax")]


def test_opening_the_package_is_light() -> None:
    (line,) = run(
        "import sys, planner; print('-', *(m for m in ('jax', 'onnx', 'scipy', 'ortools', 'numba')"
        " if m in sys.modules))"
    )
    assert line.split() == ["-"]
