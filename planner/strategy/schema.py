"""The JSON Schemas of files, made from their types: python -m planner.strategy.schema KIND >
planner/KIND.schema.json, KIND strategy, topology or pins.

Readers ignore keys that they do not know, so every object is open.
"""

from __future__ import annotations

import json
import sys
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from planner.machine.file_types import TopologyFile
from planner.pins.file_types import NodePin, PinsFile
from planner.strategy.strategy import FORMAT_VERSION
from planner.strategy.types import StrategyFile

CLOSED: dict[str, Any] = {
    "TopologyFile": False,
    "TopologyLevel": False,
    "PinTechniques": False,
    "SizeTable": False,
    "NodePin": False,
    "PinsFile": {"$ref": "#/$defs/NodePin"},
}
"""Tables of files that users write: keys beside those named are mistakes, or all of one type."""

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def schema(kind: str = "strategy") -> dict[str, Any]:
    """The JSON Schema of a file: strategy, topology or pins."""
    tables: dict[str, Any] = {}
    root = _schema(FILES[kind], tables)
    if kind == "pins":
        _schema(NodePin, tables)
    for name in tables.keys() & CLOSED.keys():
        tables[name]["additionalProperties"] = CLOSED[name]
    title = f"Meshwright {kind}"
    if kind == "strategy":
        name, major = root["$ref"].rpartition("/")[2], FORMAT_VERSION.partition(".")[0]
        tables[name]["properties"]["format_version"]["pattern"] = rf"^{major}\.\d+$"
        title = f"Meshwright strategy, format {FORMAT_VERSION}"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **root,
        "$defs": tables,
    }


def first_paragraph(of: Any) -> str:
    """What a type's docstring says before its first empty line, as one line."""
    return " ".join(str(of.__doc__ or "").partition("\n\n")[0].split())


def _schema(of: Any, tables: dict[str, Any]) -> dict[str, Any]:
    if is_typeddict(of):
        if of.__name__ not in tables:
            tables[of.__name__] = {}
            hints = get_type_hints(of, include_extras=True)
            wanted = {
                k: get_args(t)[0] if get_origin(t) is NotRequired else t for k, t in hints.items()
            }
            required = sorted(k for k, t in hints.items() if get_origin(t) is not NotRequired)
            tables[of.__name__] = {
                "type": "object",
                "description": first_paragraph(of),
                "required": required,
                "properties": {k: _schema(t, tables) for k, t in sorted(wanted.items())},
            }
        return {"$ref": f"#/$defs/{of.__name__}"}
    origin, inner = get_origin(of), get_args(of)
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], tables)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1], tables)}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(t, tables) for t in inner]}
    return {} if of is Any else {"type": _PLAIN[of]}


FILES: dict[str, Any] = {"strategy": StrategyFile, "topology": TopologyFile, "pins": PinsFile}


def text(kind: str = "strategy") -> str:
    """The schema as the shipped file holds it."""
    return json.dumps(schema(kind), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text(*sys.argv[1:2]))
