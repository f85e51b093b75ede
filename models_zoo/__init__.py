"""Model families as real ONNX graphs whose weights are nowhere: `build("zoo:llama3-70b,layers=8")`.

See `models_zoo.builder` for how they are written, `models_zoo.spec` for how a spec reads, and one
module per family.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from models_zoo.hub_names import preset_meant
from models_zoo.spec import Family, Value, make, parse_options, split_spec
from planner.errors import PlanError, did_you_mean

if TYPE_CHECKING:
    import onnx

__all__ = ["build", "families", "find", "listed", "parse", "preset_named", "presets", "with_cache"]


MODULES = (
    "mlp",
    "gpt",
    "llama",
    "moe",
    "deepseek",
    "gemma4",
    "bert",
    "modernbert",
    "t5",
    "whisper",
    "vit",
    "resnet",
    "unet",
    "dit",
    "dlrm",
    "ssm",
    "hybrid",
    "lstm",
)


def families() -> Iterator[Family]:
    """All families, in a fixed order; each is loaded when it is come to."""
    return (import_module(f"models_zoo.{name}").FAMILY for name in MODULES)


def listed() -> Iterator[tuple[Family, str]]:
    """Every preset: its family and its name; other names of the same presets are left out."""
    yield from ((family, name) for family in families() for name in family.presets)
    named = _named_configs()
    yield from ((named.family_of(name), name) for name in named.names())


def presets() -> dict[str, str]:
    """Preset name -> one line about it."""
    return {name: family.presets[name].description for family, name in listed()}


def _named_configs() -> Any:
    """models_zoo.named_configs, which loads all families that a config.json may be of: when no
    family of the list has a name."""
    return import_module("models_zoo.named_configs")


def parse(spec: str) -> tuple[str, str, dict[str, Value]]:
    """ "zoo:llama3-70b,layers=8,seq=4k" -> ("llama", "llama3-70b", {"layers": 8, "seq": 4096}).

    The prefix "zoo:" may be left out. Raises PlanError: P070 unknown preset, P071 unknown option or
    bad value.
    """
    family, name, values = find(spec)
    return family.name, name, values


def build(spec: str) -> onnx.ModelProto:
    """The ONNX model of a spec.

    Dim 0 of every input is the symbol "batch" (metadata "default_batch" holds the preset's), or a
    number with batch=N; all else is static. Weights are float32 and refer to an absent weights.bin;
    weights=inline writes seeded values instead. Raises PlanError: P070 unknown preset, P071 unknown
    option or bad value, P072 too large, P073 sizes that do not go together.
    """
    family, name, values = find(spec)
    return make(family, name, family.presets[name], values)


def with_cache(spec: str) -> str:
    """The spec of the same model with a cache of keys and values: the spec itself where it says
    that already, or the model is written without. Raises PlanError P070, P071."""
    family, name, values = find(spec)
    config = family.configure(family.presets[name], values)
    has = getattr(config, "may_cache", False) and "cache" not in values
    return f"{spec},cache=1" if has else spec


def find(spec: str) -> tuple[Family, str, dict[str, Value]]:
    """Family, name of the preset and options of a spec. Raises PlanError: P070 unknown preset, P071
    unknown option or bad value."""
    name, given = split_spec(spec)
    if (family := _family_of(name)) is not None:
        return family, name, parse_options(family, given)
    if (other := _named_configs().aliases().get(name)) is not None:
        return find(",".join([other, *(f"{option}={text}" for option, text in given.items())]))
    if other := preset_named(name):
        return find(",".join([other, *(f"{option}={text}" for option, text in given.items())]))
    inside = [p for family in families() if family.name == name for p in family.presets]
    known = _all_names()
    hint = did_you_mean(name, inside or known)
    raise PlanError(
        "P070",
        f"no zoo preset {name!r}",
        help=[
            *([hint] if hint else []),
            "a Hugging Face config.json of other models is planned as it is: plan config.json",
            f"presets: {', '.join(inside)}"
            if inside
            else f"`python -m models_zoo` lists the {len(known)} presets",
        ],
    )


def preset_named(name: str) -> str:
    """The preset that another spelling means, or a name on the Hugging Face hub
    (models_zoo.hub_names): "llama3.1-8b" of "meta-llama/Llama-3.1-8B-Instruct"; "" for none."""
    return preset_meant(name, _all_names())


def _all_names() -> list[str]:
    """The presets and their other names."""
    return [*presets(), *_named_configs().aliases()]


def _family_of(name: str) -> Family | None:
    """The family that has a preset, None where none has."""
    those = (family for family in families() if name in family.presets)
    return next(those, None) or _named_configs().family_of(name)
