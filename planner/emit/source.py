"""Source text: safe literals, clean comments, and the functions a program carries with it.

Nothing from a model reaches a program except through `literal` (an ASCII-escaped repr) or `comment`
(a cleaned single line). The functions of planner/emit/runtime are taken over as they are written
there: those that the program's own text names, and those they name.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache

from planner.emit.runtime import paths
from planner.graph.ir import Node

KERNELS = (
    "kernels",
    "latent",
    "linear_attention",
    "float8",
    "nets",
    "recurrent",
    "quant",
    "rare",
    "control",
    "sample",
    "signal",
    "experts",
    "expert_tiles",
    "grouped_experts",
    "expert_places",
    "fused_attention",
    "ring_pieces",
    "ring",
    "halo",
    "exchange",
)
IMPORTS = {
    "argparse": ("", "argparse"),
    "functools": ("", "functools"),
    "json": ("", "json"),
    "math": ("", "math"),
    "os": ("", "os"),
    "re": ("", "re"),
    "runpy": ("", "runpy"),
    "socket": ("", "socket"),
    "threading": ("", "threading"),
    "time": ("", "time"),
    "zlib": ("", "zlib"),
    "bisect_right": ("bisect", "bisect_right"),
    "accumulate": ("itertools", "accumulate"),
    "Path": ("pathlib", "Path"),
    "jax": ("", "jax"),
    "jnp": ("", "jax.numpy as jnp"),
    "np": ("", "numpy as np"),
    "Layout": ("jax.experimental.layout", "Layout"),
    "with_layout_constraint": ("jax.experimental.layout", "with_layout_constraint"),
    "lax": ("jax", "lax"),
    "Offloadable": ("jax.ad_checkpoint", "Offloadable"),
    "checkpoint_name": ("jax.ad_checkpoint", "checkpoint_name"),
    "source_info_util": ("jax.extend", "source_info_util"),
    "AxisType": ("jax.sharding", "AxisType"),
    "Mesh": ("jax.sharding", "Mesh"),
    "NamedSharding": ("jax.sharding", "NamedSharding"),
    "P": ("jax.sharding", "PartitionSpec as P"),
}
STANDARD = frozenset(
    {
        "argparse",
        "functools",
        "json",
        "math",
        "os",
        "re",
        "runpy",
        "socket",
        "threading",
        "time",
        "zlib",
        "bisect_right",
        "accumulate",
        "Path",
    }
)


def literal(text: str) -> str:
    """A Python string literal of any text, plain ASCII, double-quoted where that needs no
    escapes."""
    quoted = ascii(text)
    return f'"{text}"' if quoted == f"'{text}'" and '"' not in text else quoted


def comment(text: str, limit: int = 100) -> str:
    """Text that may stand in a comment or a docstring: one line, plain characters, no quotes or
    backslashes, bounded."""
    clean = re.sub(r"[^A-Za-z0-9 _./:,;()\[\]{}+*=<>|-]", "_", text)
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def user_function(node: Node) -> str:
    """The user's own loss as `user_loss`: their file inside a function, so that its names are its
    own."""
    source, function = str(node.attrs["source"]), str(node.attrs["function"])
    head = '\ndef user_loss_file():\n    """The file of --loss, as it was written."""'
    return (
        f"{head}\n{textwrap.indent(source, '    ')}\n    return {function}\n\n\nuser_loss ="
        " user_loss_file()\n"
    )


@cache
def _part(name: str) -> tuple[dict[str, str], str]:
    """(source per function and per constant of a file of parts, in order; what follows the last
    function), read without importing."""
    text = paths()[name].read_text()
    lines = text.splitlines()
    sources: dict[str, str] = {}
    tail = ""
    for node in ast.parse(text).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        piece = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef):
            sources[node.name] = piece
        elif isinstance(node, ast.Assign):
            names = [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            sources[names[0]] = piece
        elif isinstance(node, ast.If):
            tail = piece
    return sources, tail


def defined_in(file: str) -> set[str]:
    """Names of the functions and constants of a file of parts."""
    return {name for first, text in _part(file)[0].items() for name in (first, *_targets(text))}


def names_in(text: str) -> set[str]:
    """Every name a piece of source mentions."""
    return {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}


@cache
def _free_names(text: str) -> frozenset[str]:
    """Names that a function or constant takes from outside: mentioned, but neither assigned nor
    imported by itself, nor an argument."""
    bound_names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound_names.add(node.id)
        elif isinstance(node, ast.arg):
            bound_names.add(node.arg)
        elif isinstance(node, ast.alias):
            bound_names.add(node.asname or node.name.partition(".")[0])
    return frozenset(names_in(text) - bound_names)


@cache
def _targets(text: str) -> tuple[str, ...]:
    """Names that a constant's source assigns."""
    tree = ast.parse(text).body[0]
    return (
        tuple(n.id for t in tree.targets for n in ast.walk(t) if isinstance(n, ast.Name))
        if isinstance(tree, ast.Assign)
        else ()
    )


def parts_for(
    wanted: Iterable[str], files: Sequence[str], instead: Sequence[str] = ()
) -> list[str]:
    """Sources of the wanted functions and constants and of those they mention, in file order;
    unknown names are ignored. instead: files whose functions take the place of those of their
    names."""
    known: dict[str, str] = {}
    for file in files:
        for name, text in _part(file)[0].items():
            if name in known:
                raise ValueError(f"two parts are named {name}")
            known[name] = text
    for file in instead:
        known |= _part(file)[0]
    owner = {target: name for name, text in known.items() for target in _targets(text)}
    taken: set[str] = set()
    queue = sorted(wanted)
    while queue:
        name = queue.pop()
        name = name if name in known else owner.get(name, name)
        if name in known and name not in taken:
            taken.add(name)
            queue.extend(sorted(_free_names(known[name])))
    return [text for name, text in known.items() if name in taken]


def tail_of(file: str) -> str:
    """The statements after the functions of a file of parts."""
    return _part(file)[1]


def helper_sources(names: set[str]) -> list[str]:
    """Sources of the named kernel helpers and of those they call, in file order. KeyError for an
    unknown name (a bug of the operator table)."""
    known = {name for file in KERNELS for name in _part(file)[0]}
    if names - known:
        raise KeyError(f"no such helper: {', '.join(sorted(names - known))}")
    return parts_for(names, KERNELS)


def imports_for(text: str) -> str:
    """The import lines that a program's text needs, standard library first; a renamed one on a line
    of its own."""
    mentioned = names_in(text)
    used = [name for name in IMPORTS if name in mentioned]
    blocks = []
    for first in (True, False):
        lines: list[str] = []
        members: dict[str, list[str]] = {}
        for name in used:
            module, what = IMPORTS[name]
            if (name in STANDARD) == first and not module:
                lines.append(f"import {what}")
            elif (name in STANDARD) == first:
                members.setdefault(f"{module} {what}" if " as " in what else module, []).append(
                    what
                )
        blocks.append(
            sorted(lines)
            + [
                f"from {m.split()[0]} import {', '.join(sorted(names))}"
                for m, names in sorted(members.items())
            ]
        )
    return "\n\n".join("\n".join(block) for block in blocks if block)
