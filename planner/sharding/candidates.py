"""All ways to cut an operator on a mesh: every split that its rule allows, found at once as arrays
over splits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache, lru_cache

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

RULES = 4096
"""Rules whose choices are remembered."""
AloneLimits = tuple[int | None, float, float]
"""As `alone_limits` has them."""


def candidates(rule: Rule, mesh: Mapping[str, int], limits: Limits = USUAL) -> tuple[Split, ...]:
    """All legal splits of the rule over the mesh, the empty one first; axes of one factor keep mesh
    order.

    An axis of size 1 is never assigned. Legal: not a whole factor; padding within limits; minor
    factors of a compound dim only where every factor before them is cut down to one; pending axes
    only for linear rules.
    """
    axes = tuple([a for a, n in mesh.items() if n > 1])
    options, bounds = _choices(rule, limits)
    menu = options, axes
    devices = [1]  # along each set of axes
    for a in axes:
        devices += [n * mesh[a] for n in devices]
    splits, kept = _alone(*menu, _fits(bounds, tuple(devices)))
    if rule.paired or rule.compound:
        cut = np.array(devices)[_menu(*menu)[1]]
        both = kept & fits_together(rule, dict(zip(options, cut, strict=True)))
        return _of(*menu, both.tobytes())
    return splits


@lru_cache(maxsize=RULES)
def _choices(rule: Rule, limits: Limits) -> tuple[tuple[str, ...], tuple[AloneLimits, ...]]:
    """What a split of the rule may give axes to, and what each may be cut into by itself."""
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
    return tuple(options), tuple([alone_limits(rule, f, limits) for f in options])


@cache
def _fits(bounds: tuple[AloneLimits, ...], pieces: tuple[int, ...]) -> tuple[tuple[bool, ...], ...]:
    """Which numbers of pieces choices with these limits may be cut into."""
    return tuple([tuple([divides(*limits, n) for n in pieces]) for limits in bounds])


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
    choices = list(itertools.product(range(-1, len(options)), repeat=len(axes)))
    bits = np.zeros((len(options) + 1, len(choices)), np.int64)
    for k, options_of in enumerate(np.array(choices, np.int64).reshape(len(choices), len(axes)).T):
        bits[options_of, np.arange(len(choices))] |= 1 << k
    splits = []
    for of in choices:
        axes_by_option: dict[str, list[str]] = {}
        for a, k in zip(axes, of, strict=True):
            if k >= 0:
                axes_by_option.setdefault(options[k], []).append(a)
        splits.append(Split.of(axes_by_option))
    return tuple(splits), bits[:-1]  # the last row is of axes that no option gets
