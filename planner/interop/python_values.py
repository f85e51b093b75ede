"""Values of a configuration in Python that are known without running it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.interop.unset import COMPUTED

LONGEST = 4096
"""Items of a list."""
CALLED = "()"
"""The key under which a table remembers what was called; no key of a file is called so."""
REGISTRIES = ("model_registry",)
"""Functions that are not followed: what they are called with says more than what they return."""
NAMING = ("get_mixed_precision_config",)
"""Functions that return what a text names, for which the text stands."""
DEEPEST = 12
"""Tables in tables."""
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
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
CASES: Mapping[str, Callable[[str], str]] = {"lower": str.lower, "upper": str.upper}
"""Methods of a text that are followed."""
TYPES: Mapping[str, type] = {"str": str, "int": int, "float": float, "list": list, "bool": bool}


class Unknown:
    """What is not known."""


UNKNOWN = Unknown()


def hashable(value: Any) -> Any:
    """A value as a key of a table: a list is the tuple it stands for."""
    return tuple(hashable(v) for v in value) if isinstance(value, list) else value


def is_known(value: Any) -> bool:
    """Whether nothing of a value is unknown; a table is, whatever is in it."""
    if isinstance(value, list):
        return all(is_known(v) for v in value)
    return value is not UNKNOWN


def combined(operation: type[ast.AST], a: Any, b: Any) -> Any:
    """Two values combined or compared; UNKNOWN where that cannot be done."""
    f = OPERATIONS.get(operation)
    if f is None or not is_known(a) or not is_known(b):
        return UNKNOWN
    if operation in (ast.Is, ast.IsNot) and (a is None or b is None):
        return f(a, b)
    if operation in (ast.In, ast.NotIn):
        return f(hashable(a), map(hashable, b)) if isinstance(b, list | dict) else UNKNOWN
    if isinstance(a, dict) or isinstance(b, dict):
        return UNKNOWN
    if not issubclass(operation, ast.cmpop) and not _fits(operation, a, b):
        return UNKNOWN
    try:
        value = f(a, b)
    except (ArithmeticError, TypeError, ValueError):
        return UNKNOWN
    return UNKNOWN if isinstance(value, int) and abs(value) > 2**63 else value


def _fits(operation: type[ast.AST], a: Any, b: Any) -> bool:
    """Whether two values may be combined: numbers, and lists that stay short."""
    if isinstance(a, list) and isinstance(b, list):
        return operation is ast.Add and len(a) + len(b) <= LONGEST
    if isinstance(a, list) and isinstance(b, int):
        return operation is ast.Mult and len(a) * max(b, 0) <= LONGEST
    return isinstance(a, int | float) and isinstance(b, int | float)


def either(values: Sequence[Any], every: bool) -> Any:
    """What `and` (every) or `or` makes of values: the first that decides it, else the last."""
    for value in values:
        if not is_known(value):
            return UNKNOWN
        if isinstance(value, dict) or bool(value) != every:
            return UNKNOWN if isinstance(value, dict) and every else value
    return values[-1]


def asked(name: str, arguments: Sequence[Any]) -> Any:
    """What `isinstance`, `hasattr` and `getattr` say of what is known; None for another name."""
    if name == "hasattr" and len(arguments) == 2:
        known = (
            isinstance(arguments[0], dict)
            and isinstance(arguments[1], str)
            and arguments[1] in arguments[0]
        )
        return True if known else UNKNOWN
    if name == "getattr" and len(arguments) in (2, 3):
        known = isinstance(arguments[0], dict) and isinstance(arguments[1], str)
        return arguments[0].get(arguments[1], UNKNOWN) if known else UNKNOWN
    return None


def is_instance(value: Any, types: Sequence[str]) -> Any:
    """Whether a value is of one of the types that are called so; UNKNOWN for a table, which stands
    for an object, and other types than those of plain values."""
    known = [TYPES[t] for t in types if t in TYPES]
    if not is_known(value) or (isinstance(value, dict) and len(known) < len(types)):
        return UNKNOWN
    return isinstance(value, tuple(known))


def is_answer(value: Any) -> bool:
    """Whether a value is what a function returns that nobody follows, and nothing was set in it; a
    class makes a table."""
    if not isinstance(value, dict) or set(value) != {CALLED}:
        return False
    called = value[CALLED].rpartition(".")[2]
    return called not in REGISTRIES and not called[:1].isupper()


def known_of(table: Mapping[Any, Any], depth: int = 0) -> dict[str, Any]:
    """A table with what is unknown as COMPUTED; of calls in a list the names of what is called."""
    if depth > DEEPEST:
        return {}
    known: dict[str, Any] = {}
    for key, value in table.items():
        if not isinstance(key, str) or key == CALLED:
            continue
        if value is UNKNOWN or is_answer(value):
            known[key] = COMPUTED
        elif isinstance(value, dict):
            known[key] = known_of(value, depth + 1)
        elif isinstance(value, list):
            items = [v.get(CALLED, UNKNOWN) if isinstance(v, dict) else v for v in value]
            known[key] = items if is_known(items) else COMPUTED
        else:
            known[key] = value
    return known
