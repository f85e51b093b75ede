"""Compiled loops of `cutset` (numba): which nodes keep their options, and the elimination of all
others. The twin of `cuts_numpy`.

All take a `flat.Flat`. Free nodes are eliminated one a step. A step's table has an axis for each
node of its scope, and so has the message that it sends, the first axis fastest.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from planner.solvers.neighbourhood.flat import Flat

PASSES = 10
"""Passes over all positions that an elimination's choice takes to be made to fit."""


class Order(NamedTuple):
    """Free nodes in the order of their elimination, and the scope of each step."""

    node: np.ndarray  # [steps]
    position: np.ndarray  # [nodes] step of each node, -1 of those that are kept
    scope_first: np.ndarray  # [steps + 1] first entry of each step's scope
    scope: np.ndarray  # [entries] later nodes that a step's table has axes for, next one first


class Messages(NamedTuple):
    """What each step sends, and which steps read it."""

    child_first: np.ndarray  # [steps + 1] first entry of the steps whose messages a step reads
    child: np.ndarray  # [entries] those steps
    first: np.ndarray  # [steps + 1] where each step's message starts
    value: np.ndarray  # [values] all messages


class Table(NamedTuple):
    """What one step's table is the sum of, by the axes that it follows: none, one, or more."""

    own: np.ndarray  # [options] follows no axis
    single: np.ndarray  # [axes, values] follows one
    taken: np.ndarray  # [axes] whether there is something that follows that one alone
    start: np.ndarray  # [messages] where messages that follow more axes begin
    stride: np.ndarray  # [messages, axes] and how far apart their values are along each
    extent: np.ndarray  # [axes] options of each axis' node


class Room(NamedTuple):
    """Arrays that sending a message works in."""

    digit: np.ndarray  # [axes] option of each
    lead: np.ndarray  # [messages] place of the first value read
    acc: np.ndarray  # [options]
    row: np.ndarray  # [options]


@njit(cache=True)
def _drop(near, first, count, u, v):
    """Take v off u's neighbours; whether it was there."""
    for a in range(first[u], first[u] + count[u]):
        if near[a] == v:
            count[u] -= 1
            near[a] = near[first[u] + count[u]]
            return True
    return False


@njit(cache=True)
def _has(near, first, count, u, v):
    for a in range(first[u], first[u] + count[u]):
        if near[a] == v:
            return True
    return False


@njit(cache=True)
def _in_order(order, position, scope_first, scope):
    """Scopes without what was kept later, next step first, in place; the entries that are left."""
    filled, begin = 0, 0
    for t in range(len(order)):
        end, start = scope_first[t + 1], filled
        for a in range(begin, end):
            p = position[scope[a]]
            if p < 0:
                continue
            b = filled
            while b > start and position[scope[b - 1]] > p:
                scope[b] = scope[b - 1]
                b -= 1
            scope[b] = order[p]
            filled += 1
        begin, scope_first[t + 1] = end, filled
    return filled


# Long: one compiled loop over a heap, whose arrays of neighbours and scopes grow as it goes.
@njit(cache=True)
def draw(f, most, room, luck, tie):
    """A cut under which no table has more than `most` entries, nor all messages more than `room`:
    nodes go in the order of their tables' sizes; where a table is too large, the node or neighbour
    with most neighbours times `luck` is kept. tie: of equal sizes, the least goes first. [nodes]
    both
    """
    n = len(f.offset) - 1
    logs = np.empty(n)
    for v in range(n):
        logs[v] = math.log(f.offset[v + 1] - f.offset[v])
    # Rows of neighbours with room to grow; one that is full moves to the end.
    first, room_of, count = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    used = 0
    for v in range(n):
        count[v] = f.first[v + 1] - f.first[v]
        first[v], room_of[v] = used, 2 * count[v] + 8
        used += room_of[v]
    neighbours = np.empty(4 * used, np.int64)
    size, stamp, gone = logs.copy(), np.zeros(n, np.int64), np.zeros(n, np.bool_)
    for v in range(n):
        for k in range(count[v]):
            u = f.other[f.first[v] + k]
            neighbours[first[v] + k] = u
            size[v] += logs[u]
    heap = [(size[v] + tie[v], v, 0) for v in range(n)]
    heapq.heapify(heap)
    order, position = np.empty(n, np.int64), np.full(n, -1, np.int64)
    scope_first, scope = np.zeros(n + 1, np.int64), np.empty(8 * n + 64, np.int64)
    steps, filled, total, limit = 0, 0, 0.0, math.log(most)
    while len(heap):
        _, v, stamp_then = heapq.heappop(heap)
        if gone[v] or stamp_then != stamp[v]:
            continue
        sent = math.exp(min(size[v] - logs[v], 700.0))
        fits = size[v] <= limit and total + sent <= room
        removed = v
        if fits:
            total += sent
            if filled + count[v] > len(scope):
                scope = np.concatenate((scope, np.empty(len(scope), np.int64)))
            for a in range(first[v], first[v] + count[v]):
                scope[filled] = neighbours[a]
                filled += 1
            order[steps], position[v] = v, steps
            steps += 1
            scope_first[steps] = filled
        else:
            weight = count[v] * luck[v]
            for a in range(first[v], first[v] + count[v]):
                u = neighbours[a]
                if count[u] * luck[u] > weight:
                    removed, weight = u, count[u] * luck[u]
        gone[removed] = True
        begin, many = first[removed], count[removed]
        for a in range(begin, begin + many):
            _drop(neighbours, first, count, neighbours[a], removed)
            size[neighbours[a]] -= logs[removed]
        if fits:
            for a in range(begin, begin + many):
                for b in range(a + 1, begin + many):
                    u, w = neighbours[a], neighbours[b]
                    less = count[u] <= count[w]
                    if _has(neighbours, first, count, u if less else w, w if less else u):
                        continue
                    for i, j in ((u, w), (w, u)):
                        if count[i] == room_of[i]:
                            if used + 2 * room_of[i] > len(neighbours):
                                neighbours = np.concatenate(
                                    (neighbours, np.empty(len(neighbours), np.int64))
                                )
                            neighbours[used : used + count[i]] = neighbours[
                                first[i] : first[i] + count[i]
                            ]
                            first[i], room_of[i] = used, 2 * room_of[i]
                            used += room_of[i]
                        neighbours[first[i] + count[i]] = j
                        count[i] += 1
                        size[i] += logs[j]
        for a in range(begin, begin + many):
            u = neighbours[a]
            stamp[u] += 1
            heapq.heappush(heap, (size[u] + tie[u], u, stamp[u]))
        if removed != v:
            stamp[v] += 1
            heapq.heappush(heap, (size[v] + tie[v], v, stamp[v]))
    filled = _in_order(order[:steps], position, scope_first, scope)
    return Order(order[:steps], position, scope_first[: steps + 1], scope[:filled])


@njit(cache=True)
def read_by(f, order):
    """Which steps read each message, and room for all messages."""
    steps = len(order.node)
    first, child_first = np.zeros(steps + 1, np.int64), np.zeros(steps + 1, np.int64)
    for t in range(steps):
        many = 1
        for a in range(order.scope_first[t], order.scope_first[t + 1]):
            many *= f.offset[order.scope[a] + 1] - f.offset[order.scope[a]]
        first[t + 1] = first[t] + many
        if order.scope_first[t + 1] > order.scope_first[t]:
            child_first[order.position[order.scope[order.scope_first[t]]] + 1] += 1
    child_first = np.cumsum(child_first)
    child, next_free = np.empty(child_first[-1], np.int64), child_first[:-1].copy()
    for t in range(steps):
        if order.scope_first[t + 1] > order.scope_first[t]:
            p = order.position[order.scope[order.scope_first[t]]]
            child[next_free[p]] = t
            next_free[p] += 1
    return Messages(child_first, child, first, np.empty(first[-1]))


@njit(cache=True)
def _decide(f, unary, x, order, messages, row):
    """Choices from messages, last step first: all that comes after is decided, so one row of each
    table is left. row: room for one."""
    for t in range(len(order.node) - 1, -1, -1):
        v = order.node[t]
        o = f.offset[v]
        d = f.offset[v + 1] - o
        for s in range(d):
            row[s] = unary[o + s]
        for a in range(f.first[v], f.first[v + 1]):
            j = f.other[a]
            if order.position[j] < 0 or order.position[j] > t:
                at = f.place[f.back[a]] + x[j] * d
                for s in range(d):
                    row[s] += f.table[at + s]
        for b in range(messages.child_first[t], messages.child_first[t + 1]):
            c = messages.child[b]
            at, step = messages.first[c], d
            for a in range(order.scope_first[c] + 1, order.scope_first[c + 1]):
                u = order.scope[a]
                at += x[u] * step
                step *= f.offset[u + 1] - f.offset[u]
            for s in range(d):
                row[s] += messages.value[at + s]
        least = 0
        for s in range(1, d):
            if row[s] < row[least]:
                least = s
        x[v] = least


@njit(cache=True)
def _gather_tables(f, unary, x, t, order, table):
    """Begin a step's table with the node's own costs and the tables of its neighbours."""
    v, begin = order.node[t], order.scope_first[t]
    o = f.offset[v]
    d = f.offset[v + 1] - o
    for i in range(order.scope_first[t + 1] - begin):
        table.extent[i] = f.offset[order.scope[begin + i] + 1] - f.offset[order.scope[begin + i]]
        table.taken[i] = False
    for s in range(d):
        table.own[s] = unary[o + s]
    for a in range(f.first[v], f.first[v + 1]):
        j = f.other[a]
        at = f.place[f.back[a]]
        if order.position[j] < 0:
            at += x[j] * d
            for s in range(d):
                table.own[s] += f.table[at + s]
        elif order.position[j] > t:
            i = 0
            while order.scope[begin + i] != j:
                i += 1
            for s in range(d * table.extent[i]):
                before = table.single[i, s] if table.taken[i] else 0.0
                table.single[i, s] = f.table[at + s] + before
            table.taken[i] = True


@njit(cache=True)
def _gather_messages(d, t, order, messages, table):
    """Add the messages that a step of d options reads to its table; how many of them follow more
    than one axis."""
    begin, end, many = order.scope_first[t], order.scope_first[t + 1], 0
    for b in range(messages.child_first[t], messages.child_first[t + 1]):
        c = messages.child[b]
        at, wide = messages.first[c], order.scope_first[c + 1] - order.scope_first[c]
        if wide == 1:
            for s in range(d):
                table.own[s] += messages.value[at + s]
            continue
        if wide == 2:
            i = 0
            while order.scope[begin + i] != order.scope[order.scope_first[c] + 1]:
                i += 1
            for s in range(d * table.extent[i]):
                before = table.single[i, s] if table.taken[i] else 0.0
                table.single[i, s] = messages.value[at + s] + before
            table.taken[i] = True
            continue
        table.start[many] = at
        for i in range(end - begin):
            table.stride[many, i] = 0
        step = d
        for a in range(order.scope_first[c] + 1, order.scope_first[c + 1]):
            i = 0
            while order.scope[begin + i] != order.scope[a]:
                i += 1
            table.stride[many, i] = step
            step *= table.extent[i]
        many += 1
    return many


@njit(cache=True, fastmath={"nnan", "ninf", "nsz"})
def _send(d, k, message_count, position, table, room, value):
    """Write a step's message into `value` from `position` on: for each choice of the k axes, first
    one fastest, the least over its d options of what was gathered, `message_count` messages of it.
    """
    start, stride, digit, acc, row = table.start, table.stride, room.digit, room.acc, room.row
    for i in range(k):
        digit[i] = 0
    while True:
        # What does not follow the fastest axis is added up once for all of it.
        for s in range(d):
            acc[s] = table.own[s]
        for i in range(1, k):
            if table.taken[i]:
                for s in range(d):
                    acc[s] += table.single[i, digit[i] * d + s]
        lively = 0
        for p in range(message_count):
            place = start[p]
            for i in range(1, k):
                place += digit[i] * stride[p, i]
            if stride[p, 0]:
                start[p], start[lively] = start[lively], start[p]
                for i in range(k):
                    stride[p, i], stride[lively, i] = stride[lively, i], stride[p, i]
                room.lead[lively] = place
                lively += 1
            else:
                for s in range(d):
                    acc[s] += value[place + s]
        for z in range(table.extent[0]):
            if table.taken[0]:
                for s in range(d):
                    row[s] = acc[s] + table.single[0, z * d + s]
            else:
                for s in range(d):
                    row[s] = acc[s]
            for p in range(lively):
                place = room.lead[p] + z * stride[p, 0]
                for s in range(d):
                    row[s] += value[place + s]
            best = row[0]
            for s in range(1, d):
                best = min(best, row[s])
            value[position] = best
            position += 1
        i = 1
        while i < k:
            digit[i] += 1
            if digit[i] < table.extent[i]:
                break
            digit[i] = 0
            i += 1
        if i >= k:
            break


@njit(cache=True)
def eliminate(f, unary, x, order, messages):
    """Set all free nodes of x to what is least beside the kept ones under unary costs
    [positions]."""
    options, values, axes, parts = 1, 1, 1, 1
    for t in range(len(order.node)):
        d = f.offset[order.node[t] + 1] - f.offset[order.node[t]]
        options = max(options, d)
        axes = max(axes, order.scope_first[t + 1] - order.scope_first[t])
        parts = max(parts, messages.child_first[t + 1] - messages.child_first[t])
        for a in range(order.scope_first[t], order.scope_first[t + 1]):
            values = max(values, d * (f.offset[order.scope[a] + 1] - f.offset[order.scope[a]]))
    table = Table(
        np.empty(options),
        np.empty((axes, values)),
        np.zeros(axes, np.bool_),
        np.empty(parts, np.int64),
        np.zeros((parts, axes), np.int64),
        np.empty(axes, np.int64),
    )
    room = Room(
        np.empty(axes, np.int64), np.zeros(parts, np.int64), np.empty(options), np.empty(options)
    )
    for t in range(len(order.node)):
        d = f.offset[order.node[t] + 1] - f.offset[order.node[t]]
        _gather_tables(f, unary, x, t, order, table)
        many = _gather_messages(d, t, order, messages, table)
        k = order.scope_first[t + 1] - order.scope_first[t]
        if k:
            _send(d, k, many, messages.first[t], table, room, messages.value)
    _decide(f, unary, x, order, messages, table.own)


@dataclass(frozen=True)
class Cut:
    """Nodes that are eliminated beside some that are kept (`draw`), and the room that takes."""

    flat: Flat
    order: Order
    messages: Messages

    def eliminate(self, unary: np.ndarray, x: np.ndarray) -> None:
        """Set all nodes of x that are not kept to what is least under unary costs [positions]."""
        eliminate(self.flat, unary, x, self.order, self.messages)

    @property
    def work(self) -> float:
        """The work of one elimination, and of making its choice fit."""
        return float(len(self.messages.value) + PASSES * len(self.flat.cost))


def drawn(flat: Flat, limit: float, room: float, random: np.random.Generator) -> Cut:
    """A random cut under which no table has more than `limit` entries, nor all messages more than
    `room`."""
    n = len(flat.offset) - 1
    order = draw(flat, limit, room, random.random(n) ** 3, random.random(n))
    return Cut(flat, order, read_by(flat, order))
