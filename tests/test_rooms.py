"""The architecture: a row of rooms. A file imports from rooms below its own and from its own, and
nothing imports in a circle.

Every import counts, those inside functions and under TYPE_CHECKING too: a circle that is put off is
a circle. docs/architecture.md says what the rooms are for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("costmodels", "planner", "models_zoo")
ROW = (
    ("costmodels",),
    ("errors",),
    ("support",),
    ("sharding",),
    ("graph",),
    ("ops",),
    ("reader",),
    ("machine",),
    ("models_zoo",),
    ("workload",),
    ("execution",),
    ("analysis",),
    ("pricing",),
    ("solvers",),
    ("space",),
    ("pins",),
    ("cache",),
    ("strategy",),
    ("search",),
    ("whatif",),
    ("emit",),
    ("verify",),
    ("report",),
    ("interop",),
    ("launch",),
    ("calibrate",),
    ("serving", "onnx_backend"),
    ("api",),
    ("from_jax",),
    ("commands",),
    ("cli",),
)
"""Rooms from the bottom up; rooms of one floor do not see each other."""
FLOOR = {room: floor for floor, rooms in enumerate(ROW) for room in rooms}
HEAVY = {"onnx", "ortools", "jax", "jaxlib", "numba", "scipy", "numpy"}
"""What may be imported late: it is slow to load, and not every plan needs it."""


def modules() -> dict[str, Path]:
    """Module -> its file."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }


FILES = modules()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements in a node, at any depth: imports are nothing else, and expressions are most
    of a tree."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


def imported(path: Path) -> Iterator[str]:
    """The project's own modules that a file imports, anywhere in it."""
    for node in statements(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: relative imports hide what room they reach into"
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        # `from package import module` runs the package, too, and whoever reads the line sees both.
        yield from (name for name in names if name in FILES)


@cache
def imports() -> dict[str, set[str]]:
    """Module -> those that it imports. Read where a test first asks, not by every process that
    collects tests."""
    return {module: {m for m in imported(path) if m != module} for module, path in FILES.items()}


def room(module: str) -> str:
    """The room of a module: a folder of planner, a file of its root, or a package."""
    top, _, rest = module.partition(".")
    return top if top != "planner" else rest.partition(".")[0]


def circles() -> list[list[str]]:
    """Sets of modules that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in imports()[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            members = [stack.pop()]
            while members[-1] != module:
                members.append(stack.pop())
            if len(members) > 1:
                found.append(sorted(members))

    for module in FILES:
        if module not in index:
            visit(module)
    return found


def upward() -> list[str]:
    """Imports that run up the row, or across to a room of the same floor."""
    return sorted(
        f"{module} -> {other}"
        for module, others in imports().items()
        for other in others
        if module != "planner"
        and room(module) != room(other)
        and (other == "planner" or FLOOR[room(other)] >= FLOOR[room(module)])
    )


def test_no_import_runs_up_the_row() -> None:
    assert upward() == []


def test_no_circles() -> None:
    assert circles() == []


def test_only_what_is_slow_to_load_is_imported_late() -> None:
    assert late() == []


def test_every_room_is_in_the_row() -> None:
    assert {room(m) for m in FILES if m != "planner"} == set(FLOOR)


def test_the_root_of_planner_holds_its_doors_alone() -> None:
    root = ROOT / "planner"
    doors = {"__init__.py", "api.py", "cli.py", "errors.py", "from_jax.py", "py.typed"}
    assert {p.name for p in root.iterdir() if p.is_file()} - doors == {
        "pins.schema.json",
        "strategy.schema.json",
        "topology.schema.json",
    }


DOORS = ("api", "from_jax", "cli", "commands")
"""Who may load a room when it is asked for: a command starts with what its verb needs."""


def top_level(path: Path) -> set[str]:
    """Modules that are loaded as soon as the file is, by their full names."""
    names: set[str] = set()
    for node in parsed(path).body:
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return names | {parent for name in names for parent in packages_of(name)}


def packages_of(name: str) -> list[str]:
    """The packages that a module lies in: they are loaded before it."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts))]


def heavy() -> set[str]:
    """Modules that load a heavy package, themselves or through what they import at once."""
    loads = {module: top_level(path) for module, path in FILES.items()}
    found = {m for m, names in loads.items() if any(n.partition(".")[0] in HEAVY for n in names)}
    while more := {m for m, names in loads.items() if m not in found and names & found}:
        found |= more
    return found


def late() -> list[str]:
    """Imports inside functions, and under TYPE_CHECKING, of what is quick to load."""
    slow, out = heavy(), []
    for module, path in FILES.items():
        if module == "planner" or room(module) in DOORS or ".emit.runtime." in f"{module}.":
            continue
        tree = parsed(path)
        for node in statements(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in tree.body:
                names = [a.name for a in node.names]
                if isinstance(node, ast.ImportFrom):
                    whole = [f"{node.module}.{name}" for name in names]
                    names = [n for n in whole if n in FILES] or [node.module or ""]
                if not any(n in slow or n.partition(".")[0] in HEAVY for n in names):
                    out += [f"{module}: {n}" for n in names if n.partition(".")[0] in PACKAGES]
    return sorted(out)


if __name__ == "__main__":  # what is left, for who moves things
    for line in upward():
        print(line)
    for members in circles():
        print("circle:", *members)
    for line in late():
        print("late:", line)
