"""The kernels of an optimised program: bytes that each moves through a device's memory, and its
FLOPs.

A kernel is an instruction of a computation that is run (the entry, bodies of loops, branches): a
fusion, a library call, a copy, a reduction ... What only names values, and collectives, are none.

    bytes   operands and results in the device's main memory. Of an operand of which a fusion takes
            slices or rows alone, those; of a result that is an operand with a slice or rows
            replaced, these. What was copied into on-chip memory ahead counts with the first kernel
            that reads it there, what lies in the host's memory with none. Of the kernel for
            experts' rows on TPUs rows count as often as its tiles read them.
    FLOPs   2 M N K of products inside (planner.verify.hlo.flops); of fused attention those that it
            does, without what a causal mask hides; of the kernel for experts' rows those of
            a library's product that takes as long
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.verify.hlo.expert_kernels import ExpertKernel, expert_kernel
from planner.verify.hlo.extents import Extents, extents_of
from planner.verify.hlo.flops import CUDNN, flops_of
from planner.verify.hlo.fused_attention import FusedAttention, fused_attention
from planner.verify.hlo.text import Computation, Instruction, Module, Shape
from planner.verify.hlo.trip_counts import Site, walk

COLLECTIVE = re.compile(
    r"(?:all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?$"
)
_NAMES_ALONE = frozenset(
    {
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "domain",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
_NO_WORK = re.compile(r'custom_call_target="(?:AllocateBuffer|AssumeGatherIndicesInBound)"')
"""Calls of TPUs that move nothing: room for a stack that a loop fills, whatever is in it, and a
promise about indices."""
_FUSIONS = ("fusion", "fusion-start")
"""A fusion, and one that later kernels need not wait for, which jax 0.11 makes of copies out of and
into stacks."""
_SLICED = ("dynamic-slice", "slice", "gather")
_MOVED_AHEAD = ("copy-start", "slice-start", "send", "recv")
_CONTROL = ("while", "conditional", "call", "async-start")
_LEAF = re.compile(r"\b[a-z][a-z0-9]*\[[^\]]*\](?:\{([^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
ON_CHIP = 1
"""The memory space of TPUs' on-chip memory; space 0 is the main memory."""


@dataclass(frozen=True)
class Kernel:
    """One kernel. moved_bytes, flops: of one run; dtype: XLA's name for the operands of its
    products, "" without any; extents: of its product where it has one alone; convolution: whether
    it is one of cuDNN's; inside: its instructions, a fusion's own included."""

    instruction: Instruction
    moved_bytes: int
    flops: int
    dtype: str
    attention: FusedAttention | None
    experts: ExpertKernel | None
    extents: Extents | None
    convolution: bool
    inside: tuple[Instruction, ...]


def kernels(module: Module) -> tuple[Site[Kernel], ...]:
    """Every kernel in program order with how often it runs; of a conditional the branch that moves
    most bytes is marked the heaviest."""
    return walk(
        module,
        lambda instruction, computation: kernel_of(module, instruction, computation),
        lambda kernel: kernel.moved_bytes,
    )


def kernel_of(module: Module, instruction: Instruction, computation: Computation) -> Kernel | None:
    """The kernel that an instruction is; None of loops and their like, collectives, and what runs
    nothing."""
    opcode = instruction.opcode
    if (
        opcode in _NAMES_ALONE
        or opcode in _MOVED_AHEAD
        or opcode in _CONTROL
        or opcode.endswith("-done")
        or COLLECTIVE.match(opcode)
        or (opcode == "custom-call" and _NO_WORK.search(instruction.attributes))
    ):
        return None
    attention = fused_attention(instruction, computation)
    instructions = [(instruction, computation), *_inside(module, instruction)]
    if any(COLLECTIVE.match(inner.opcode) for inner, _ in instructions):
        return None
    flops, dtype, products = 0, "", list[Extents | None]()
    for inner, around in instructions:
        flops_inside = flops_of(inner, around)
        if flops_inside:
            flops += flops_inside
            products.append(extents_of(inner, around))
            dtype = dtype or _multiplied(around.operand_shapes(inner))
    experts = expert_kernel(instruction, computation)
    return Kernel(
        instruction=instruction,
        moved_bytes=moved_bytes(module, instruction, computation)
        + (experts.again_bytes if experts else 0),
        flops=attention.done_flops
        if attention
        else int(experts.priced_flops)
        if experts
        else flops,
        dtype=dtype,
        attention=attention,
        experts=experts,
        extents=products[0] if len(products) == 1 else None,
        convolution=bool(CUDNN.search(instruction.attributes)),
        inside=tuple(inner for inner, _ in instructions),
    )


def _multiplied(operands: Sequence[Shape]) -> str:
    """The type of products: of the first operand, but for what describes a mask before it."""
    wide = (shape.dtype for shape in operands if shape.dtype.startswith(("f", "bf")))
    return next(wide, operands[0].dtype)


def _inside(module: Module, instruction: Instruction) -> Iterator[tuple[Instruction, Computation]]:
    """What a fusion runs, fusions within it too."""
    if instruction.opcode not in _FUSIONS:
        return
    inner = module.computations[instruction.callees[0]]
    for nested in inner.instructions:
        yield nested, inner
        yield from _inside(module, nested)


def moved_bytes(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Bytes that one run reads from and writes to the device's main memory."""
    results = sum(main_bytes(instruction))
    if instruction.opcode in _FUSIONS:
        inner = module.computations[instruction.callees[0]]
        sizes = main_bytes(instruction)
        if instruction.opcode == "fusion-start":  # operands, results and a word stand in its type
            sizes = sizes[len(instruction.operands) : -1]
        written, in_place = _written(inner, sizes)
        return written + sum(
            _taken(module, inner, parameter, _held(computation, instruction, number))
            for number, parameter in inner.parameters.items()
            if parameter.name not in in_place
        )
    if instruction.opcode in _SLICED:
        return 2 * results
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sum(main_bytes(computation.by_name[instruction.operands[1]]))
    return results + sum(
        _held(computation, instruction, slot) for slot in range(len(instruction.operands))
    )


def main_bytes(instruction: Instruction) -> tuple[int, ...]:
    """Bytes in the device's main memory of each array of a result."""
    spaces = [_space(layout) for layout in _LEAF.findall(instruction.type_text)]
    return tuple(
        0 if space else shape.size_bytes
        for space, shape in zip(spaces, instruction.shapes, strict=True)
    )


def _space(layout: str) -> int:
    match = _SPACE.search(layout)
    return int(match.group(1)) if match else 0


def _held(computation: Computation, instruction: Instruction, slot: int) -> int:
    """Bytes of an operand in main memory, or that were copied from there for this instruction
    first."""
    name = instruction.operands[slot]
    operand = computation.by_name[name]
    size = sum(main_bytes(operand))
    if size or operand.opcode not in ("copy-done", "slice-done"):
        return size
    if _space(operand.type_text) != ON_CHIP or computation.users[name][0] != (instruction, slot):
        return 0
    return sum(shape.size_bytes for shape in operand.shapes)


def _written(inner: Computation, results: tuple[int, ...]) -> tuple[int, frozenset[str]]:
    """Bytes that a fusion writes, and the parameters of which it replaces a part in place. results:
    bytes in main memory of its results."""
    roots = [inner.root]
    if inner.root.opcode == "tuple":
        roots = [inner.by_name[name] for name in inner.root.operands]
    if len(roots) != len(results):  # a tuple within a tuple
        return sum(results), frozenset()
    total, in_place = 0, set[str]()
    for root, size in zip(roots, results, strict=True):
        source = _behind_bitcasts(inner, root)
        replaced = {"dynamic-update-slice": 1, "scatter": 2}.get(source.opcode)
        base = _behind_bitcasts(inner, inner.by_name[source.operands[0]]) if replaced else source
        if replaced and base.opcode == "parameter":
            in_place.add(base.name)
            part = sum(s.size_bytes for s in inner.by_name[source.operands[replaced]].shapes)
            # Rows are added to what was there.
            total += min(size, part) * (2 if source.opcode == "scatter" else 1)
        else:
            total += size
    return total, frozenset(in_place)


def _behind_bitcasts(inner: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = inner.by_name[instruction.operands[0]]
    return instruction


def _taken(module: Module, inner: Computation, parameter: Instruction, size: int) -> int:
    """Bytes that a fusion reads of a parameter of `size` bytes: all, or its slices where every use
    takes one."""
    total, names = 0, [parameter.name]
    while names:
        for user, slot in inner.users.get(names.pop(), ()):
            if user.opcode == "bitcast":
                names.append(user.name)
            elif user.opcode in _SLICED and slot == 0:
                total += sum(s.size_bytes for s in user.shapes)
            elif user.opcode in _FUSIONS:
                within = module.computations[user.callees[0]]
                total += _taken(module, within, within.parameters[slot], size)
            elif user.opcode != "dynamic-update-slice" or slot:
                return size
    return min(size, total)
