"""The shipped JSON Schemas are those the types give, accept what is written and refuse what is
wrong."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import planner
from planner.errors import PlanError
from planner.execution.techniques import TECHNIQUES
from planner.pins.file_types import PinTechniques
from planner.pins.pins import from_table
from planner.strategy import schema

ROOT = Path(__file__).parents[2]
CASES: dict[str, dict[str, Any]] = {
    "zoo:mlp-tiny": {"devices": 4},
    "zoo:gpt-tiny": {"devices": 8, "batch": 16, "pins": "dp=4,tp=2"},
    "zoo:resnet-tiny": {"devices": 4, "batch": 8, "workload": "infer"},
    "zoo:llama-tiny": {"devices": 3, "batch": 6, "lora": "rank=4,targets=*q_proj*"},
}


@pytest.mark.parametrize("kind", schema.FILES)
def test_the_shipped_file_is_current(kind: str) -> None:
    assert (ROOT / "planner" / f"{kind}.schema.json").read_text() == schema.text(kind), (
        f"python -m planner.strategy.schema {kind} > planner/{kind}.schema.json"
    )


def test_shipped_topologies_are_accepted_and_faults_are_not() -> None:
    table = {}
    for path in sorted((ROOT / "costmodels" / "hardware" / "topologies").glob("*.toml")):
        table = tomllib.loads(path.read_text())
        jsonschema.validate(table, schema.schema("topology"))
    level = table["level"][0]
    for fault in (
        {"devices": 8},
        {"level": [{**level, "bandwith": "1 GB/s"}]},
        {"level": [{**level, "kind": "ring"}]},
        {"level": [{**level, "bandwidth": 450e9}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(table | fault, schema.schema("topology"))


def test_pins_are_accepted_as_the_reader_takes_them() -> None:
    table = {
        "mesh": {"model": {"size": 8}, "data": [4, 8], "stage": 2},
        "techniques": {
            "zero_stage": 1,
            "recompute": "selective",
            "microbatches": 4,
            "tensor": "megatron",
        },
        "forbid": {"factors": ["s"]},
        "layers.*.mlp.up": {"split": {"n": ["model"], "k": []}},
        "x": {"layout": [["data"], []]},
    }
    jsonschema.validate(table, schema.schema("pins"))
    from_table(table)
    for fault in (
        {"techniques": {"zero": 1}},
        {"techniques": {"zero_stage": 4}},
        {"mesh": {"model": "8"}},
        {"x": {"splits": {}}},
        {"x": 3},
        {"mesh": {"model": {"sizes": 8}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(table | fault, schema.schema("pins"))
        with pytest.raises(PlanError):
            from_table(table | fault)


def test_every_technique_of_a_pin_is_in_its_schema() -> None:
    assert PinTechniques.__annotations__.keys() == {t.name for t in TECHNIQUES if t.pin_type}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("spec", CASES)
def test_what_is_planned_is_accepted(spec: str) -> None:
    jsonschema.validate(json.loads(planner.plan(spec, **CASES[spec]).to_json()), schema.schema())


def test_baselines_are_accepted_and_faults_are_not() -> None:
    for path in sorted((ROOT / "benchmarks" / "baselines").glob("*.json")):
        table = json.loads(path.read_text())
        jsonschema.validate(table, schema.schema())
    for fault in (
        {"mesh": [{"name": "data"}]},
        {"format_version": "2.0"},
        {"cost": {**table["cost"], "fit": "maybe"}},
        {"nodes": {"a": {}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(table | fault, schema.schema())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rows"),
    [({}, 20), pytest.param({"fold": False, "solver": "recursive"}, 2000, marks=pytest.mark.slow)],
)
def test_files_of_deep_models_are_small_and_change_by_the_line(
    how: dict[str, Any], rows: int
) -> None:
    """A model of a hundred layers, with blocks folded or every layer's decisions apart: under 2 MB,
    and a decision is a line."""
    s = planner.plan(
        "zoo:gpt-tiny,layers=100",
        devices=8,
        batch=16,
        pins="dp=2,tp=4,zero=1,recompute=none,micro=1",
        baselines=False,
        **how,
    )
    text = s.to_json()
    assert len(text.encode()) < 2_000_000 and len(s.nodes) > rows
    name = next(n for n, row in s.nodes.items() if row["op"] == "MatMul")
    changed = replace(
        s, nodes={**s.nodes, name: {**s.nodes[name], "split": {"n": ["data"]}}}
    ).to_json()
    pairs = [(a, b) for a, b in zip(text.splitlines(), changed.splitlines(), strict=True) if a != b]
    assert len(pairs) == 1 and all(line.lstrip().startswith(f'"{name}"') for line in pairs[0])
