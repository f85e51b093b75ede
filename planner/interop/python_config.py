"""Configurations that are Python: the keys that a function would set, found from its syntax tree.
Nothing is imported and nothing is run.

Followed are assignments to names and attributes, calls with keyword arguments (a table of keys),
calls of functions of the same file, and of those that it imports where their file lies as the
import says (a checkout), whole-number arithmetic, lists, and `if` on what is known. A call of
anything else is a table that nothing is known of, and a note.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.errors import PlanError, did_you_mean
from planner.interop.python_modules import Function, Module, Modules, module_of
from planner.interop.python_values import (
    CALLED,
    CASES,
    NAMING,
    REGISTRIES,
    UNKNOWN,
    asked,
    combined,
    either,
    hashable,
    is_instance,
    known_of,
)

MOST_STEPS = 100_000
"""Of all functions of a file, with those that they call elsewhere: several times what a large file
of recipes takes."""
DEEPEST = 24
CLASSES = frozenset({"activation_checkpoint", "peft"})
"""Keys whose value is told by the class that is called."""
CLASS = "class"
"""The key of that class's name."""


class _Returned(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Raised(Exception):
    """A `raise` that is reached."""


class _TooMuch(Exception):
    """The file asks for more steps than a configuration has."""


class PythonFile:
    """The functions of a file, each with the keys it would set. Raises PlanError P190."""

    def __init__(self, text: str, path: Path) -> None:
        self.path, self.steps, self.modules = path, 0, Modules()
        try:
            self.module = module_of(text, path)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise PlanError("P190", f"{path} is not Python: {str(e)[:200]}") from e
        self.functions = self.module.functions

    def table(self, function: str) -> tuple[dict[str, Any], list[str]]:
        """(keys, notes) of one function, or of a name that the file gives a table; "" for all that
        stands outside functions. Raises PlanError P190."""
        try:
            run = _Run(self)
            if function in self.functions:
                result = run.call(self.functions[function], (), {})
            else:
                result = run.outside().get(function, {}) if function else run.outside()
        except (_TooMuch, RecursionError, MemoryError) as e:
            raise PlanError(
                "P190", f"{self.path}: {function or 'the file'} takes too many steps to follow"
            ) from e
        except _Raised:
            result = None
        notes = list(run.notes)
        if run.undecided:
            files = ", ".join(run.undecided[:8])
            notes.append(f"what is not known of {files}, which it imports, is left out")
        return known_of(result) if isinstance(result, dict) else {}, notes

    def choose(
        self, asked: str, fits: Callable[[Mapping[str, Any]], bool]
    ) -> tuple[dict[str, Any], list[str]]:
        """(keys, notes) of the function or the name that is asked for, or of the one whose keys
        `fits`. Raises PlanError P190 where there is none, or several."""
        if asked:
            if asked not in self.functions and asked not in self.module.constants:
                near = did_you_mean(asked, list(self.functions))
                raise PlanError(
                    "P190",
                    f"{self.path} has no function {asked!r}",
                    help=[h for h in (near, _listed(list(self.functions))) if h],
                )
            return self.table(asked)
        outside, _ = self.table("")
        tables = {n: v for n, v in outside.items() if isinstance(v, dict) and fits(v)}
        lists = [n for n, v in tables.items() if any(x in tables.values() for x in v.values())]
        outer = [n for n in tables if n not in lists] if len(tables) > 1 else [""]
        tables_by_name = {
            name: self.table(name) for name in (*outer, *self.functions) if name[:1] != "_"
        }
        fitting = {name: read for name, read in tables_by_name.items() if fits(read[0])}
        if len(fitting) > 1:
            names = [n for n in fitting if n]
            raise PlanError(
                "P190",
                f"{self.path} has several configurations: {', '.join(names[:12])}"
                + (f" and {len(names) - 12} more" if len(names) > 12 else ""),
                help=[f"{self.path}:{names[0]} says which"],
            )
        return next(iter(fitting.values()), ({}, []))


def _listed(names: Sequence[str]) -> str:
    return f"functions: {', '.join(names[:12])}" if names else "it has no functions"


class _Run:
    """One function followed. module: the file it stands in; root: the run of the file that was
    asked for, which has the notes, and a run of each other file."""

    def __init__(self, file: PythonFile, module: Module | None = None, root: _Run | None = None):
        self.file, self.module, self.root = file, module or file.module, root or self
        self.notes, self.others = list[str](), dict[Path, _Run]()
        self.undecided = list[str]()
        self.depth = self.trying = 0
        self.unsure = False
        self.constants: dict[str, Any] = {}
        if root is None:
            for n in self.module.body:
                if isinstance(n, ast.Assign | ast.AnnAssign):
                    self._statement(n, self.constants)

    def outside(self) -> dict[str, Any]:
        """Keys of the tables that the file's own names have."""
        return {k: v for k, v in self.constants.items() if isinstance(v, dict)}

    def note(self, at: ast.AST, text: str) -> None:
        """Add a note, each once; of other files their names alone."""
        line = f"line {getattr(at, 'lineno', 0)}: {text}"
        to = self.notes if self.root is self else self.root.undecided
        line = line if self.root is self else self.module.path.name
        if line not in to:
            to.append(line)

    def call(self, f: Function, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """What a function returns; a parameter that nobody gives, and that has no default, is a
        table of its own."""
        self.root.depth += 1
        if self.root.depth > DEEPEST:
            raise _TooMuch
        names = [a.arg for a in (*f.args.posonlyargs, *f.args.args)]
        variables: dict[str, Any] = {n: {} for n in (*names, *(a.arg for a in f.args.kwonlyargs))}
        defaults = f.args.defaults
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            variables[name] = self.value(default, {})
        for argument, keyword in zip(f.args.kwonlyargs, f.args.kw_defaults, strict=True):
            if keyword is not None:
                variables[argument.arg] = self.value(keyword, {})
        variables |= dict(zip(names, arguments, strict=False)) | {
            k: v for k, v in named.items() if k in variables
        }
        before, self.unsure = self.unsure, False
        try:
            self.follow(f.body, variables)
            tables = [
                variables[n] for n in names if isinstance(variables[n], dict) and variables[n]
            ]
            if tables:  # it sets its parameter and returns nothing
                return tables[0]
            return UNKNOWN if self.unsure else None
        except _Returned as r:
            return r.value
        finally:
            self.root.depth -= 1
            self.unsure = before

    def step(self) -> None:
        """Count a step of the reading. Raises _TooMuch."""
        self.file.steps += 1
        if self.file.steps > MOST_STEPS:
            raise _TooMuch

    def follow(self, body: Sequence[ast.stmt], names: dict[str, Any]) -> None:
        """Statements in order."""
        for statement in body:
            self.step()
            self._statement(statement, names)

    def _statement(self, s: ast.stmt, names: dict[str, Any]) -> None:
        if isinstance(s, ast.Return):
            raise _Returned(self.value(s.value, names) if s.value else None)
        if isinstance(s, ast.Assign):
            value = self.value(s.value, names)
            for target in s.targets:
                self._set(target, value, names)
        elif isinstance(s, ast.AnnAssign) and s.value is not None:
            self._set(s.target, self.value(s.value, names), names)
        elif isinstance(s, ast.AugAssign):
            left, right = self.value(s.target, names), self.value(s.value, names)
            self._set(s.target, combined(type(s.op), left, right), names)
        elif isinstance(s, ast.Expr) and isinstance(s.value, ast.Call):
            self._called(s.value, names, alone=True)
        elif isinstance(s, ast.If):
            self._if(s, names)
        elif isinstance(s, ast.Raise) and self.trying:
            raise _Raised
        elif isinstance(s, ast.Try):
            self._try(s, names)
        elif isinstance(s, ast.With):
            self.follow(s.body, names)
        elif isinstance(s, ast.For | ast.While):
            self.note(s, f"{type(s).__name__.lower()} is not followed")

    def _if(self, s: ast.If, names: dict[str, Any]) -> None:
        test = self.value(s.test, names)
        if test is not UNKNOWN and not isinstance(test, dict):
            self.follow(s.body if test else s.orelse, names)
            return
        inside = (*s.body, *s.orelse)
        self.unsure |= any(isinstance(n, ast.Return) for x in inside for n in ast.walk(x))
        if any(not isinstance(x, ast.Raise | ast.Pass) for x in inside):
            self.note(s, "an if that cannot be decided is left out")

    def _try(self, s: ast.Try, names: dict[str, Any]) -> None:
        self.trying += 1
        try:
            self.follow(s.body, names)
        except _Raised:
            self.trying -= 1
            self.follow(s.handlers[0].body if s.handlers else [], names)
            self.trying += 1
        finally:
            self.trying -= 1

    def _set(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, list):
            for part, item in zip(target.elts, value, strict=False):
                self._set(part, item, names)
        elif isinstance(target, ast.Attribute | ast.Subscript):
            holder = self.value(target.value, names, make=True)
            key = (
                target.attr
                if isinstance(target, ast.Attribute)
                else self.value(target.slice, names)
            )
            if isinstance(holder, dict) and isinstance(key, str):
                holder[key] = _with_class(key, value)

    def value(self, e: ast.expr, names: dict[str, Any], make: bool = False) -> Any:
        """What an expression is. make: a name or attribute that is not there becomes a table."""
        self.step()
        if isinstance(e, ast.Constant):
            return e.value if isinstance(e.value, int | float | str | None) else UNKNOWN
        if isinstance(e, ast.Name):
            value = names[e.id] if e.id in names else self._constant(e.id)
            return names.setdefault(e.id, {}) if value is UNKNOWN and make else value
        if isinstance(e, ast.Attribute):
            holder = self.value(e.value, names, make)
            if not isinstance(holder, dict):
                return UNKNOWN
            if make and not isinstance(holder.get(e.attr), dict):
                holder[e.attr] = {}
            return holder.get(e.attr, UNKNOWN)
        if isinstance(e, ast.Call):
            return self._called(e, names)
        if isinstance(e, ast.List | ast.Tuple):
            return [self.value(x, names) for x in e.elts]
        if isinstance(e, ast.Dict):
            pairs = [(k and self.value(k, names), v) for k, v in zip(e.keys, e.values, strict=True)]
            return {
                hashable(k): self.value(v, names)
                for k, v in pairs
                if isinstance(k, str | int | list)
            }
        return self._computed(e, names)

    def _constant(self, name: str) -> Any:
        """A name of the file, or one that it imports."""
        if name not in self.constants and self.root is not self:
            self.constants[name] = UNKNOWN  # until it is known: it may be made of itself
            for s in self.module.constants.get(name, ()):
                self._statement(s, self.constants)
            if name not in self.module.constants:
                self.constants.pop(name)
        if name in self.constants:
            return self.constants[name]
        origin = self.file.modules.origin(self.module, name)
        if origin is None or origin[1] in origin[0].functions:
            return UNKNOWN
        return self._elsewhere(origin[0])._constant(origin[1])

    def _elsewhere(self, module: Module) -> _Run:
        """The run of another file."""
        if module.path == self.root.module.path:
            return self.root
        if module.path not in self.root.others:
            self.root.others[module.path] = _Run(self.file, module, self.root)
        return self.root.others[module.path]

    def _computed(self, e: ast.expr, names: dict[str, Any]) -> Any:
        if isinstance(e, ast.BinOp):
            return combined(type(e.op), self.value(e.left, names), self.value(e.right, names))
        if isinstance(e, ast.UnaryOp):
            inner = self.value(e.operand, names)
            if isinstance(e.op, ast.Not) and inner is not UNKNOWN:
                return not inner
            known = isinstance(e.op, ast.USub) and isinstance(inner, int | float)
            return -inner if known else UNKNOWN
        if isinstance(e, ast.Compare) and len(e.ops) == 1:
            left, right = self.value(e.left, names), self.value(e.comparators[0], names)
            return combined(type(e.ops[0]), left, right)
        if isinstance(e, ast.BoolOp):
            return either([self.value(v, names) for v in e.values], isinstance(e.op, ast.And))
        if isinstance(e, ast.IfExp):
            test = self.value(e.test, names)
            return UNKNOWN if test is UNKNOWN else self.value(e.body if test else e.orelse, names)
        if isinstance(e, ast.Subscript):
            holder, key = self.value(e.value, names), hashable(self.value(e.slice, names))
            if isinstance(holder, dict) and isinstance(key, str | int | tuple):
                return holder.get(key, UNKNOWN)
        return UNKNOWN

    def _called(self, e: ast.Call, names: dict[str, Any], alone: bool = False) -> Any:
        name = _dotted(e.func)
        arguments = [self.value(a, names) for a in e.args if not isinstance(a, ast.Starred)]
        named = {k.arg: self.value(k.value, names) for k in e.keywords if k.arg}
        if name in self.module.functions:
            return self.call(self.module.functions[name], arguments, named)
        if name in NAMING and arguments and isinstance(arguments[0], str):
            return arguments[0]
        origin = self.file.modules.origin(self.module, name) if name not in REGISTRIES else None
        if origin is not None and origin[1] in origin[0].functions:
            return self._elsewhere(origin[0]).call(origin[0].functions[origin[1]], arguments, named)
        if name == "isinstance" and len(e.args) == 2:
            types = e.args[1].elts if isinstance(e.args[1], ast.Tuple) else [e.args[1]]
            return is_instance(arguments[0], [_dotted(t) for t in types])
        if name in ("hasattr", "getattr"):
            return asked(name, arguments)
        if isinstance(e.func, ast.Attribute) and e.func.attr in CASES and not arguments:
            text = self.value(e.func.value, names)
            return CASES[e.func.attr](text) if isinstance(text, str) else UNKNOWN
        last = name.rpartition(".")[2]
        if last == "replace" and arguments and isinstance(arguments[0], dict):
            return {**arguments[0], **{k: _with_class(k, v) for k, v in named.items()}}
        if alone and any(isinstance(x, dict) for x in arguments):
            self.note(e, f"{name}, which is not in this file, is not followed")
        elif last[:1].islower() and ("config" in last or "recipe" in last):
            self.note(e, f"what {name}, which is not in this file, sets is not read")
        return {**{k: _with_class(k, v) for k, v in named.items()}, CALLED: name}


def _with_class(key: str, value: Any) -> Any:
    """A value of a key; a table whose class matters names it."""
    if key in CLASSES and isinstance(value, dict) and CALLED in value:
        return {**value, CLASS: value[CALLED]}
    return value


def _dotted(e: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(e, ast.Attribute):
        parts, e = [e.attr, *parts], e.value
    return ".".join([e.id, *parts]) if isinstance(e, ast.Name) else ""
