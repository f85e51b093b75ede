"""All ways to cut an operator on a mesh: every split that its rule allows, found at once as arrays
over splits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache

import numpy as np

from planner.sharding.layout import Axes
from planner.sharding.rule import (
    PENDING,
    USUAL,
    Limits,
    Rule,
    Split,
    alone_limits,
    divides,
    fits_together,
)


def candidates(rule: Rule, mesh: Mapping[str, int], limits: Limits = USUAL) -> tuple[Split, ...]:
    """All legal splits of the rule over the mesh, the empty one first; axes of one factor keep mesh
    order.

    An axis of size 1 is never assigned. Legal: not a whole factor; padding within limits; minor
    factors of a compound dim only where every factor before them is cut down to one; pending axes
    only for linear rules.
    """
    axes = [a for a, n in mesh.items() if n > 1]
    options = [
        f
        for f in rule.factors
        if f not in rule.whole
        and rule.sizes[f] > 1
        and f not in limits.forbidden
        and (limits.spatial or f not in rule.spatial)
    ]
    options += [f for f in rule.paired if f not in limits.forbidden]
    if rule.linear and limits.pending:
        options.append(PENDING)
    menu = tuple(options), tuple(axes)
    devices = [1]  # along each set of axes
    for a in axes:
        devices += [n * mesh[a] for n in devices]
    pieces = tuple(devices)
    alone = tuple([_fit(*alone_limits(rule, f, limits), pieces) for f in options])
    splits, kept = _alone(*menu, alone)
    if rule.paired or rule.compound:
        cut = np.array(devices)[_menu(*menu)[1]]
        both = kept & fits_together(rule, dict(zip(options, cut, strict=True)))
        return _of(*menu, both.tobytes())
    return splits


@cache
def _fit(size: int | None, most: float, waste: float, pieces: tuple[int, ...]) -> tuple[bool, ...]:
    """Which numbers of pieces a choice with these limits (`alone_limits`) may be cut into."""
    return tuple([divides(size, most, waste, n) for n in pieces])


@cache
def _alone(
    options: tuple[str, ...], axes: Axes, fit: tuple[tuple[bool, ...], ...]
) -> tuple[tuple[Split, ...], np.ndarray]:
    """The splits of a menu each of whose choices may be cut so by itself, and whether each of the
    menu is one. fit: per option and set of axes whether they may cut it."""
    splits, bits = _menu(options, axes)
    kept = np.ones(len(splits), bool)
    if options:
        kept = np.array(fit)[np.arange(len(options))[:, None], bits].all(axis=0)
    return _of(options, axes, kept.tobytes()), kept


@cache
def _of(options: tuple[str, ...], axes: Axes, kept: bytes) -> tuple[Split, ...]:
    """The splits of a menu that are kept (a byte each): the same object for the same ones, so that
    what is read of them is read once."""
    return tuple(itertools.compress(_menu(options, axes)[0], kept))


@cache
def _menu(options: tuple[str, ...], axes: Axes) -> tuple[tuple[Split, ...], np.ndarray]:
    """Every way to give each of the axes to an option or to none, the empty one first, and bits of
    the axes that each option gets. [options, splits]"""
    each = list(itertools.product(range(-1, len(options)), repeat=len(axes)))
    bits = np.zeros((len(options) + 1, len(each)), np.int64)
    for k, options_of in enumerate(np.array(each, np.int64).reshape(len(each), len(axes)).T):
        bits[options_of, np.arange(len(each))] |= 1 << k
    splits = []
    for of in each:
        given: dict[str, list[str]] = {}
        for a, k in zip(axes, of, strict=True):
            if k >= 0:
                given.setdefault(options[k], []).append(a)
        splits.append(Split.of(given))
    return tuple(splits), bits[:-1]  # the last row is of axes that no option gets
