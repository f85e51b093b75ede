"""Files of Python as syntax trees, and the files that they import from, where these lie as the
import says: nothing is imported and nothing is run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from costmodels.hardware.intake import read_text

LARGEST = 4 * 2**20
"""Bytes of a file: far above any configuration."""
MOST_FILES = 256
"""Files that one configuration imports from, at any depth."""
HIGHEST = 16
"""Folders above a file in which a package may begin."""

Function = ast.FunctionDef


def syntax_tree(text: str, mode: str) -> ast.AST:
    """The tree of Python's text, without what its compiler warns of. Raises SyntaxError,
    ValueError, RecursionError, MemoryError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode=mode)


@dataclass(frozen=True)
class Import:
    """Where a name comes from: module, dots before it, and the name there."""

    module: str
    level: int
    name: str


@dataclass(frozen=True)
class Module:
    """A file: its functions, what stands outside them, what it imports by name, and the modules of
    which it imports everything."""

    path: Path
    body: Sequence[ast.stmt]
    functions: dict[str, Function]
    imports: dict[str, Import]
    everything: tuple[Import, ...] = ()
    constants: dict[str, list[ast.stmt]] = field(default_factory=dict)


def module_of(text: str, path: Path) -> Module:
    """A file's text taken apart. Raises SyntaxError, ValueError, RecursionError, MemoryError."""
    tree = syntax_tree(text, "exec")
    assert isinstance(tree, ast.Module)
    imports, everything = dict[str, Import](), list[Import]()
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom):
            for a in n.names:
                imported = Import(n.module or "", n.level, a.name)
                if a.name == "*":
                    everything.append(imported)
                else:
                    imports[a.asname or a.name] = imported
    constants: dict[str, list[ast.stmt]] = {}
    for s in tree.body:
        targets = s.targets if isinstance(s, ast.Assign) else [getattr(s, "target", None)]
        for t in targets:
            if isinstance(s, ast.Assign | ast.AnnAssign) and isinstance(t, ast.Name):
                constants.setdefault(t.id, []).append(s)
    functions = {n.name: n for n in tree.body if isinstance(n, Function)}
    return Module(path, tree.body, functions, imports, tuple(everything), constants)


class Modules:
    """The files that a configuration imports from. Those that are not there, or are no Python, are
    none."""

    def __init__(self) -> None:
        self._read: dict[Path, Module | None] = {}
        self._origins: dict[tuple[Path, str], tuple[Module, str] | None] = {}

    def origin(self, module: Module, name: str) -> tuple[Module, str] | None:
        """(file, name there) of a function or a value that a file imports, through files that hand
        it on."""
        key = module.path, name
        if key not in self._origins:
            self._origins[key] = self._origin(module, name, 0)
        return self._origins[key]

    def _origin(self, module: Module, name: str, depth: int) -> tuple[Module, str] | None:
        holder, _, last = name.rpartition(".")
        if holder in module.imports and last:  # of a module that is imported whole
            of = module.imports[holder]
            there = self._found(module.path, Import(f"{of.module}.{of.name}", of.level, last))
            return (there, last) if there is not None and last in there.functions else None
        imported = module.imports.get(name)
        if depth > HIGHEST or (imported is None and not module.everything):
            return None
        for where in [imported] if imported is not None else module.everything:
            there = self._found(module.path, where)
            called = name if where.name == "*" else where.name
            if there is None:
                continue
            if called in there.functions or called in there.constants:
                return there, called
            if (further := self._origin(there, called, depth + 1)) is not None:
                return further
        return None

    def _found(self, path: Path, where: Import) -> Module | None:
        """The file of an import: beside the one that has it, or from a folder above it on."""
        parts = [p for p in where.module.split(".") if p]
        above = list(path.resolve().parents)[:HIGHEST]
        starts = above[where.level - 1 : where.level] if where.level else above
        for start in starts:
            folder = start.joinpath(*parts)
            for file in (folder.with_suffix(".py") if parts else folder, folder / "__init__.py"):
                if file.suffix == ".py" and file.is_file():
                    return self._module(file)
        return None

    def _module(self, file: Path) -> Module | None:
        if file not in self._read and len(self._read) < MOST_FILES:
            try:
                self._read[file] = module_of(read_text(file, LARGEST), file)
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                self._read[file] = None
        return self._read.get(file)
