"""Reshape and Transpose as moves of atoms: the factors that dims are made of.

A tensor's dims are groups of atoms, major first. A Reshape regroups the same sequence of atoms
(splitting some), a Transpose permutes groups. Two things follow: a chain of views has a shortest
form, and a marked atom (the batch) can be followed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

Shape = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Atom:
    """A factor of a dim. `batch` atoms may not be split; `parts` are what a split atom became."""

    size: int
    batch: bool = False
    parts: list[Atom] = field(default_factory=list)

    def leaves(self) -> list[Atom]:
        """The atoms this one consists of now."""
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]


Groups = list[list[Atom]]


def refresh(groups: Groups) -> Groups:
    """The same groups with split atoms replaced by their parts."""
    return [[leaf for atom in group for leaf in atom.leaves()] for group in groups]


def regroup(groups: Groups, target: Shape) -> Groups | None:
    """The atoms of `groups` regrouped into dims `target`, splitting atoms where needed; None when
    they do not align."""
    queue = [atom for group in refresh(groups) for atom in group]
    regrouped: Groups = []
    position = 0
    for n in target:
        group: list[Atom] = []
        if n == 1:
            if position < len(queue) and queue[position].size == 1:
                group.append(queue[position])
                position += 1
            regrouped.append(group)
            continue
        need = n
        while need > 1:
            if position >= len(queue):
                return None
            atom = queue[position]
            if need % atom.size:
                common = math.gcd(need, atom.size)
                if common == 1 or atom.batch:
                    return None
                atom.parts = [Atom(common), Atom(atom.size // common)]
                queue[position : position + 1] = atom.parts
                continue
            group.append(atom)
            need //= atom.size
            position += 1
        regrouped.append(group)
    if position < len(queue):
        if any(atom.size != 1 for atom in queue[position:]):
            return None
        if regrouped:
            regrouped[-1].extend(queue[position:])
    return regrouped


Step = tuple[str, Shape]
"""("reshape", target) or ("transpose", perm)."""


def shortest(shape: Shape, steps: Sequence[Step]) -> Sequence[Step] | None:
    """The fewest steps with the effect of `steps` on a tensor of this shape (at most reshape,
    transpose, reshape)."""
    return _shortest(shape, tuple(steps))


@lru_cache(maxsize=256)  # the layers of a model are viewed alike
def _shortest(shape: Shape, steps: tuple[Step, ...]) -> Sequence[Step] | None:
    source: Groups = [[Atom(n)] for n in shape]
    groups: Groups | None = source
    if all(kind == "reshape" for kind, _ in steps):
        return [] if steps[-1][1] == shape else [steps[-1]]
    plain = [
        s
        for k, s in enumerate(steps)
        if s[0] != "reshape" or k + 1 == len(steps) or steps[k + 1][0] != "reshape"
    ]
    for kind, arg in plain:  # of reshapes in a row the last alone counts
        assert groups is not None
        groups = [groups[k] for k in arg] if kind == "transpose" else regroup(groups, arg)
        if groups is None:
            return None
    regrouped = refresh(groups or [])
    order = [atom for group in refresh(source) for atom in group]
    place = {id(atom): k for k, atom in enumerate(order)}
    if len(place) != sum(map(len, regrouped)):
        return None
    target = tuple(math.prod(atom.size for atom in group) for group in regrouped)
    blocks: list[list[Atom]] = []
    for group in regrouped:
        for k, atom in enumerate(group):
            if k and place[id(atom)] == place[id(group[k - 1])] + 1:
                blocks[-1].append(atom)
            else:
                blocks.append([atom])
    arranged = sorted(range(len(blocks)), key=lambda b: place[id(blocks[b][0])])
    if arranged == sorted(arranged):
        return [] if target == shape else [("reshape", target)]
    sizes = [math.prod(atom.size for atom in block) for block in blocks]
    best = _steps(
        shape, target, [sizes[b] for b in arranged], [arranged.index(b) for b in range(len(blocks))]
    )
    if (
        [] in regrouped
    ):  # a new dim of 1 may ride along in the first reshape instead of needing a second
        padded, order_ = _with_ones(regrouped, blocks, arranged, sizes)
        other = _steps(shape, target, padded, order_)
        best = min(best, other, key=len)
    return best


def _steps(shape: Shape, target: Shape, first: Sequence[int], perm: Sequence[int]) -> list[Step]:
    steps: list[Step] = []
    if tuple(first) != shape:
        steps.append(("reshape", tuple(first)))
    steps.append(("transpose", tuple(perm)))
    if tuple(first[k] for k in perm) != target:
        steps.append(("reshape", target))
    return steps


def _with_ones(
    regrouped: Groups, blocks: list[list[Atom]], arranged: list[int], sizes: list[int]
) -> tuple[list[int], list[int]]:
    """Block sizes in source order and the permutation, with a 1 for each empty output dim placed
    after its left neighbour."""
    slots: list[int | None] = []  # output order: block number, or None for a new 1
    b = 0
    for group in regrouped:
        if not group:
            slots.append(None)
        else:
            count = 0
            while count < len(group):
                count += len(blocks[b])
                slots.append(b)
                b += 1
    sequence: list[tuple[int, int | None]] = []  # source order: (output position, block)
    for block in arranged:
        slot = slots.index(block)
        sequence.append((slot, block))
        slot += 1
        while slot < len(slots) and slots[slot] is None:
            sequence.append((slot, None))
            slot += 1
    lead = 0
    while lead < len(slots) and slots[lead] is None:
        sequence.insert(lead, (lead, None))
        lead += 1
    where = {position: k for k, (position, _) in enumerate(sequence)}
    return [1 if block is None else sizes[block] for _, block in sequence], [
        where[p] for p in range(len(slots))
    ]
