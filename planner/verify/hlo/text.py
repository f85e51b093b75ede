"""Optimised HLO as text -> computations, instructions and shapes. No jax: the text of
`compiled.as_text()` is enough.

One line is one instruction:  `[ROOT] %name = type opcode(operands), attributes`. Everything after
the type is read on demand, so that texts of tens of megabytes cost one regular expression per line.
Tolerated: names with or without `%`, operands with or without types, layouts and tilings such as
`{1,0:T(8,128)(2,1)S(1)}`, comments such as `/*index=5*/`, nested tuple types.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_BITS: Mapping[str, int] = {
    "pred": 8,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "s64": 64,
    "u64": 64,
    "f4e2m1fn": 4,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "token": 0,
    "opaque": 0,
}

_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->.*\{\s*$")
_LINE = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+) = (.*)$")
_LEAF = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLEES = re.compile(
    r"\b(?:calls|called_computations|body|condition|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One array of a (tuple) type: XLA's dtype name and the dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def size_bytes(self) -> int:
        """Bytes without tiling or padding; dtypes under a byte are packed."""
        return -(-self.elements * _bits(self.dtype) // 8)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    if dtype.startswith("f8"):
        return 8
    raise ValueError(f"unknown HLO element type {dtype!r}")


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of a type in order, tuples flattened: `(f32[2]{0}, (s32[], pred[]))` has three."""
    shapes = []
    for dtype, dims in _LEAF.findall(text):
        # A bounded dynamic dim is written `<=8`; its bound is what is allocated and sent.
        shapes.append(
            Shape(dtype, tuple(int(d.replace("<=", "")) for d in dims.split(",") if d.strip()))
        )
    return tuple(shapes)


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start` (round brackets only, quotes
    respected)."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        char = text[i]
        if char == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted and char == "(":
            depth += 1
        elif not quoted and char == ")":
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"unbalanced brackets in HLO: {text[start : start + 80]!r}")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `line` is what follows `name = `."""

    name: str
    line: str
    root: bool

    @cached_property
    def _parts(self) -> tuple[str, str, str, str]:
        """type, opcode, operands, attributes."""
        line = self.line
        end = closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
        bracket = line.index("(", end)
        close = closing(line, bracket)
        return line[:end], line[end:bracket].strip(), line[bracket + 1 : close], line[close + 1 :]

    @property
    def opcode(self) -> str:
        """Such as "all-reduce-start"."""
        return self._parts[1]

    @property
    def type_text(self) -> str:
        """The result's type as written, layouts and all."""
        return self._parts[0]

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The result's arrays, tuples flattened."""
        return parse_shapes(self._parts[0])

    @property
    def argument(self) -> str:
        """The raw text between the operand brackets (a constant's value, a parameter's number)."""
        return self._parts[2]

    @property
    def attributes(self) -> str:
        """The raw text after the operands."""
        return self._parts[3]

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        text = _COMMENT.sub("", self.argument)
        if "%" in text:
            return tuple(_NAME.findall(text))
        if self.opcode in ("constant", "parameter"):
            return ()
        return tuple(word.split()[-1] for word in text.split(",") if word.strip())

    def attribute(self, pattern: str) -> str:
        """First group of a regular expression over the attributes, or ''."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else ""

    @property
    def op_name(self) -> str:
        """The frame's operation path from the metadata, or ''."""
        return self.attribute(r'\bop_name="([^"]*)"')

    @cached_property
    def callees(self) -> tuple[str, ...]:
        """Computations this runs, in the order they are written; reducers of collectives, sorts and
        reduces are left out."""
        attributes = self.attributes.split(", metadata={")[0]
        callees = [name for text in _CALLEES.findall(attributes) for name in _names(text)]
        if self.opcode in ("call", "map"):
            callees += [
                name
                for text in re.findall(r"\bto_apply=(%?[\w.\-]+)", attributes)
                for name in _names(text)
            ]
        return tuple(callees)


def _names(text: str) -> list[str]:
    return [word.strip().lstrip("%") for word in text.strip("{}").split(",") if word.strip()]


@dataclass(frozen=True)
class Computation:
    """Instructions in schedule order."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instruction by name; names are unique within a computation."""
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The result."""
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    @cached_property
    def users(self) -> dict[str, tuple[tuple[Instruction, int], ...]]:
        """name -> ((instruction, operand slot), ...)."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions:
            for slot, name in enumerate(instruction.operands):
                users.setdefault(name, []).append((instruction, slot))
        return {name: tuple(uses) for name, uses in users.items()}

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter number -> instruction."""
        return {int(i.argument): i for i in self.instructions if i.opcode == "parameter"}

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Arrays of all operands in order."""
        return tuple(s for name in instruction.operands for s in self.by_name[name].shapes)


@dataclass(frozen=True)
class Module:
    """A compiled module: computations by name and the entry's name."""

    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Read a module.

    Raises:
        ValueError: no ENTRY computation (the text is not HLO).
    """
    computations, entry = {}, ""
    for name, is_entry, lines in _blocks(text):
        instructions = []
        for line in lines:
            match = _LINE.match(line)
            if match:
                instructions.append(
                    Instruction(match.group(2), match.group(3), bool(match.group(1)))
                )
        if instructions:
            computations[name] = Computation(name, tuple(instructions))
            entry = name if is_entry else entry
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled HLO module")
    return Module(computations, entry)


def _blocks(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    name, is_entry = "", False
    lines: list[str] | None = None
    for line in text.splitlines():
        if lines is None:
            match = _HEADER.match(line) if line.rstrip().endswith("{") else None
            if match and "=" not in line.split("(")[0]:
                name, is_entry, lines = match.group(2), bool(match.group(1)), []
        elif line.startswith("}") and not line.startswith("}}"):
            yield name, is_entry, lines
            lines = None
        elif lines and not line.startswith((" ", "%", "ROOT ")):
            lines[-1] += line  # attributes of TPU kernels go over several lines
        else:
            lines.append(line)
