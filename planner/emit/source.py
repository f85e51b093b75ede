"""Source text: safe literals, clean comments, and the runtime helpers a program carries with it.

Nothing from a model reaches a program except through `literal` (an ASCII-escaped repr) or `comment` (a cleaned single line).
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path


def literal(text: str) -> str:
    """A Python string literal of any text, plain ASCII, double-quoted where that needs no escapes."""
    quoted = ascii(text)
    return f'"{text}"' if quoted == f"'{text}'" and '"' not in text else quoted


def comment(text: str, limit: int = 100) -> str:
    """Text that may stand in a comment or a docstring: one line, plain characters, no quotes or backslashes, bounded."""
    clean = re.sub(r"[^A-Za-z0-9 _./:,;()\[\]{}+*=<>|-]", "_", text)
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


@cache
def _helpers() -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """(source, helpers it calls) per function of planner/emit/runtime.py, in file order; the module is read, never imported."""
    text = Path(__file__).with_name("runtime.py").read_text()
    lines = text.splitlines()
    sources: dict[str, str] = {}
    trees = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    for name, tree in trees.items():
        sources[name] = "\n".join(lines[tree.lineno - 1 : tree.end_lineno])
    calls = {
        name: tuple(sorted({n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in trees and n.id != name})) for name, tree in trees.items()
    }
    return sources, calls


def helper_sources(names: set[str]) -> list[str]:
    """Source of the named helpers and of those they call, in file order. KeyError for an unknown name (a bug of the operator table)."""
    sources, calls = _helpers()
    wanted: set[str] = set()
    queue = sorted(names)
    while queue:
        name = queue.pop()
        if name not in wanted:
            wanted.add(name)
            queue.extend(calls[name])
    return [text for name, text in sources.items() if name in wanted]
