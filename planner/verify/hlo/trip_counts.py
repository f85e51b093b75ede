"""How often each instruction runs: trip counts of loops, and a walk over the call graph that
multiplies them.

A `while` runs its body n times and its condition n + 1 times. n is XLA's `known_trip_count` when
written (CPU, GPU), else it is solved from the loop itself (TPU text): with an induction element of
the carried tuple that starts at a constant, grows by a constant step and is compared with a bound,
n = ceil((bound - start) / step). Loops whose length is data (blocks of routed experts) stand in a
scope that says how often they run as planned, at balance: `planned_trips_3/while`. When nothing
works the body counts once and is marked.

Of a `conditional` one branch runs: each branch is walked, and the heaviest is marked as the one
that totals should count.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, TypeVar

from planner.verify.hlo.text import Computation, Instruction, Module

T = TypeVar("T")
_KNOWN = re.compile(r"known_trip_count\D{1,12}(\d+)")
_PLANNED = re.compile(r'op_name="[^"]*\bplanned_trips_(\d+)/while"')
_MIRROR = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


@dataclass(frozen=True)
class Site(Generic[T]):
    """What `select` gave, and how often it runs.

    unknown_loop: name of the innermost loop whose trip count could not be found (it counts once),
    or "". branch: "conditional/branch" path, or "". heaviest: False in branches that totals leave
    out.
    """

    selected: T
    computation: str
    count: int
    unknown_loop: str = ""
    branch: str = ""
    heaviest: bool = True


def walk(
    module: Module,
    select: Callable[[Instruction, Computation], T | None],
    weight: Callable[[T], Fraction | int],
) -> tuple[Site[T], ...]:
    """Every instruction for which `select` is not None, in program order, with its run count from
    the entry.

    A selected instruction is not descended into. `weight` decides the heaviest branch of a
    conditional.
    """

    def go(computation: Computation, count: int, unknown: str, branch: str) -> list[Site[T]]:
        sites: list[Site[T]] = []
        for instruction in computation.instructions:
            selected = select(instruction, computation)
            if selected is not None:
                sites.append(
                    Site(
                        selected=selected,
                        computation=computation.name,
                        count=count,
                        unknown_loop=unknown,
                        branch=branch,
                    )
                )
            elif instruction.opcode == "while":
                trips = trip_count(module, computation, instruction)
                inside = unknown if trips is not None else instruction.name
                for callee, times in _loop_parts(instruction, 1 if trips is None else trips):
                    sites += go(module.computations[callee], count * times, inside, branch)
            elif instruction.opcode == "conditional":
                sites += _heaviest(
                    [
                        go(
                            module.computations[name],
                            count,
                            unknown,
                            f"{branch}{'.' if branch else ''}{instruction.name}/{k}",
                        )
                        for k, name in enumerate(instruction.callees)
                    ],
                    weight,
                )
            else:
                for name in instruction.callees:
                    if name in module.computations:
                        sites += go(module.computations[name], count, unknown, branch)
        return sites

    return tuple(go(module.computations[module.entry], 1, "", ""))


def _loop_parts(loop: Instruction, trips: int) -> tuple[tuple[str, int], ...]:
    body = loop.attribute(r"\bbody=%?([\w.\-]+)")
    condition = loop.attribute(r"\bcondition=%?([\w.\-]+)")
    return ((condition, trips + 1), (body, trips))


def _heaviest(
    branches: list[list[Site[T]]], weight: Callable[[T], Fraction | int]
) -> list[Site[T]]:
    totals = [
        sum(site.count * weight(site.selected) for site in sites if site.heaviest)
        for sites in branches
    ]
    best = totals.index(max(totals)) if totals else 0
    return [
        site if k == best else replace(site, heaviest=False)
        for k, sites in enumerate(branches)
        for site in sites
    ]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trips of a `while`, or None when the text does not tell."""
    if known := _KNOWN.search(loop.attributes):
        return int(known.group(1))
    if planned := _PLANNED.search(loop.attributes):
        return int(planned.group(1))
    body = module.computations[loop.attribute(r"\bbody=%?([\w.\-]+)")]
    condition = module.computations[loop.attribute(r"\bcondition=%?([\w.\-]+)")]
    test = _comparison(module, condition)
    if test is None:
        return None
    (counter, limit), direction = test
    # Either side may be the bound: a constant, or an element that the body hands on unchanged.
    if counter.element is None or _body_element(module, body, counter.element) == Linear(
        counter.element, 0
    ):
        counter, limit, direction = limit, counter, _MIRROR[direction]
    if counter.element is None:
        return None
    step = _body_element(module, body, counter.element)
    start = _initial(module, computation, loop, counter.element)
    bound: int | None = limit.offset
    if limit.element is not None:
        first = _initial(module, computation, loop, limit.element)
        unchanged = _body_element(module, body, limit.element) == Linear(limit.element, 0)
        bound = limit.offset + first if unchanged and first is not None else None
    if step is None or step.element != counter.element or start is None or bound is None:
        return None
    return _trips(start + counter.offset, step.offset, bound, direction)


def _trips(start: int, step: int, bound: int, direction: str) -> int | None:
    """Trips of `for (i = start; i <direction> bound; i += step)`."""
    if direction in ("GT", "GE"):
        start, step, bound, direction = -start, -step, -bound, "LT" if direction == "GT" else "LE"
    if direction == "LE":
        bound, direction = bound + 1, "LT"
    if direction == "NE" and step and (bound - start) % step == 0 and (bound - start) // step >= 0:
        return (bound - start) // step
    if direction == "LT" and step > 0:
        return max(0, -((start - bound) // step))
    return None


@dataclass(frozen=True)
class Linear:
    """`carried tuple[element] + offset`; element None: the constant `offset`."""

    element: int | None
    offset: int


def _linear(
    module: Module, computation: Computation, name: str, arguments: dict[int, Linear | None] | None
) -> Linear | None:
    """A scalar as a linear form of the carried tuple. `arguments`: forms of a fusion's parameters;
    None: parameter 0 is the tuple."""
    instruction = computation.by_name[name]
    opcode = instruction.opcode

    def operand(k: int) -> Linear | None:
        return _linear(module, computation, instruction.operands[k], arguments)

    if opcode == "constant":
        text = instruction.argument.strip()
        return Linear(None, int(text)) if re.fullmatch(r"-?\d+", text) else None
    if opcode == "parameter":
        return arguments.get(int(instruction.argument)) if arguments is not None else None
    if opcode in ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"):
        return operand(0)
    if opcode == "get-tuple-element":
        source = computation.by_name[instruction.operands[0]]
        if arguments is None and source.opcode == "parameter":
            return Linear(int(instruction.attribute(r"\bindex=(\d+)")), 0)
        return None
    if opcode in ("add", "subtract"):
        a, b = operand(0), operand(1)
        if (
            a is None
            or b is None
            or (opcode == "subtract" and b.element is not None)
            or None not in (a.element, b.element)
        ):
            return None
        element = a.element if a.element is not None else b.element
        return Linear(element, a.offset + b.offset if opcode == "add" else a.offset - b.offset)
    if opcode in ("fusion", "call"):
        inner = module.computations[instruction.callees[0]]
        return _linear(
            module,
            inner,
            inner.root.name,
            {k: operand(k) for k in range(len(instruction.operands))},
        )
    return None


def _comparison(module: Module, condition: Computation) -> tuple[tuple[Linear, Linear], str] | None:
    root, computation, arguments = condition.root, condition, None
    if root.opcode in ("fusion", "call"):
        arguments = {
            k: _linear(module, condition, name, None) for k, name in enumerate(root.operands)
        }
        computation = module.computations[root.callees[0]]
        root = computation.root
    if root.opcode != "compare":
        return None
    left, right = (_linear(module, computation, name, arguments) for name in root.operands)
    if left is None or right is None:
        return None
    return (left, right), root.attribute(r"\bdirection=(\w+)")


def _body_element(module: Module, body: Computation, element: int) -> Linear | None:
    if body.root.opcode != "tuple":
        return None
    return _linear(module, body, body.root.operands[element], None)


def _initial(
    module: Module, computation: Computation, loop: Instruction, element: int
) -> int | None:
    start = computation.by_name[loop.operands[0]]
    if start.opcode != "tuple":
        return None
    form = _linear(module, computation, start.operands[element], {})
    return form.offset if form is not None and form.element is None else None
