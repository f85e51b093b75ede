"""Presets of published models that are told as a config.json tells them (named_configs.toml), and
other names of presets."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from models_zoo.hf_config import KNOWN
from models_zoo.hf_fields import Fields
from models_zoo.spec import Family, Preset

FILE = Path(__file__).with_suffix(".toml")


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    with FILE.open("rb") as file:
        return tomllib.load(file)


def aliases() -> Mapping[str, str]:
    """Other name -> the preset of the same shapes."""
    return _tables()["aliases"]


def names() -> tuple[str, ...]:
    """The presets."""
    return tuple(name for name in _tables() if name != "aliases")


def family_of(name: str) -> Family | None:
    """The family that a preset's model type is of, with this preset alone; None where there is no
    such preset."""
    if name not in names():
        return None
    fields = Fields(FILE.with_name(name), _tables()[name])
    family, config = KNOWN[fields.data["model_type"]](fields)
    preset = Preset(
        config, fields.data["about"], notes=tuple(fields.notes), left_out=tuple(fields.left_out)
    )
    return replace(family, presets={name: preset})
