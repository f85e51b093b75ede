"""Message passing for problems of thousands of nodes: no two nodes of a colour are neighbours, so
all of them are passed at once.

The same passes as `messages_small`, in the order of the nodes' colours: sequential tree-reweighted
message passing. Chains are short in that order (as many nodes as there are colours), so a bound
takes some more passes than in the order of the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.solvers.neighbourhood.flat import Flat


@dataclass(frozen=True)
class _Sent:
    """Messages of one colour's nodes one way whose tables have the same shape [own, theirs]."""

    own: np.ndarray  # [own, messages] place in what the colour's nodes know
    back: np.ndarray  # [own, messages] place of the message the other way
    table: np.ndarray  # [own, messages, theirs]
    to: np.ndarray  # [messages, theirs] place of the message

    def __call__(self, part: np.ndarray, message: np.ndarray) -> float:
        """Send; what was taken off the messages."""
        best = (self.table + (part[self.own] - message[self.back])[:, :, None]).min(axis=0)
        least = best.min(axis=1)
        message[self.to] = best - least[:, None]
        return float(least.sum())


@dataclass(frozen=True)
class _Colour:
    """Nodes that are no neighbours of each other. Positions of its nodes, one node after the other,
    are its places."""

    nodes: np.ndarray
    positions: np.ndarray
    first: np.ndarray  # [nodes] place
    node: np.ndarray  # [places] which of the nodes
    heard: tuple[
        np.ndarray, np.ndarray
    ]  # [values] place in the messages, place here: of later nodes first
    later: int  # values of later nodes
    known: tuple[
        np.ndarray, np.ndarray, np.ndarray, np.ndarray
    ]  # [values] of earlier nodes' tables: first row, options, neighbour, place here
    share: np.ndarray  # [places]
    sent: tuple[tuple[_Sent, ...], tuple[_Sent, ...]]  # to later and to earlier nodes

    def summed(self, message: np.ndarray, values: slice) -> np.ndarray:
        """Sum of some messages to each place."""
        source, here = self.heard
        return np.bincount(here[values], message[source[values]], len(self.positions))


def coloured(flat: Flat) -> np.ndarray:
    """A colour per node, none like a neighbour's: nodes with most neighbours choose first.
    [nodes]"""
    first, other = flat.first.tolist(), flat.other.tolist()
    colour = [-1] * (len(first) - 1)
    for v in np.argsort(-np.diff(flat.first), kind="stable").tolist():
        taken = {colour[u] for u in other[first[v] : first[v + 1]]}
        colour[v] = next(c for c in range(len(taken) + 1) if c not in taken)
    return np.array(colour, np.int64)


class Passes:
    """Messages of a model, all zero at first."""

    def __init__(self, flat: Flat) -> None:
        self.flat, self.message = flat, np.zeros(int(flat.message[-1]))
        self._owner, colour = (
            np.repeat(np.arange(len(flat.first) - 1), np.diff(flat.first)),
            coloured(flat),
        )
        before = colour[flat.other] < colour[self._owner]
        ends = [np.bincount(self._owner, way, len(colour)) for way in (before, ~before)]
        share = 1.0 / np.maximum(1, np.maximum(*ends))
        self._colours = [
            self._colour(np.flatnonzero(colour == c), before, share)
            for c in range(int(colour.max(initial=-1)) + 1)
        ]

    def _colour(self, nodes: np.ndarray, before: np.ndarray, share: np.ndarray) -> _Colour:
        f, sizes = self.flat, np.diff(self.flat.offset)
        wide = sizes[nodes]
        first, node = np.cumsum(wide) - wide, np.repeat(np.arange(len(nodes)), wide)
        place = np.zeros(len(sizes), np.int64)
        place[nodes] = first
        mine = np.isin(self._owner, nodes)
        later, earlier = np.flatnonzero(mine & ~before), np.flatnonzero(mine & before)
        both = np.concatenate((later, earlier))
        which, number = _spread(sizes[self._owner[both]])
        heard = f.message[both][which] + number, place[self._owner[both]][which] + number
        which, number = _spread(sizes[self._owner[earlier]])
        a = earlier[which]
        known = (
            f.place[f.back[a]] + number,
            sizes[self._owner[a]],
            f.other[a],
            place[self._owner[a]] + number,
        )
        sent = tuple(tuple(self._sent(way, place, sizes)) for way in (later, earlier))
        positions = np.arange(wide.sum()) - first[node] + f.offset[nodes][node]
        return _Colour(
            nodes,
            positions,
            first,
            node,
            heard,
            int(sizes[self._owner[later]].sum()),
            known,
            share[nodes][node],
            sent,  # type: ignore[arg-type]
        )

    def _sent(self, way: np.ndarray, place: np.ndarray, sizes: np.ndarray) -> list[_Sent]:
        f, by_shape = self.flat, []
        shape = np.stack((sizes[self._owner[way]], sizes[f.other[way]]))
        for own_options, theirs in np.unique(shape, axis=1).T.tolist():
            a = way[(shape[0] == own_options) & (shape[1] == theirs)]
            rows, columns = np.arange(own_options)[:, None], np.arange(theirs)
            table = f.table[f.place[a][None, :, None] + rows[:, :, None] * theirs + columns]
            by_shape.append(
                _Sent(
                    place[self._owner[a]] + rows,
                    f.message[a] + rows,
                    table,
                    f.message[f.back[a]][:, None] + columns,
                )
            )
        return by_shape

    def sweep(self, unary: np.ndarray, x: np.ndarray, regret: np.ndarray) -> float:
        """One pass there and back under unary costs [positions]; the bound. x [nodes] becomes the
        choice decoded on the way there, regret [positions] what the bound of the pass before rises
        by at least when an option is forced."""
        f, message, bound = self.flat, self.message, 0.0
        for c in self._colours:
            later = unary[c.positions] + c.summed(message, slice(0, c.later))
            total = later + c.summed(message, slice(c.later, None))
            regret[c.positions] = total - np.minimum.reduceat(total, c.first)[c.node]
            row, wide, neighbour, here = c.known
            x[c.nodes] = _least(
                later + np.bincount(here, f.table[row + x[neighbour] * wide], len(later)), c
            )
            for send in c.sent[0]:
                send(total * c.share, message)
        for c in reversed(self._colours):
            total = unary[c.positions] + c.summed(message, slice(None))
            least = np.minimum.reduceat(total, c.first)
            part = (total - least[c.node]) * c.share
            bound += float(least.sum()) + sum(send(part, message) for send in c.sent[1])
        return bound


def _spread(wide: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """So many values of each: whose, and which of its own. [values] both"""
    return np.repeat(np.arange(len(wide)), wide), np.arange(wide.sum()) - np.repeat(
        np.cumsum(wide) - wide, wide
    )


def _least(cost: np.ndarray, c: _Colour) -> np.ndarray:
    """The first option of least cost of each node. [nodes]"""
    positions = np.flatnonzero(cost == np.minimum.reduceat(cost, c.first)[c.node])
    node = c.node[positions]
    return positions[np.append(True, node[1:] != node[:-1])] - c.first
