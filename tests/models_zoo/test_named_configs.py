"""Presets that are told as a config.json tells them, and other names of presets."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

import models_zoo
from models_zoo.hf_config import from_config
from models_zoo.named_configs import FILE, aliases, names
from planner.errors import PlanError
from planner.workload.model import Model, Workload

TABLES = tomllib.loads(FILE.read_text())


@pytest.mark.parametrize("name", ["qwen3-8b", "gpt-oss-20b", "glm-4.5-air"])
def test_a_preset_is_what_its_config_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {field: value for field, value in TABLES[name].items() if field != "about"}
    path.write_text(json.dumps(fields))
    told = from_config(path, {"layers": "4"})
    preset = models_zoo.build(f"zoo:{name},layers=4")
    assert preset.graph.node == told.graph.node
    assert preset.graph.initializer == told.graph.initializer


@pytest.mark.parametrize("name", names())
def test_presets_take_the_options_of_their_family(name: str) -> None:
    family, found, values = models_zoo.find(f"zoo:{name},seq=2k,layers=5")
    config = family.configure(family.presets[found], values)
    assert (found, config.seq, config.layers) == (name, 2048, 5)


def test_another_name_is_the_same_preset() -> None:
    assert models_zoo.parse("zoo:llama3.1-8b,layers=2") == ("llama", "llama3-8b", {"layers": 2})
    for other, name in aliases().items():
        assert models_zoo.parse(other) == models_zoo.parse(name)
    with pytest.raises(PlanError, match="has no option"):
        models_zoo.find("zoo:deepseek-r1,stages=2")


def test_no_name_is_given_twice() -> None:
    own = [name for family in models_zoo.families() for name in family.presets]
    every = [*own, *names(), *aliases()]
    assert len(set(every)) == len(every)


def test_a_slip_of_the_keyboard_is_told_the_name() -> None:
    with pytest.raises(PlanError) as error:
        models_zoo.find("zoo:qwen3-8bb")
    assert "qwen3-8b" in error.value.help[0]


def test_what_a_preset_leaves_out_is_said() -> None:
    model = Model.open("zoo:gpt-oss-20b,layers=2", Workload(), 8)
    assert any("sinks" in line for line in model.left_out)
