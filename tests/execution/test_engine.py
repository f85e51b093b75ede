"""Which engine runs a plan is decided in one place."""

import re
from dataclasses import replace
from pathlib import Path

import planner
from planner.execution.engine import Engine, engine_of
from planner.execution.plan import Plan

WHOLE = Plan(mesh=(("data", 4),), splits={})


def test_the_engine_of_a_plan() -> None:
    staged = replace(WHOLE, mesh=(("stage", 2), ("data", 2)), schedule="1f1b")
    assert engine_of(WHOLE) is Engine.WHOLE
    assert engine_of(staged) is Engine.EVEN
    assert engine_of(replace(staged, stage_cuts=(3,))) is Engine.UNEVEN


def test_nobody_else_decides_by_the_stage_cuts() -> None:
    root = Path(planner.__file__).parent
    asks = re.compile(r"\b(if|not|and|or)\b[^\n]*\.stage_cuts\b")
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if asks.search(path.read_text())
    }
    # The second writes the field of the file that holds the cuts.
    assert found == {"execution/engine.py", "search/to_strategy.py"}
