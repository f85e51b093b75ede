"""What the programs of plans run on: kernels, reductions, the step, checkpoints, data, the loop and
the command line. Programs in one file carry the functions that they call; programs in a folder have
this package beside them, the same for all of them.

    kernels          one operator each, on local shapes
    collectives      changes of layout and recomputation under shard_map
    step             loss and gradients without stages, how gradients are reduced, which collectives
                     are sent together, the optimizers, and the step that is compiled
    pipeline         loss and gradients through pipeline stages, a file a schedule
    files            mesh, weights, batches, checkpoints, the command line, and main
    serve            a program that generates
    files/tables     the names that every program defines itself

kernels and collectives are modules, imported as any other. All others are parts, which read the
tables of a program and call each other by name: `bind` makes them functions of a program's own
module. Some parts hold functions under the names of others (an optimizer, a schedule of pipeline
stages): a program takes one of them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

__version__ = "as in this source tree"

MODULES = ("kernels", "collectives")
"""Folders of modules: what they hold is the same for every program."""


@functools.cache
def paths() -> dict[str, Path]:
    """The files of this package by name. (Not `files`, which is one of its folders: importing a
    module of that would put the folder in this function's place.)"""
    return {path.stem: path for path in sorted(Path(__file__).parent.rglob("[a-z]*.py"))}


def is_module(part: str) -> bool:
    """Whether a file is a module that is imported, rather than a part that is bound."""
    return paths()[part].parent.name in MODULES


class Bound:
    """A program's own module, its functions and tables as attributes, as they are now."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def bind(names: dict[str, Any], parts: Iterable[str]) -> Bound:
    """Define the functions of the parts in a program's module, whose tables they read.

    names: the module's `globals()`, which begin with what the program defines itself: that stands,
    under whatever name, so that a program changes what is done here (the update of the optimizer,
    the learning rate, main) by defining a function of that name. parts: names of files; of two
    functions of one name the later is taken.
    """
    defined = dict(names)
    for part in parts:
        if part not in paths() or is_module(part):
            raise ValueError(f"{part!r} is no part of {__name__} {__version__}")
        exec(_code(part), names)
    names.update(defined)
    return Bound(names)


@functools.cache
def _code(part: str) -> CodeType:
    """A part without its docstring, without what runs it alone, and without imports of parts."""
    path = paths()[part]
    tree = ast.parse(path.read_text(), path)
    tree.body = [node for node in tree.body[1:] if _stays(node)]
    return compile(tree, path, "exec")


def _stays(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        inside, _, rest = (node.module or "").partition(f"{__name__}.")
        return bool(inside) or not rest or rest.split(".")[0] in MODULES
    return not isinstance(node, ast.If)
