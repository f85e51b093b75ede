"""Products that a compiler pass made larger by padding their operands with zeros, read from the
compiler's dumps after each pass.

Matrix units want extents that are multiples of 8, and a sum that is split over several blocks wants
equal pieces: such passes write operands into larger arrays of zeros and multiply these. The product
is the same and its FLOPs are more, by the ratio of the extents:

    bf16[64,1000] x bf16[1000,2048]  ->  bf16[64,1024] x bf16[1024,2048]     2 * 64 * 2048 * 24
                                     FLOPs of padding

A pass is believed only where the arithmetic is: the operations of the very product before and after
it stand as up to three extents of pads that the same pass wrote. Whatever else changes FLOPs (work
done twice, work left out) is no padding and stays a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import prod
from pathlib import Path

from planner.verify.hlo.flops import dots
from planner.verify.hlo.passes import PRODUCT, stages
from planner.verify.hlo.text import Module, parse

_MOST = 3
"""Extents of one product: its rows, its columns and what it sums over."""

Extent = tuple[int, int]
"""As it was, and as padded."""


@dataclass(frozen=True)
class Padding:
    """What one pass added to one product. by: the pass; what: the operator it serves; flops: more
    of them in a step, per device."""

    by: str
    what: str
    extents: tuple[Extent, ...]
    flops: int

    def __str__(self) -> str:
        sizes = ", ".join(f"{was:,} to {now:,}" for was, now in self.extents)
        return (
            f"padding of products{f' of {self.what}' if self.what else ''} by {self.by}: {sizes},"
            f" {self.flops:+,} FLOPs"
        )


@dataclass(frozen=True)
class _Stage:
    """Products by the operation they come from with the FLOPs of each, and how often extents are
    padded."""

    products: dict[tuple[str, str], Counter[int]]
    pads: Counter[Extent]


def paddings(
    folder: Path, namer: Callable[[str], Callable[[str], str]], placed: bool
) -> tuple[Padding, ...]:
    """Every padding of the passes dumped into a folder, in their order; of equal ones the FLOPs are
    added up.

    namer: text -> (attributes of an instruction -> what it serves); placed: a jit program, whose
    pieces are a device's from the partitioner's result on.
    """
    flops_of: dict[tuple[str, str, tuple[Extent, ...]], int] = {}
    before: _Stage | None = None
    lines: list[str] = []
    for name, text in stages(folder, placed):
        now = [line for line in text.splitlines() if PRODUCT.search(line)]
        if now == lines and before is not None:
            continue
        try:
            after = _stage(text, namer(text))
        except (ValueError, KeyError, IndexError):
            continue  # between passes a module may use forms that final programs do not have
        lines = now
        for one in _between(name, before, after) if before is not None else ():
            key = one.by, one.what, one.extents
            flops_of[key] = flops_of.get(key, 0) + one.flops
        before = after
    return tuple(Padding(*key, flops) for key, flops in flops_of.items())


def _stage(text: str, name: Callable[[str], str]) -> _Stage:
    products: dict[tuple[str, str], Counter[int]] = {}
    for instruction, flops in dots(text):
        products.setdefault((name(instruction.attributes), instruction.op_name), Counter())[
            flops
        ] += 1
    return _Stage(products, Counter(_pads(parse(text))))


def _pads(module: Module) -> Iterator[Extent]:
    """Extents that pads of a module make larger."""
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode == "pad":
                was, now = (
                    computation.operand_shapes(instruction)[0].dims,
                    instruction.shapes[0].dims,
                )
                yield from ((a, b) for a, b in zip(was, now, strict=True) if b > a > 0)


def _between(by: str, before: _Stage, after: _Stage) -> Iterator[Padding]:
    """Products that one pass made larger, as extents that it padded."""
    fresh = sorted(after.pads - before.pads)
    for key, now in after.products.items():
        was = before.products.get(key, Counter())
        less, larger = sorted((was - now).elements()), sorted((now - was).elements())
        if len(less) != len(larger):
            continue
        for a, b in zip(less, larger, strict=True):
            extents = _extents(a, b, fresh) if b > a else None
            if extents is not None:
                yield Padding(by, key[0], extents, b - a)


def _extents(was: int, now: int, fresh: list[Extent]) -> tuple[Extent, ...] | None:
    """Extents whose ratios make `now` of `was`; None where none do."""
    for count in range(1, _MOST + 1):
        for chosen in combinations_with_replacement(fresh, count):
            if now * prod(a for a, _ in chosen) == was * prod(b for _, b in chosen):
                return chosen
    return None
