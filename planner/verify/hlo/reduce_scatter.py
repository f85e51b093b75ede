"""All-reduces that stand for reduce-scatters: each device keeps only the slice that belongs to its
partition id.

XLA's CPU partitioner has no reduce-scatter of its own. It writes  all-reduce ->
dynamic-slice(offset from partition-id), with the slice often inside a fusion. An operand counts as
scattered when everything that uses its sum does nothing else with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.verify.hlo.text import Computation, Instruction, Module

_VIEWS = frozenset({"bitcast", "copy", "convert", "transpose", "reshape"})


@dataclass(frozen=True)
class _Frame:
    """A computation and the call it is in, so that parameters can be traced to the caller's
    operands."""

    computation: Computation
    call: Instruction | None = None
    caller: _Frame | None = None


def sliced_by_partition(
    module: Module, computation: Computation, reduce: Instruction, size: int
) -> tuple[bool, ...]:
    """Per operand of the all-reduce: is 1/size of it all that each device keeps, chosen by its
    partition id?"""
    frame = _Frame(computation)
    if len(reduce.operands) == 1 and not reduce.line.startswith("("):
        return (_only_slices(module, frame, reduce.name, size),)
    keeps = []
    users = computation.users.get(reduce.name, ())
    for k in range(len(reduce.operands)):
        taken = [
            u
            for u, _ in users
            if u.opcode == "get-tuple-element" and u.attribute(r"\bindex=(\d+)") == str(k)
        ]
        keeps.append(bool(taken) and all(_only_slices(module, frame, u.name, size) for u in taken))
    return tuple(keeps)


def _only_slices(module: Module, frame: _Frame, name: str, size: int) -> bool:
    users = frame.computation.users.get(name, ())
    if not users or frame.computation.by_name[name].root:
        return False
    return all(_is_slice(module, frame, user, slot, size) for user, slot in users)


def _is_slice(module: Module, frame: _Frame, user: Instruction, slot: int, size: int) -> bool:
    if user.opcode in _VIEWS:
        return _only_slices(module, frame, user.name, size)
    if user.opcode == "dynamic-slice" and slot == 0:
        whole = frame.computation.by_name[user.operands[0]].shapes[0].elements
        by_id = any(_from_partition(module, frame, name) for name in user.operands[1:])
        return by_id and user.shapes[0].elements * size == whole
    if user.opcode in ("fusion", "call"):
        inner = module.computations[user.callees[0]]
        return _only_slices(module, _Frame(inner, user, frame), inner.parameters[slot].name, size)
    return False


def _from_partition(module: Module, frame: _Frame, name: str) -> bool:
    """Does this offset depend on the partition id?"""
    instruction = frame.computation.by_name[name]
    if instruction.opcode == "partition-id":
        return True
    if instruction.opcode == "parameter":
        if frame.call is None or frame.caller is None:
            return False
        return _from_partition(module, frame.caller, frame.call.operands[int(instruction.argument)])
    if instruction.opcode in ("fusion", "call"):
        inner = module.computations[instruction.callees[0]]
        return _from_partition(module, _Frame(inner, instruction, frame), inner.root.name)
    return any(_from_partition(module, frame, operand) for operand in instruction.operands)
