"""Configurations that are Python: the keys that a function would set, found from its syntax tree.
Nothing is imported and nothing is run.

Followed are assignments to names and attributes, calls with keyword arguments (a table of keys),
calls of functions of the same file, whole-number arithmetic and `if` on what is known. A call of
anything else is a table that nothing is known of, and a note.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.errors import PlanError, did_you_mean

MOST_STEPS = 100_000
"""Of all functions of a file together: ten times what a large file of recipes takes."""
DEEPEST = 12
CLASSES = frozenset({"activation_checkpoint"})
"""Keys whose value is told by the class that is called."""
CLASS = "class"
"""The key of that class's name."""
CALLED = "()"
"""The key under which a table remembers what was called; no key of a file is called so."""
OPERATIONS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


class _Unknown:
    """What is not known."""


UNKNOWN = _Unknown()


class _Returned(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _TooMuch(Exception):
    """The file asks for more steps than a configuration has."""


Function = ast.FunctionDef


def syntax_tree(text: str, mode: str) -> ast.AST:
    """The tree of Python's text, without what its compiler warns of. Raises SyntaxError,
    ValueError, RecursionError, MemoryError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode=mode)


class PythonFile:
    """The functions of a file, each with the keys it would set. Raises PlanError P190."""

    def __init__(self, text: str, path: Path) -> None:
        self.path, self.steps = path, 0
        try:
            tree = syntax_tree(text, "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise PlanError("P190", f"{path} is not Python: {str(e)[:200]}") from e
        assert isinstance(tree, ast.Module)
        self.functions = {n.name: n for n in tree.body if isinstance(n, Function)}
        self.body = tree.body

    def table(self, function: str) -> tuple[dict[str, Any], list[str]]:
        """(keys, notes) of one function; "" for what stands outside functions. Raises PlanError
        P190."""
        try:
            run = _Run(self)
            result = run.call(self.functions[function], (), {}) if function else run.outside()
        except (_TooMuch, RecursionError, MemoryError) as e:
            raise PlanError(
                "P190", f"{self.path}: {function or 'the file'} takes too many steps to follow"
            ) from e
        return _known(result, 0) if isinstance(result, dict) else {}, run.notes

    def choose(
        self, asked: str, fits: Callable[[Mapping[str, Any]], bool]
    ) -> tuple[dict[str, Any], list[str]]:
        """(keys, notes) of the function that is asked for, or of the one whose keys `fits`. Raises
        PlanError P190 where there is none, or several."""
        if asked:
            if asked not in self.functions:
                near = did_you_mean(asked, list(self.functions))
                raise PlanError(
                    "P190",
                    f"{self.path} has no function {asked!r}",
                    help=[h for h in (near, _listed(list(self.functions))) if h],
                )
            return self.table(asked)
        found = {name: self.table(name) for name in ("", *self.functions) if name[:1] != "_"}
        fitting = {name: made for name, made in found.items() if fits(made[0])}
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


def _known(table: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """A table without what is unknown."""
    if depth > DEEPEST:
        return {}
    return {
        k: _known(v, depth + 1) if isinstance(v, dict) else v
        for k, v in table.items()
        if v is not UNKNOWN
        and k != CALLED
        and not (isinstance(v, list) and any(x is UNKNOWN or isinstance(x, dict) for x in v))
    }


class _Run:
    """One function followed."""

    def __init__(self, file: PythonFile) -> None:
        self.file, self.notes, self.depth = file, list[str](), 0
        self.constants: dict[str, Any] = {}
        for n in file.body:
            if isinstance(n, ast.Assign | ast.AnnAssign):
                self._statement(n, self.constants)

    def outside(self) -> dict[str, Any]:
        """Keys of the tables that the file's own names have."""
        return {k: v for k, v in self.constants.items() if isinstance(v, dict)}

    def note(self, text: str) -> None:
        """Once each."""
        if text not in self.notes:
            self.notes.append(text)

    def call(self, f: Function, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """What a function returns; a parameter that nobody gives, and that has no default, is a
        table of its own."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise _TooMuch
        names = [a.arg for a in (*f.args.posonlyargs, *f.args.args)]
        own: dict[str, Any] = {n: {} for n in (*names, *(a.arg for a in f.args.kwonlyargs))}
        defaults = f.args.defaults
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            own[name] = self.value(default, {})
        for argument, keyword in zip(f.args.kwonlyargs, f.args.kw_defaults, strict=True):
            if keyword is not None:
                own[argument.arg] = self.value(keyword, {})
        own |= dict(zip(names, given, strict=False)) | {k: v for k, v in named.items() if k in own}
        try:
            self.follow(f.body, own)
        except _Returned as r:
            return r.value
        finally:
            self.depth -= 1
        tables = [own[n] for n in names if isinstance(own[n], dict) and own[n]]
        return tables[0] if tables else None  # it sets its parameter and returns nothing

    def step(self) -> None:
        """One more."""
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
            self._set(s.target, _combined(type(s.op), left, right), names)
        elif isinstance(s, ast.Expr) and isinstance(s.value, ast.Call):
            self._called(s.value, names, alone=True)
        elif isinstance(s, ast.If):
            test = self.value(s.test, names)
            if test is UNKNOWN or isinstance(test, dict):
                self.note(f"line {s.lineno}: an if that cannot be decided is left out")
            else:
                self.follow(s.body if test else s.orelse, names)
        elif isinstance(s, ast.For | ast.While | ast.With | ast.Try):
            self.note(f"line {s.lineno}: {type(s).__name__.lower()} is not followed")

    def _set(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
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
            found = names.get(e.id, self.constants.get(e.id, UNKNOWN))
            return names.setdefault(e.id, {}) if found is UNKNOWN and make else found
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
            return {k: self.value(v, names) for k, v in pairs if isinstance(k, str)}
        return self._computed(e, names)

    def _computed(self, e: ast.expr, names: dict[str, Any]) -> Any:
        if isinstance(e, ast.BinOp):
            return _combined(type(e.op), self.value(e.left, names), self.value(e.right, names))
        if isinstance(e, ast.UnaryOp):
            inner = self.value(e.operand, names)
            if isinstance(e.op, ast.Not) and inner is not UNKNOWN:
                return not inner
            known = isinstance(e.op, ast.USub) and isinstance(inner, int | float)
            return -inner if known else UNKNOWN
        if isinstance(e, ast.Compare) and len(e.ops) == 1:
            left, right = self.value(e.left, names), self.value(e.comparators[0], names)
            return _combined(type(e.ops[0]), left, right)
        if isinstance(e, ast.BoolOp):
            values = [self.value(v, names) for v in e.values]
            if UNKNOWN in values:
                return UNKNOWN
            return all(values) if isinstance(e.op, ast.And) else any(values)
        if isinstance(e, ast.IfExp):
            test = self.value(e.test, names)
            return UNKNOWN if test is UNKNOWN else self.value(e.body if test else e.orelse, names)
        return UNKNOWN

    def _called(self, e: ast.Call, names: dict[str, Any], alone: bool = False) -> Any:
        name = _dotted(e.func)
        given = [self.value(a, names) for a in e.args if not isinstance(a, ast.Starred)]
        named = {k.arg: self.value(k.value, names) for k in e.keywords if k.arg}
        if name in self.file.functions:
            return self.call(self.file.functions[name], given, named)
        if name.rpartition(".")[2] == "replace" and given and isinstance(given[0], dict):
            return {**given[0], **{k: _with_class(k, v) for k, v in named.items()}}
        last = name.rpartition(".")[2]
        if alone and any(isinstance(x, dict) for x in given):
            self.note(f"line {e.lineno}: {name}, which is not in this file, is not followed")
        elif last[:1].islower() and ("config" in last or "recipe" in last):
            self.note(f"line {e.lineno}: what {name}, which is not in this file, sets is not read")
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


def _combined(operation: type[ast.AST], a: Any, b: Any) -> Any:
    """Two numbers combined, or two values compared; UNKNOWN where it cannot be done."""
    f = OPERATIONS.get(operation)
    if f is None or a is UNKNOWN or b is UNKNOWN or isinstance(a, dict) or isinstance(b, dict):
        return UNKNOWN
    compared = issubclass(operation, ast.cmpop)
    if not compared and not (isinstance(a, int | float) and isinstance(b, int | float)):
        return UNKNOWN
    try:
        made = f(a, b)
    except (ArithmeticError, TypeError, ValueError):
        return UNKNOWN
    return UNKNOWN if isinstance(made, int) and abs(made) > 2**63 else made
