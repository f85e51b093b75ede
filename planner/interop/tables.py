"""Configuration files in TOML, JSON and YAML as tables: a key that is there twice, YAML's merged
tables, and values that name another key (OmegaConf's `${model.seq_length}`)."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from math import ceil, inf
from pathlib import Path
from typing import Any

from costmodels.hardware.intake import read_text
from planner.errors import PlanError

EXPECTED = (
    "a launch script or a list of arguments (.sh, .args), YAML of Megatron, MaxText, Levanter or"
    " accelerate, Python of torchtitan or Megatron-Bridge, TOML, or JSON of Hugging Face"
)
LARGEST = 4 * 2**20
"""Bytes of a file: far above any configuration."""
MERGED = "<<"
NAMED = re.compile(r"\$\{(\.*)([\w.]+)\}")
"""`${a.b}`, from the top, or `${.b}`, from the table that has it."""
COMPUTED = re.compile(r"\$\{(multiply|divide_ceil|divide_floor)\s*:\s*([^{}]*)\}")
MOST_STEPS = 8
"""Names that stand for names."""
MOST_NODES = 10_000_000
"""Values of a YAML file with its aliases written out."""


class Twice(tuple[Any, ...]):
    """The values of a key that a file has several times."""


def load(path: str | Path) -> dict[str, Any]:
    """The table in a .toml, .json, .yaml or .yml file. Raises PlanError P190."""
    path = Path(path)
    table = {".toml": _toml, ".json": _json}.get(path.suffix, _yaml)(text_of(path), path)
    if not isinstance(table, dict):
        raise PlanError("P190", f"{path} holds no table of keys", help=[EXPECTED])
    return _resolved(table, table, (), 0)


def text_of(path: Path) -> str:
    """The text of a file. Raises PlanError P190."""
    try:
        return read_text(path, LARGEST)
    except OSError as e:
        raise PlanError("P190", f"cannot read {str(path)!r}: {e.strerror}", help=[EXPECTED]) from e
    except ValueError as e:
        raise PlanError("P190", f"{path} is not text") from e


def _toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise PlanError("P190", f"{path} is not TOML: {e}") from e


def _json(text: str, path: Path) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (json.JSONDecodeError, RecursionError, ValueError) as e:
        raise PlanError(
            "P190",
            f"{path} is not JSON: {' '.join(str(e).split())[:200]}",
            help=["YAML and TOML are read from files named so"],
        ) from e


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A table; a key that is there twice is the contradiction it may be."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        before = table.get(name)
        if name in table and before != value:
            several = before if isinstance(before, Twice) else (before,)
            table[name] = Twice((*several, value))
        else:
            table[name] = value
    return table


def _yaml(text: str, path: Path) -> Any:
    import yaml

    class Strict(yaml.SafeLoader):
        """Tables are read by `_once`."""

    def table(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
        def pairs(nodes: Iterable[tuple[yaml.Node, yaml.Node]]) -> list[tuple[str, Any]]:
            return [
                (str(loader.construct_object(k, deep=True)), loader.construct_object(v, deep=True))
                for k, v in nodes
            ]

        plain_keys = _once(pairs((k, v) for k, v in node.value if k.value != MERGED))
        merged: dict[str, Any] = {}
        for _, there in pairs((_plain(k), v) for k, v in node.value if k.value == MERGED):
            for one in there if isinstance(there, list) else [there]:
                merged = (one if isinstance(one, dict) else {}) | merged
        return merged | plain_keys

    def _plain(key: yaml.Node) -> yaml.Node:
        return yaml.ScalarNode("tag:yaml.org,2002:str", key.value)

    def tagged(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> str:
        return f"!{suffix} {node.value}" if isinstance(node, yaml.ScalarNode) else f"!{suffix}"

    Strict.add_constructor("tag:yaml.org,2002:map", table)
    Strict.add_multi_constructor("!", tagged)  # Levanter's !include: named, not followed
    loader = Strict(text)
    try:
        node = loader.get_single_node()
        if node is not None and _written_out(node, {}) > MOST_NODES:
            raise ValueError(f"its aliases stand for more than {MOST_NODES:,} values")
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError) as e:
        raise PlanError(
            "P190",
            f"{path} is not YAML: {' '.join(str(e).split())[:200]}",
            help=["TOML (torchtitan's) is read from files named .toml"],
        ) from e


def _written_out(node: Any, known: dict[int, float]) -> float:
    """Values of a YAML node with its aliases written out; those inside themselves are endless."""
    if id(node) not in known:
        known[id(node)] = inf
        below = node.value if isinstance(node.value, list) else ()
        parts = (
            x for merged in below for x in (merged if isinstance(merged, tuple) else (merged,))
        )
        known[id(node)] = 1 + sum(_written_out(x, known) for x in parts)
    return known[id(node)]


def _resolved(
    value: Any, top: Mapping[str, Any], inside: tuple[Mapping[str, Any], ...], depth: int
) -> Any:
    """A value with those that its texts name in their place. inside: the tables it stands in."""
    if isinstance(value, dict) and depth < 16:
        return {
            key: _resolved(item, top, (*inside, value), depth + 1) for key, item in value.items()
        }
    if not isinstance(value, str) or "${" not in value:
        return value
    for _ in range(MOST_STEPS):
        resolved = _named(value, top, inside) if isinstance(value, str) else value
        if resolved == value or resolved is None:
            break
        value = resolved
    return value


def _named(text: str, top: Mapping[str, Any], inside: tuple[Mapping[str, Any], ...]) -> Any:
    """A text with the values of the keys that it names, and what is computed of them; the value
    alone where the text is no more than its name. Names that there are not stay."""

    def value_of(dots: str, path: str) -> Any:
        holder: Any = top if not dots else inside[-len(dots)] if len(dots) <= len(inside) else {}
        parts = path.split(".")
        # a file that another includes names keys by the section that it becomes there
        for part in parts if dots or parts[0] in top else parts[1:]:
            holder = holder.get(part) if isinstance(holder, Mapping) else None
        return None if isinstance(holder, Mapping | list) else holder

    whole = NAMED.fullmatch(text)
    if whole is not None:
        return value_of(whole[1], whole[2])

    def said(match: re.Match[str]) -> str:
        value = value_of(match[1], match[2])
        return match[0] if value is None else str(value)

    replaced = NAMED.sub(said, text) if len(text) < 4096 else text
    computed = COMPUTED.fullmatch(replaced)
    return replaced if computed is None else _computed(computed[1], computed[2]) or replaced


def _computed(name: str, arguments: str) -> int | None:
    """NeMo's resolvers of whole numbers; None where they are given something else."""
    words = [w.strip() for w in arguments.split(",")]
    if len(words) != 2 or not all(re.fullmatch(r"\d{1,12}", w) for w in words):
        return None
    a, b = map(int, words)
    if name == "multiply":
        return a * b
    return None if not b else ceil(a / b) if name == "divide_ceil" else a // b
