"""Specs: "zoo:llama3-8b,layers=8,seq=4k" -> (family, preset, overrides).

An option is a field of the family's configuration (a trailing "_" of a field name is not part of
the option's), or one of the common ones: batch (dim 0 of the inputs becomes this number instead of
the symbol "batch"), weights=inline|external, seed. Whole numbers may end in k (1024); switches are
0|1.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from models_zoo.builder import Net
from planner.errors import PlanError, did_you_mean

Value = int | float | str | bool
WHOLE_LIMIT = 10**9
LAYERS_LIMIT = 10_000  # nodes grow with these fields; beyond is a slip of the keyboard
_MAY_BE_ZERO = frozenset(
    {
        "seed",
        "first",
        "dense_layers",
        "shared_ff",
        "window",
        "chunk",
        "full_every",
        "full_shift",
        "window_from",
        "bare_every",
        "types",
    }
)
_LAYER_FIELDS = frozenset({"layers", "decoder_layers", "per_level"})


@dataclass(frozen=True)
class Preset:
    """A named configuration. `batch` is what a planner takes when the user gives none; notes,
    left_out: what the model's metadata says of it, a line each."""

    config: Any
    description: str
    batch: int = 8
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A builder, its configuration type (a frozen dataclass) and its presets."""

    name: str
    presets: Mapping[str, Preset]
    build: Callable[[Any, Net], None]

    @property
    def config_type(self) -> type:
        """The dataclass all presets share."""
        return type(next(iter(self.presets.values())).config)

    def configure(self, preset: Preset, values: Mapping[str, Value]) -> Any:
        """The preset's configuration with the options of this family among `values` applied."""
        fields = options(self.config_type)
        return dataclasses.replace(
            preset.config, **{fields[o][0]: v for o, v in values.items() if o in fields}
        )


@dataclass(frozen=True)
class Common:
    """Options of every family."""

    batch: int | None = None
    weights: Literal["external", "inline"] = "external"
    seed: int = 0


@cache
def options(config_type: type) -> dict[str, tuple[str, Any]]:
    """option -> (field, type) of a configuration type; fields that are records are none."""
    hints = get_type_hints(config_type)
    return {
        f.name.rstrip("_"): (f.name, hints[f.name])
        for f in dataclasses.fields(config_type)
        if not any(dataclasses.is_dataclass(t) for t in get_args(hints[f.name]))
    }


def convert(option: str, text: str, kind: Any) -> Value:
    """The value of an option written as text. Raises PlanError P071."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(t for t in get_args(kind) if t is not type(None))
    text = text.strip()
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise _bad(option, text, "one of " + ", ".join(get_args(kind)))
        return text
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            raise _bad(option, text, "0 or 1")
        return text.lower() in ("1", "true")
    if kind is float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0.0 < number < float("inf"):
            raise _bad(option, text, "a positive number")
        return number
    if kind is int:
        return _whole(option, text)
    if not text:
        raise _bad(option, text, "a value")
    return text


def _whole(option: str, text: str) -> int:
    digits, unit = (text[:-1], 1024) if text[-1:].lower() == "k" else (text, 1)
    low = 0 if option in _MAY_BE_ZERO else 1
    high = LAYERS_LIMIT if option in _LAYER_FIELDS else WHOLE_LIMIT
    if not (
        digits.isascii()
        and digits.isdigit()
        and len(digits) < 20
        and low <= int(digits) * unit <= high
    ):
        raise _bad(option, text, f"a whole number from {low} to {high}")
    return int(digits) * unit


def _bad(option: str, text: str, wanted: str) -> PlanError:
    return PlanError("P071", f"zoo option {option}={text!r}: {wanted} expected")


def parse_options(family: Family, given: Mapping[str, str]) -> dict[str, Value]:
    """Option texts -> values. Raises PlanError P071 for an unknown option (with a suggestion) or a
    bad value."""
    known = options(family.config_type) | options(Common)
    values: dict[str, Value] = {}
    for option, text in given.items():
        if option not in known:
            hint = did_you_mean(option, list(known))
            raise PlanError(
                "P071",
                f"{family.name} has no option {option!r}",
                help=[*([hint] if hint else []), "options: " + ", ".join(sorted(known))],
            )
        values[option] = convert(option, text, known[option][1])
    return values


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """ "zoo:NAME,a=1,b=2" -> (NAME, {a: "1", b: "2"}). Raises PlanError P071 for a part without "="
    or given twice."""
    name, *parts = spec.strip().removeprefix("zoo:").split(",")
    given: dict[str, str] = {}
    for part in parts:
        option, equals, text = (p.strip() for p in part.partition("="))
        if not equals or not option:
            raise PlanError(
                "P071",
                f"{spec!r}: {part!r} is not OPTION=VALUE",
                help=["write zoo:PRESET,option=value,option=value"],
            )
        if option in given:
            raise PlanError("P071", f"{spec!r}: {option} is given twice")
        given[option] = text
    return name.strip(), given


def make(family: Family, name: str, preset: Preset, values: Mapping[str, Value]) -> Any:
    """Build the ONNX model (an onnx.ModelProto) of a preset with overrides applied."""
    common = options(Common)
    shared = Common(**{common[o][0]: v for o, v in values.items() if o in common})  # type: ignore[arg-type]
    config = family.configure(preset, values)
    net = Net(
        name,
        batch=shared.batch,
        default_batch=preset.batch,
        inline=shared.weights == "inline",
        seed=shared.seed,
    )
    net.notes.extend(preset.notes)
    net.left_out.extend(preset.left_out)
    family.build(config, net)
    return net.model()


def told(model: Any, key: str) -> tuple[str, ...]:
    """Sentences of a model's metadata, "notes" or "left_out", as findings are written; but for what
    --dim answers."""
    said = next((p.value for p in model.metadata_props if p.key == key), "")
    return tuple(
        line[0].lower() + line[1:].removesuffix(".")
        for line in said.splitlines()
        if "(--dim" not in line
    )


def require(condition: bool, what: str, *help: str) -> None:
    """PlanError P073 when sizes do not go together."""
    if not condition:
        raise PlanError("P073", what, help=help)
