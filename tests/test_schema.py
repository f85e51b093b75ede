"""The shipped JSON Schema is the one the types give, accepts what is written and refuses what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import planner
from planner import schema

ROOT = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = {
    "zoo:mlp-tiny": {"devices": 4},
    "zoo:gpt-tiny": {"devices": 8, "batch": 16, "pins": "dp=4,tp=2"},
    "zoo:resnet-tiny": {"devices": 4, "batch": 8, "workload": "infer"},
    "zoo:llama-tiny": {"devices": 3, "batch": 6, "lora": "rank=4,targets=*q_proj*"},
}


def test_the_shipped_file_is_current() -> None:
    assert (ROOT / "planner" / "strategy.schema.json").read_text() == schema.text(), "python -m planner.schema > planner/strategy.schema.json"


@pytest.mark.parametrize("spec", CASES)
def test_what_is_planned_is_accepted(spec: str) -> None:
    jsonschema.validate(json.loads(planner.plan(spec, **CASES[spec]).to_json()), schema.schema())


def test_baselines_are_accepted_and_faults_are_not() -> None:
    for path in sorted((ROOT / "benchmarks" / "baselines").glob("*.json")):
        table = json.loads(path.read_text())
        jsonschema.validate(table, schema.schema())
    for fault in ({"mesh": [{"name": "data"}]}, {"format_version": "2.0"}, {"cost": {**table["cost"], "fit": "maybe"}}, {"nodes": {"a": {}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(table | fault, schema.schema())
