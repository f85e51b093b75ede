"""YAML of plain data: mappings and lists as blocks, every string quoted as JSON does (which YAML reads alike), long printable text as a literal block."""

from __future__ import annotations

import json
from typing import Any

_PRINTABLE = frozenset(map(chr, range(32, 127))) | {"\n"}


def dump(value: Any, indent: int = 0) -> str:
    """The lines of a mapping or list, each ended; keys are ours and plain."""
    pad, lines = " " * indent, []
    rows = value.items() if isinstance(value, dict) else ((None, v) for v in value)
    for key, v in rows:
        head = f"{pad}-" if key is None else f"{pad}{key if _plain(key) else json.dumps(key)}:"
        if isinstance(v, dict | list) and v:
            inner = dump(v, indent + 2)
            lines.append(f"{head} {inner.lstrip(' ')}" if key is None else f"{head}\n{inner}")
        elif isinstance(v, str) and _block(v):
            text = "".join(f"{pad}  {line}\n" if line else "\n" for line in v.removesuffix("\n").split("\n"))
            lines.append(f"{head} |\n{text}")
        else:
            lines.append(f"{head} {json.dumps(v)}\n")
    return "".join(lines)


def _plain(key: str) -> bool:
    return key.replace("-", "").replace("_", "").isalnum() and not key[0].isdigit()


def _block(text: str) -> bool:
    """Whether a literal block keeps the text as it is: lines, no odd characters, one newline at the end, no indented first line."""
    return text.count("\n") > 1 and text.endswith("\n") and not text.endswith("\n\n") and text[0] not in " \n" and set(text) <= _PRINTABLE
