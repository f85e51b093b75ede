"""One line declares how an operator may be split: `"b m k, k n -> b m n"`.

Its letters are factors. A split assigns mesh axes to factors; everything else is a reading of the
line:

    operand layout   each dim's factors -> their axes; an axis used on a factor the operand lacks
                     leaves it a *partial gradient* over that axis: the forward value is equal
                     everywhere, the gradient is a sum still pending
    result layout    likewise; an axis used on a factor the result lacks leaves the result *partial*
                     over it
    work per device  product of local factor sizes

Notation: `k!` stays whole · `(h d)` one dim made of two factors, major first (the minor one is cut
only where the major one is cut down to 1) · `1` a dim of size one · `+` after the arrow's results
marks the operands that may stay partial (linear operators): `"a b -> a b + 0"`. The pseudo-factor
"+" of a split holds the axes over which those operands, and so the results, are partial.

A rule may also name *pairs*: factors cut together by the same axes, such as positions of queries
and of keys ("ring": s and t). A split gives axes to the pair's name, so that an axis still serves
one factor; in every layout they cut the dims of all members. A device then holds one piece of each
member and meets the other pieces in turn: its share of the work is that of one member.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any

from costmodels.routing import busiest
from planner.sharding.layout import Axes, Layout, group

PENDING = "+"
Dim = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelCollective:
    """A collective inside a kernel, over the axes that cut `factor` ("x+y": either), run `forward`
    and `backward` times in each pass.

    Its payload is the product of the local sizes of `over`, times `itemsize` bytes (statistics are
    float32; 0: the type computed in). A round of an exchange carries up to `places` rows to each of
    the devices: `rows` (a product of local sizes) over their number, times `slack`, rounded up;
    with `counts` of choices, one for each of what is cut over the devices, times what the fullest
    of these gets over the mean; with `places_each` so many for each of `rows` and nothing else. On
    a `ring` it runs so often for each other device of the axes. What is not `kept` runs again with
    a recomputed block, even where that saves the results of collectives; what is `for_result` only
    where the kernel's result is recomputed. `units` multiplies the payload;
    with `operand` the backward pass runs it only for the gradient of that operand. Where it
    is `halved` it sends half of a device's piece, and runs only where the pieces of factors that
    are `alike` are equally long and even. Where they are equally long, a ring with a `reach` sends
    pieces no further than to devices so many positions behind.
    """

    factor: str
    kind: str
    over: tuple[str, ...]
    forward: int
    backward: int
    itemsize: int = 4
    rows: tuple[str, ...] = ()
    slack: float = 1.0
    counts: tuple[int, ...] = ()
    places_each: int = 0
    ring: bool = False
    kept: bool = True
    for_result: bool = False
    units: int = 1
    operand: int = -1
    alike: tuple[str, ...] = ()
    halved: bool = False
    reach: int = 0

    def _length(self, local: Mapping[str, int]) -> int:
        """Positions of a device's piece of the factors that are alike; 0 where they differ."""
        sizes = {local[f] for f in self.alike}
        return sizes.pop() if len(sizes) == 1 else 0

    def runs(self, local: Mapping[str, int]) -> bool:
        """Whether the collective runs where pieces of these sizes are on its axes' devices."""
        length = self._length(local)
        return not self.halved or bool(length and length % 2 == 0)

    def times(self, devices: int, local: Mapping[str, int]) -> tuple[int, int]:
        """How often it runs in each pass, where pieces of these sizes are on so many devices."""
        steps = devices - 1 if self.ring else 1
        length = self._length(local) if self.ring and self.reach else 0
        if length:
            steps = min(steps, -(-self.reach // length))
        return self.forward * steps, self.backward * steps

    def axes(self, split: Split, order: Iterable[str]) -> Axes:
        """The axes it runs over, in the order given; none where it does not run."""
        used = {a for f in self.factor.split("+") for a in split.axes(f)}
        return tuple(a for a in order if a in used)

    def places(self, local: Mapping[str, int], devices: int) -> int:
        """Rows that a round carries from a device to each of the devices of its group."""
        rows = math.prod(local[f] for f in self.rows)
        if self.places_each:
            return self.places_each * rows
        slack = busiest(self.counts, devices) if self.counts else min(self.slack, devices)
        return math.ceil(slack * rows / devices)

    def payload_bytes(self, local: Mapping[str, int], devices: int, compute: float) -> int:
        """Bytes of one run on one device; `compute` is the size of an element of the type computed
        in."""
        count = self.places(local, devices) * devices if self.rows else 1
        size = (self.itemsize or compute) * self.units * math.prod(local[f] for f in self.over)
        return int(size * count / 2 if self.halved else size * count)


@dataclass(frozen=True, eq=False)
class Rule:
    """A bound rule: factors per dim of each operand and result, with the factors' global sizes.

    whole: factors that no axis may cut. no_pad: factors that may be cut only evenly (padding would
    corrupt the result). linear: operand slots that may be partial (all of them together). at:
    factors whose kernels need the shard index.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[int, ...] = ()
    no_pad: frozenset[str] = frozenset()
    flops: float = 0.0
    """FLOPs of the forward pass, whole operator (2*M*N*K for products; 0 for memory-bound
    operators)."""
    inner: tuple[KernelCollective, ...] = ()
    """Collectives the kernel itself runs when a factor is cut; its results are complete over that
    factor."""
    paired: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a pair -> the factors that its axes cut together, always evenly. A member that is
    also `whole` is cut in no other way."""
    most: Mapping[str, int] = field(default_factory=dict)
    """Factor -> the most pieces it may be cut into (a halo is no wider than a piece)."""
    fringe: Mapping[str, float] = field(default_factory=dict)
    """Factor -> how far pieces of operand 0 reach into their neighbours', in its units, when it is
    cut: its gradient is computed there too."""
    spatial: frozenset[str] = frozenset()
    """Factors whose cutting costs an exchange of rows where cutting the batch costs nothing: see
    `Limits.spatial`."""

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """All factors, in order of first appearance."""
        dims = itertools.chain.from_iterable(itertools.chain(self.operands, self.results))
        return tuple(dict.fromkeys(f for dim in dims for f in dim))

    @cached_property
    def form(self) -> tuple[object, ...]:
        """What layouts follow from, whatever the sizes."""
        inner, paired = (
            tuple(collective.factor for collective in self.inner),
            tuple(self.paired.items()),
        )
        return self.operands, self.results, self.linear, inner, paired

    @cached_property
    def choices(self) -> tuple[str, ...]:
        """What a split may give axes to: the factors, then the names of pairs."""
        return (*self.factors, *self.paired)

    def members(self, choice: str) -> tuple[str, ...]:
        """The factors that the axes of a choice cut."""
        return self.paired.get(choice, (choice,))

    def axes(self, factor: str, split: Split, order: Sequence[str] = ()) -> Axes:
        """Axes that cut a factor, alone or in a pair; where it is cut both ways they stand in the
        order of the mesh."""
        cut_by = split.axes(factor)
        for name, members in self.paired.items():
            joint = split.axes(name) if factor in members else ()
            cut_by = (
                tuple(sorted((*cut_by, *joint), key=list(order).index))
                if cut_by and joint and order
                else (*cut_by, *joint)
            )
        return cut_by

    @cached_property
    def compound(self) -> tuple[Dim, ...]:
        """Dims made of several factors, each once."""
        return tuple(
            dict.fromkeys(
                dim for dims in (*self.operands, *self.results) for dim in dims if len(dim) > 1
            )
        )

    @cached_property
    def summed(self) -> frozenset[str]:
        """Factors some result lacks."""
        return frozenset(
            f for r in self.results for f in self.factors if not any(f in d for d in r)
        )

    def local(self, split: Split, mesh: Mapping[str, int]) -> dict[str, int]:
        """Local size of each factor (padded)."""
        return self._divided(split, mesh, slice(None))

    def work(self, split: Split, mesh: Mapping[str, int]) -> dict[str, int]:
        """Size of each factor that one device works through (padded): of a pair only the first
        member is divided, all pieces of the others pass by."""
        return self._divided(split, mesh, slice(1))

    def _divided(self, split: Split, mesh: Mapping[str, int], which: slice) -> dict[str, int]:
        sizes = dict(self.sizes)
        for choice, axes in split.pairs:
            for f in self.members(choice)[which]:
                if f in sizes:
                    sizes[f] = -(-sizes[f] // group(axes, mesh))
        return sizes

    def beyond(self, split: Split, mesh: Mapping[str, int]) -> float:
        """The part by which the gradient of operand 0 is more work than the forward pass: see
        `fringe`."""
        if not self.fringe:
            return 0.0
        local = self.local(split, mesh)
        return sum(n / local[f] for f, n in self.fringe.items() if split.axes(f))

    def operand(self, slot: int, split: Split, order: Sequence[str]) -> Layout:
        """Layout in which operand `slot` is needed under `split`; `order` is the mesh's axis
        order."""
        return self._read(self.operands[slot], split, order, slot in self.linear, operand=True)

    def result(self, slot: int, split: Split, order: Sequence[str]) -> Layout:
        """Layout in which result `slot` is left under `split`."""
        return self._read(self.results[slot], split, order, True, operand=False)

    def _read(
        self, dims: tuple[Dim, ...], split: Split, order: Sequence[str], linear: bool, operand: bool
    ) -> Layout:
        by = (
            {f: self.axes(f, split, order) for f in self.factors}
            if self.paired
            else dict(split.pairs)
        )
        cut = tuple(
            [
                (
                    by.get(dim[0], ())
                    if len(dim) == 1
                    else tuple([a for f in dim for a in by.get(f, ())])
                )
                for dim in dims
            ]
        )
        here = {a for axes in cut for a in axes}
        elsewhere = [a for _, axes in split.pairs for a in axes if a not in here]
        if not elsewhere:
            return Layout(cut)
        pending = split.axes(PENDING) if linear else ()
        missing = [a for a in order if a in elsewhere]
        if not operand:
            complete = {a for inner in self.inner for a in inner.axes(split, order)}
            return Layout(cut, partial=tuple(a for a in missing if a not in complete))
        return Layout(
            cut,
            partial=tuple(a for a in missing if a in pending),
            grad_partial=tuple(a for a in missing if a not in pending),
        )


@dataclass(frozen=True, slots=True)
class Split:
    """factor -> mesh axes (major first), as sorted pairs; factors without axes are left out. "+" is
    the pending pseudo-factor."""

    pairs: tuple[tuple[str, Axes], ...] = ()

    @staticmethod
    def of(assignment: Mapping[str, Sequence[str]]) -> Split:
        """The split of an assignment; of equal ones the same object, so that what repeats share is
        derived and priced once."""
        return _shared_split(tuple(sorted((f, tuple(a)) for f, a in assignment.items() if a)))

    def axes(self, factor: str) -> Axes:
        """Mesh axes that cut a factor, major first; () where it is whole."""
        for f, a in self.pairs:
            if f == factor:
                return a
        return ()

    @property
    def used(self) -> frozenset[str]:
        """Axes that do distinct work (or carry pending terms) under this split."""
        return frozenset(a for _, axes in self.pairs for a in axes)

    def as_dict(self) -> dict[str, list[str]]:
        """factor -> axes, as files have it."""
        return {f: list(a) for f, a in self.pairs}


@lru_cache(maxsize=1 << 14)
def _shared_split(pairs: tuple[tuple[str, Axes], ...]) -> Split:
    return Split(pairs)


_TOKEN = re.compile(r"\(([^)]*)\)|(\S+)")


def parse(
    line: str,
    shapes: Sequence[Sequence[int]],
    results: Sequence[Sequence[int]] = (),
    *,
    sizes: Mapping[str, int] | None = None,
    linear: tuple[int, ...] = (),
    flops: float = 0.0,
    **extra: object,
) -> Rule:
    """Bind a rule line to operand and result shapes.

    Raises ValueError when the line does not fit the shapes (a bug of the operator table, not of the
    user). Sizes of factors in compound dims must come from another dim or from `sizes`.
    """
    operands, outs, whole = _line(line)
    operands = operands if shapes else ()
    bound: dict[str, int] = dict(sizes or {})
    if len(operands) != len(shapes) or len(outs) != len(results):
        raise ValueError(
            f"rule {line!r}: {len(operands)} -> {len(outs)} values, given {len(shapes)} ->"
            f" {len(results)}"
        )
    for dims, shape in zip((*operands, *outs), (*shapes, *results), strict=True):
        if len(dims) != len(shape):
            raise ValueError(f"rule {line!r}: rank {len(dims)} for shape {tuple(shape)}")
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1 and bound.setdefault(dim[0], size) != size:
                raise ValueError(f"rule {line!r}: factor {dim[0]} is {bound[dim[0]]} and {size}")
    for dims, shape in zip((*operands, *outs), (*shapes, *results), strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if math.prod(bound[f] for f in dim) != size:
                raise ValueError(f"rule {line!r}: dim {dim} is not {size} with {bound}")
    return Rule(operands, outs, bound, whole, linear, flops=flops, **extra)  # type: ignore[arg-type]


@cache
def _line(
    line: str,
) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...], frozenset[str]]:
    """Operands, results and the factors that stay whole, as a rule line has them."""
    operands, outs = (
        tuple(_dims(part) for part in side.replace("!", "").split(",")) for side in line.split("->")
    )
    return operands, outs, frozenset(re.findall(r"([A-Za-z_]\w*)!", line))


def _dims(text: str) -> tuple[Dim, ...]:
    dims = []
    for compound, plain in _TOKEN.findall(text):
        dims.append(tuple(compound.split()) if compound else () if plain == "1" else (plain,))
    return tuple(dims)


@dataclass(frozen=True)
class Limits:
    """What candidates are generated: padding is tried up to `waste` (fraction of the padded size),
    pending axes and spatial factors only when asked."""

    waste: float = 0.2
    pending: bool = True
    spatial: bool = True
    forbidden: frozenset[str] = field(default_factory=frozenset)


USUAL = Limits()


def legal(rule: Rule, split: Split, mesh: Mapping[str, int], limits: Limits = USUAL) -> bool:
    """Whether a split may be used: see planner.sharding.candidates. An axis serves one factor."""
    axes = [a for _, names in split.pairs for a in names]
    if len(set(axes)) < len(axes):
        return False
    if rule.inner and any(
        i.kind == "collective-permute" and i.axes(split, mesh) != split.axes(i.factor)
        for i in rule.inner
    ):  # neighbours are counted along the mesh
        return False
    if any(
        (
            not rule.linear
            if f == PENDING
            else f not in rule.paired and (f not in rule.sizes or f in rule.whole)
        )
        for f, _ in split.pairs
    ):
        return False
    parts = {f: group(cut, mesh) for f, cut in split.pairs}
    return all(fits_alone(rule, f, n, limits) for f, n in parts.items()) and bool(
        fits_together(rule, parts)
    )


def fits_alone(rule: Rule, choice: str, n: int, limits: Limits) -> bool:
    """Whether a choice of a rule may be cut into n pieces, as far as it alone decides."""
    return divides(*alone_limits(rule, choice, limits), n)


def alone_limits(rule: Rule, choice: str, limits: Limits) -> tuple[int | None, float, float]:
    """What decides that: its size (None: any number will do), the most pieces, and the part of the
    padded size that padding may take (below 0: no padding)."""
    size = rule.sizes.get(choice) if choice not in rule.paired else None
    waste = -1.0 if choice in rule.no_pad else limits.waste
    return size, rule.most.get(choice, math.inf), waste


def divides(size: int | None, most: float, waste: float, n: int) -> bool:
    """Whether what has such limits (`alone_limits`) may be cut into n pieces."""
    if n > most or size is None:
        return n <= most
    wide = -(-size // n) * n
    return size >= n and (wide == size or (wide - size) / wide <= waste)


def fits_together(rule: Rule, parts: Mapping[str, Any]) -> Any:
    """Whether choices of a rule that share factors or dims may be cut into so many pieces: numbers,
    or arrays over splits."""
    fit: Any = True
    for f, n in parts.items():
        for member in rule.paired.get(f, ()):
            fit = fit & ((n == 1) | (rule.sizes[member] % _pieces(rule, member, parts) == 0))
    for dim in rule.compound:
        alone: Any = True  # every factor before is cut down to one
        for f in dim:
            # A padded factor inside a compound dim would interleave padding with data.
            n = _pieces(rule, f, parts)
            fit = fit & ((n == 1) | (alone & (rule.sizes[f] % n == 0)))
            alone = alone & (rule.sizes[f] <= n)
    return fit


def _pieces(rule: Rule, factor: str, parts: Mapping[str, Any]) -> Any:
    """Into how many pieces a factor is cut, alone and in pairs."""
    n = parts.get(factor, 1)
    for name, members in rule.paired.items():
        if factor in members:
            n = n * parts.get(name, 1)
    return n
