"""Bounds of plans whose recomputed blocks save values by name, whichever names those are.

What runs again is a decision of its own there. Each node of a block that the backward pass asks for
has a shortest way to an operand that a gradient reads (planner.analysis.recompute_demand). Where no
value on the way has a name, the node runs again under every policy. Where one has, it runs again or
that value is saved: in bytes, and in copies into stacks of loops and out of them; or it waits in
the host's memory, out and in over the host's link, where that is for the search to say. Where
several have, nothing is counted of it. So every option of the node that makes a named value costs
the cheapest of these, at each price of a byte, and no policy takes less: one elimination for all of
them, with the tables of a space without recomputation.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from planner.analysis.facts import GraphFacts
from planner.execution.block_values import block_values
from planner.execution.save_policies import saving
from planner.pricing.loop_copies import copied
from planner.search.relaxation import Relaxation, units
from planner.space.assemble import least_working
from planner.space.named_policies import bytes_of_value
from planner.space.stage_shares import parts_of_stage, slowdown
from planner.space.techniques import Techniques
from planner.space.variables import Space

SETTLED = 24
"""Choices of names that are bounded of a search node at most."""
Settled = tuple[tuple[str, bool], ...]
"""Names that are saved, or are not."""
Names = tuple[str, tuple[str, ...]]
"""The policy of a choice, and names of which it is open whether they are saved on the device."""


@dataclass(frozen=True)
class NamedValues:
    """Of one node of every variable, per option: again_s: seconds that run again in any case;
    spared_s: seconds that do unless the named value that the variable makes is saved; saved_bytes:
    what that takes at least, of all repeats; copied_bytes: what is copied of it into stacks and out
    of them. [options] names: of the values of each such variable.
    """

    again_s: np.ndarray
    spared_s: np.ndarray
    saved_bytes: np.ndarray
    copied_bytes: np.ndarray
    names: Mapping[int, tuple[str, ...]]


def named_values(space: Space) -> NamedValues:
    """Those of a space, kept in its memo."""
    if "named values" not in space.memo:
        space.memo["named values"] = _named_values(space)
    values: NamedValues = space.memo["named values"]
    return values


def _named_values(space: Space) -> NamedValues:
    base, variables = space.base, space.variables
    names = block_values(base.graph, base.loops)
    name_of = {t: name for t, name in names.items() if t not in base.gated.tensors}
    repeats = {i: n for first, period, n in base.loops for i in range(first, first + period)}
    recomputed_s, spared_s, saved_bytes, copied_bytes = (
        [np.zeros(v.options) for v in variables] for _ in range(4)
    )
    saves: dict[int, dict[str, None]] = {}
    for i, on_path in _named_values_on_paths(base, name_of).items():
        k = space.op_of[base.shared[i]]
        seconds = np.where(
            np.isfinite(variables[k].costs.forward_s), variables[k].costs.forward_s, 0
        )
        if not on_path:
            recomputed_s[k] = recomputed_s[k] + seconds * repeats[i] / variables[k].count
        elif len(on_path) == 1:
            maker = space.op_of[base.shared[base.graph.producer[on_path[0]]]]
            least = seconds if maker == k else float(seconds.min())
            spared_s[maker] = spared_s[maker] + least * repeats[i] / variables[maker].count
            saves.setdefault(maker, {})[on_path[0]] = None
    for k, tensors in saves.items():
        of_name: dict[str, np.ndarray] = {}
        for t in tensors:  # layers that decide alike have a value of a name each
            size = repeats[base.graph.producer[t]] * bytes_of_value(space, t, k)
            of_name[name_of[t]] = of_name.get(name_of[t], 0.0) + size
        saved_bytes[k] = np.minimum.reduce([*of_name.values()])
        copied_bytes[k] = saved_bytes[k] * all(copied(base, t, space.pricer) for t in tensors)
    return NamedValues(
        np.concatenate(recomputed_s),
        np.concatenate(spared_s),
        np.concatenate(saved_bytes),
        np.concatenate(copied_bytes),
        {k: tuple(dict.fromkeys(name_of[t] for t in tensors)) for k, tensors in saves.items()},
    )


def _named_values_on_paths(base: GraphFacts, named: Container[str]) -> dict[int, list[str]]:
    """Node that the backward pass asks for -> the named values on its way, its own result first."""
    named_on_path = {}
    for i, read in base.demanded.items():
        path = [read.tensor]
        while read.again:
            read = base.demanded[read.reader]
            path.append(read.tensor)
        named_on_path[i] = [t for t in dict.fromkeys(path) if t in named]
    return named_on_path


@dataclass(frozen=True)
class Outlook:
    """Of all policies of names under some techniques: no plan is below bound_s (seconds) under the
    limit, below free_s whatever memory it takes. policies: bounds of those that may be below what
    is wanted, the least first, each with the names that it was found by."""

    bound_s: float
    free_s: float
    policies: tuple[tuple[float, str], ...] = ()


class _NamedUnits(NamedTuple):
    """Of the named value that an option's variable makes. spared: units of what runs again where it
    is not saved, or where that is less (sent) of its way to the host's memory and back; copies:
    units of those where it is saved on the device, and size its bytes then. [options looked at]"""

    spared: np.ndarray
    sent: np.ndarray
    copies: np.ndarray
    size: np.ndarray


class NamedRelaxation(Relaxation):
    """Bounds of the options that another looks at, under every policy of names. Techniques are
    those of a step that recomputes nothing: what runs again stands with the options.

    A price of a byte may leave a name half saved: names are then settled one by one, saved and not.
    """

    def __init__(self, relaxed: Relaxation, offloads: bool) -> None:
        """offloads: whether values may wait in the host's memory."""
        self.__dict__.update(copy(relaxed).__dict__)
        self._offloads = offloads and relaxed.space.pricer.mesh.stages == 1
        self._line_searches, self._values = {}, named_values(relaxed.space)
        self._known: dict[Techniques, _NamedUnits] = {}
        self._outlooks: dict[tuple, Outlook] = {}
        """What `outlook` found: ZeRO stages 1 and 2 are the same in one microbatch."""
        self._settled: Settled = ()
        self._room = np.inf
        self._saved: dict[bool, tuple[frozenset[str], frozenset[str]]] = {}
        """Names saved on the device, and those offloaded, by the last choice that fitted, and by
        the last that did not."""

    def outlook(
        self, techniques: Techniques, limit_bytes: float, below_s: float, policies: int
    ) -> Outlook:
        """What is proven of techniques. below_s: plans of at least so many are not looked for;
        policies: how many are to be found, those of the least bounds; 0 where names are not
        settled."""
        not_recomputed = replace(techniques, recompute="none")
        digest = blake2b(self._seconds(not_recomputed).tobytes(), digest_size=16)
        digest.update(self._bytes(not_recomputed).tobytes())
        room = limit_bytes - least_working(self.space, not_recomputed, uncut=True)
        key = replace(not_recomputed, zero_stage=0), digest.digest(), room, below_s, policies
        if key not in self._outlooks:
            self._outlooks[key] = self._looked(not_recomputed, limit_bytes, below_s, policies)
        return self._outlooks[key]

    def _looked(
        self, techniques: Techniques, limit_bytes: float, below_s: float, policies: int
    ) -> Outlook:
        """`outlook` of techniques that recompute nothing."""
        self._settled = ()
        if (quick := self.quick(techniques, techniques.microbatches)) >= below_s:
            return Outlook(quick, quick)
        bound_s, free_s = self._bounds(techniques, limit_bytes, below_s)
        if not policies or bound_s >= below_s:
            return Outlook(bound_s, free_s)
        tree: list[tuple[float, int, Settled, Names]] = [(bound_s, 0, self._settled, self._names())]
        settled_policies, least, number = list[tuple[float, str]](), np.inf, 0
        while tree and len(settled_policies) < policies:  # what is left is not below these
            bound_s, _, settled, (policy, unsure) = heapq.heappop(tree)
            if bound_s >= below_s:
                least = min(least, bound_s)
            elif not unsure or number >= SETTLED:
                settled_policies.append((bound_s, policy))
            else:
                for saved in (True, False):
                    self._settled, number = (*settled, (unsure[0], saved)), number + 1
                    raised_s, _ = self._bounds(techniques, limit_bytes, below_s)
                    heapq.heappush(
                        tree, (max(bound_s, raised_s), number, self._settled, self._names())
                    )
        return Outlook(
            min([least, *(s for s, _ in settled_policies)]), free_s, tuple(settled_policies)
        )

    def of_levels_s(self, techniques: Techniques, levels: Iterable[int]) -> float:
        """A bound (seconds) of all these ZeRO stages, whatever the memory; 0 microbatches stand for
        as many as hide the bubble."""
        not_recomputed = replace(techniques, recompute="none")
        seconds_by_stage = [self._seconds(replace(not_recomputed, zero_stage=z)) for z in levels]
        cost, slow = np.minimum.reduce(seconds_by_stage), slowdown(self.space, not_recomputed)
        value, _ = self._priced(not_recomputed, units(cost, slow), np.zeros(len(cost)), 0.0)
        return self._proven(value * slow) if np.isfinite(value) else np.inf

    def _bounds(
        self, techniques: Techniques, limit_bytes: float, below_s: float
    ) -> tuple[float, float]:
        """A bound under the limit and one without, the settled names as they are."""
        slow = slowdown(self.space, techniques)
        self._room = limit_bytes - least_working(self.space, techniques, uncut=True)
        cost, use = units(self._seconds(techniques), slow), self._bytes(techniques)
        self._saved = {}
        value, used = self._priced(techniques, cost, use, 0.0)
        if not np.isfinite(value):
            return np.inf, np.inf
        free_s = bound_s = self._proven(value * slow)
        if used > self._room and free_s < below_s:
            limited_s = self.limited(techniques, limit_bytes, (free_s, used), below_s)
            bound_s = max(free_s, limited_s)
        return bound_s, free_s

    def _names(self) -> Names:
        """The policy of the last choice, of the one that fitted if any did, and names that the last
        one that fitted and the last one that did not are at odds about."""
        none = frozenset[str](), frozenset[str]()
        some = next(iter(self._saved.values()), none)
        (fits, offloaded), (over_limit, _) = (
            self._saved.get(True, some),
            self._saved.get(False, some),
        )
        return saving(fits, offloaded - fits), tuple(
            sorted((fits ^ over_limit) - dict(self._settled).keys())
        )

    def _seconds(self, techniques: Techniques) -> np.ndarray:
        seconds: np.ndarray = (
            self._least_seconds(techniques)
            + self._passes(techniques) * (self._values.again_s[self.considered])
        )
        return seconds

    def _bytes(self, techniques: Techniques) -> np.ndarray:
        return super()._bytes(replace(techniques, recompute="block"))

    def _passes(self, techniques: Techniques) -> np.ndarray:
        """How often a device runs what nodes of an option's variable do. [options looked at]"""
        passes_of_nodes = parts_of_stage(self.space, techniques)[0] * [
            v.count for v in self.space.variables
        ]
        passes: np.ndarray = np.repeat(
            self.space.parts * passes_of_nodes, np.diff(self._all_offset)
        )[self.considered]
        return passes

    def _named(self, techniques: Techniques) -> _NamedUnits:
        """What the value that an option makes costs. [options looked at]"""
        if techniques not in self._known:
            passes, samples = parts_of_stage(self.space, techniques)
            times, kept = np.diff(self._all_offset), self.considered
            price, slow = self.space.pricer, slowdown(self.space, techniques)
            size = self._values.saved_bytes
            passes_of_option = np.repeat(self.space.parts * passes, times)
            stacked = self._values.copied_bytes
            copies, offload_s = (
                price.loop_copy_s(stacked, stacked) * passes_of_option,
                2 * price.host_s(size) * passes_of_option,
            )
            microbatch_share = (
                self.space.parts
                / max(1, techniques.microbatches)
                * (1 + price.runtime.memory_slack)
            )
            recompute_units = units(self._values.spared_s[kept] * self._passes(techniques), slow)
            offloaded = (
                units(offload_s[kept], slow) < recompute_units
                if self._offloads
                else np.zeros(len(recompute_units), bool)
            )
            self._known[techniques] = _NamedUnits(
                np.where(offloaded, units(offload_s[kept], slow), recompute_units),
                offloaded,
                units(copies[kept], slow),
                (size * np.repeat(microbatch_share * samples, times))[kept],
            )
        return self._known[techniques]

    def _priced(
        self, techniques: Techniques, cost: np.ndarray, option_bytes: np.ndarray, price: float
    ) -> tuple[float, float]:
        spared, offloaded, copies, size = self._named(techniques)
        saved = copies + price * size < spared
        for name, value in self._settled:
            for k, names in self._values.names.items():
                if names[0] == name:
                    saved[self.offset[k] : self.offset[k + 1]] = value
        extra = np.where(saved, copies + price * size, spared)
        least, choice, _ = self._at(techniques, price).run(cost + price * option_bytes + extra)
        if not np.isfinite(least):
            return least, np.inf
        chosen = self.offset[:-1] + choice
        used = float(option_bytes[chosen].sum() + size[chosen][saved[chosen]].sum())
        self._saved[used <= self._room] = (
            frozenset(names[0] for k, names in self._values.names.items() if saved[chosen[k]]),
            frozenset(names[0] for k, names in self._values.names.items() if offloaded[chosen[k]]),
        )
        return least, used

    def quick(self, techniques: Techniques, microbatches: int) -> float:
        """As that of any techniques, what a value costs at least with the options."""
        techniques_at = replace(techniques, microbatches=microbatches)
        slow, (cheapest, value) = slowdown(self.space, techniques_at), self._least
        spared, _, copies, _ = self._named(techniques_at)
        cost = units(self._seconds(techniques_at), slow) + np.minimum(spared, copies)
        added = np.subtract(cost, cheapest, out=np.full(len(cost), np.inf), where=np.isfinite(cost))
        least = np.minimum.reduceat(added, self.offset[:-1]).sum()
        return self._proven((value + float(least)) * slow)
