"""Compiled loops of `cutset` (numba): which nodes keep their options, and the elimination of all
others.

All take a `flat.Flat`. A drawn cut is (order, position, scope_first, scope): free nodes in the
order of their elimination, each node's place in it (-1: kept), and per step the later nodes that
its table has axes for, next one first. A table's message has the same axes, the first one fastest.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numba import njit

from planner.solvers.neighbourhood.flat import Flat

PASSES = 10
"""Passes over all positions that an elimination's choice takes to be made to fit."""


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
def _settled(order, position, scope_first, scope):
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
    first, held, count = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    used = 0
    for v in range(n):
        count[v] = f.first[v + 1] - f.first[v]
        first[v], held[v] = used, 2 * count[v] + 8
        used += held[v]
    near = np.empty(4 * used, np.int64)
    size, stamp, gone = logs.copy(), np.zeros(n, np.int64), np.zeros(n, np.bool_)
    for v in range(n):
        for k in range(count[v]):
            u = f.other[f.first[v] + k]
            near[first[v] + k] = u
            size[v] += logs[u]
    heap = [(size[v] + tie[v], v, 0) for v in range(n)]
    heapq.heapify(heap)
    order, position = np.empty(n, np.int64), np.full(n, -1, np.int64)
    scope_first, scope = np.zeros(n + 1, np.int64), np.empty(8 * n + 64, np.int64)
    steps, filled, total, limit = 0, 0, 0.0, math.log(most)
    while len(heap):
        _, v, seen = heapq.heappop(heap)
        if gone[v] or seen != stamp[v]:
            continue
        sent = math.exp(min(size[v] - logs[v], 700.0))
        fits = size[v] <= limit and total + sent <= room
        out = v
        if fits:
            total += sent
            if filled + count[v] > len(scope):
                scope = np.concatenate((scope, np.empty(len(scope), np.int64)))
            for a in range(first[v], first[v] + count[v]):
                scope[filled] = near[a]
                filled += 1
            order[steps], position[v] = v, steps
            steps += 1
            scope_first[steps] = filled
        else:
            weight = count[v] * luck[v]
            for a in range(first[v], first[v] + count[v]):
                u = near[a]
                if count[u] * luck[u] > weight:
                    out, weight = u, count[u] * luck[u]
        gone[out] = True
        begin, many = first[out], count[out]
        for a in range(begin, begin + many):
            _drop(near, first, count, near[a], out)
            size[near[a]] -= logs[out]
        if fits:
            for a in range(begin, begin + many):
                for b in range(a + 1, begin + many):
                    u, w = near[a], near[b]
                    less = count[u] <= count[w]
                    if _has(near, first, count, u if less else w, w if less else u):
                        continue
                    for i, j in ((u, w), (w, u)):
                        if count[i] == held[i]:
                            if used + 2 * held[i] > len(near):
                                near = np.concatenate((near, np.empty(len(near), np.int64)))
                            near[used : used + count[i]] = near[first[i] : first[i] + count[i]]
                            first[i], held[i] = used, 2 * held[i]
                            used += held[i]
                        near[first[i] + count[i]] = j
                        count[i] += 1
                        size[i] += logs[j]
        for a in range(begin, begin + many):
            u = near[a]
            stamp[u] += 1
            heapq.heappush(heap, (size[u] + tie[u], u, stamp[u]))
        if out != v:
            stamp[v] += 1
            heapq.heappush(heap, (size[v] + tie[v], v, stamp[v]))
    return (
        order[:steps],
        position,
        scope_first[: steps + 1],
        scope[: _settled(order[:steps], position, scope_first, scope)],
    )


@njit(cache=True)
def room_of(f, order, scope_first, scope):
    """Where each step's message starts, and where the last one ends. [steps + 1]"""
    first = np.zeros(len(order) + 1, np.int64)
    for t in range(len(order)):
        many = 1
        for a in range(scope_first[t], scope_first[t + 1]):
            many *= f.offset[scope[a] + 1] - f.offset[scope[a]]
        first[t + 1] = first[t] + many
    return first


@njit(cache=True)
def children_of(order, position, scope_first, scope):
    """Per step the steps whose messages it reads: rows of (first [steps + 1], step)."""
    first = np.zeros(len(order) + 1, np.int64)
    for t in range(len(order)):
        if scope_first[t + 1] > scope_first[t]:
            first[position[scope[scope_first[t]]] + 1] += 1
    for t in range(len(order)):
        first[t + 1] += first[t]
    step, at = np.empty(first[-1], np.int64), first[:-1].copy()
    for t in range(len(order)):
        if scope_first[t + 1] > scope_first[t]:
            p = position[scope[scope_first[t]]]
            step[at[p]] = t
            at[p] += 1
    return first, step


@njit(cache=True)
def _decide(
    f,
    unary,
    x,
    order,
    position,
    scope_first,
    scope,
    child_first,
    child,
    message_first,
    message,
    own,
):
    """Choices from messages, last step first: all that comes after is decided, so one row of each
    table is left. own: room for a row."""
    for t in range(len(order) - 1, -1, -1):
        v = order[t]
        o = f.offset[v]
        d = f.offset[v + 1] - o
        for s in range(d):
            own[s] = unary[o + s]
        for a in range(f.first[v], f.first[v + 1]):
            j = f.other[a]
            if position[j] < 0 or position[j] > t:
                at = f.place[f.back[a]] + x[j] * d
                for s in range(d):
                    own[s] += f.table[at + s]
        for b in range(child_first[t], child_first[t + 1]):
            c = child[b]
            at, step = message_first[c], d
            for a in range(scope_first[c] + 1, scope_first[c + 1]):
                at += x[scope[a]] * step
                step *= f.offset[scope[a] + 1] - f.offset[scope[a]]
            for s in range(d):
                own[s] += message[at + s]
        least = 0
        for s in range(1, d):
            if own[s] < own[least]:
                least = s
        x[v] = least


@njit(cache=True)
def _gathered(
    f,
    unary,
    x,
    t,
    order,
    position,
    scope_first,
    scope,
    child_first,
    child,
    message_first,
    message,
    own,
    single,
    taken,
    start,
    stride,
    extent,
):
    """What a step's table is made of: `own` follows no axis, `single` one (where `taken`); how many
    messages follow more, which begin at `start` and go by `stride`."""
    v = order[t]
    o = f.offset[v]
    d = f.offset[v + 1] - o
    begin, k = scope_first[t], scope_first[t + 1] - scope_first[t]
    for i in range(k):
        extent[i] = f.offset[scope[begin + i] + 1] - f.offset[scope[begin + i]]
        taken[i] = False
    for s in range(d):
        own[s] = unary[o + s]
    for a in range(f.first[v], f.first[v + 1]):
        j = f.other[a]
        at = f.place[f.back[a]]
        if position[j] < 0:
            at += x[j] * d
            for s in range(d):
                own[s] += f.table[at + s]
        elif position[j] > t:
            i = 0
            while scope[begin + i] != j:
                i += 1
            for s in range(d * extent[i]):
                single[i, s] = f.table[at + s] + (single[i, s] if taken[i] else 0.0)
            taken[i] = True
    many = 0
    for b in range(child_first[t], child_first[t + 1]):
        c = child[b]
        at, wide = message_first[c], scope_first[c + 1] - scope_first[c]
        if wide == 1:
            for s in range(d):
                own[s] += message[at + s]
            continue
        if wide == 2:
            i = 0
            while scope[begin + i] != scope[scope_first[c] + 1]:
                i += 1
            for s in range(d * extent[i]):
                single[i, s] = message[at + s] + (single[i, s] if taken[i] else 0.0)
            taken[i] = True
            continue
        start[many] = at
        for i in range(k):
            stride[many, i] = 0
        step = d
        for a in range(scope_first[c] + 1, scope_first[c + 1]):
            i = 0
            while scope[begin + i] != scope[a]:
                i += 1
            stride[many, i] = step
            step *= extent[i]
        many += 1
    return many


@njit(cache=True, fastmath={"nnan", "ninf", "nsz"})
def _sent(
    d, k, at, many, own, single, taken, start, stride, extent, digit, lead, acc, row, message
):
    """Write a step's message at `at`: for each choice of the k axes, first one fastest, the least
    over its d options of what was gathered. digit, lead, acc, row: room."""
    for i in range(k):
        digit[i] = 0
    while True:
        # What does not follow the fastest axis is added up once for all of it.
        for s in range(d):
            acc[s] = own[s]
        for i in range(1, k):
            if taken[i]:
                for s in range(d):
                    acc[s] += single[i, digit[i] * d + s]
        lively = 0
        for p in range(many):
            place = start[p]
            for i in range(1, k):
                place += digit[i] * stride[p, i]
            if stride[p, 0]:
                start[p], start[lively] = start[lively], start[p]
                for i in range(k):
                    stride[p, i], stride[lively, i] = stride[lively, i], stride[p, i]
                lead[lively] = place
                lively += 1
            else:
                for s in range(d):
                    acc[s] += message[place + s]
        for z in range(extent[0]):
            if taken[0]:
                for s in range(d):
                    row[s] = acc[s] + single[0, z * d + s]
            else:
                for s in range(d):
                    row[s] = acc[s]
            for p in range(lively):
                place = lead[p] + z * stride[p, 0]
                for s in range(d):
                    row[s] += message[place + s]
            best = row[0]
            for s in range(1, d):
                best = min(best, row[s])
            message[at] = best
            at += 1
        i = 1
        while i < k:
            digit[i] += 1
            if digit[i] < extent[i]:
                break
            digit[i] = 0
            i += 1
        if i >= k:
            break


@njit(cache=True, fastmath={"nnan", "ninf", "nsz"})
def eliminate(
    f, unary, x, order, position, scope_first, scope, child_first, child, message_first, message
):
    """Set all free nodes of x to what is least beside the kept ones under unary costs
    [positions]."""
    widest, pair, axes, parts = 1, 1, 1, 1
    for t in range(len(order)):
        own_size = f.offset[order[t] + 1] - f.offset[order[t]]
        widest = max(widest, own_size)
        axes = max(axes, scope_first[t + 1] - scope_first[t])
        parts = max(parts, child_first[t + 1] - child_first[t])
        for a in range(scope_first[t], scope_first[t + 1]):
            pair = max(pair, own_size * (f.offset[scope[a] + 1] - f.offset[scope[a]]))
    own, acc, row = np.empty(widest), np.empty(widest), np.empty(widest)
    single, taken = (
        np.empty((axes, pair)),
        np.zeros(axes, np.bool_),
    )  # what follows one axis, added up
    start, stride, lead = (
        np.empty(parts, np.int64),
        np.zeros((parts, axes), np.int64),
        np.zeros(parts, np.int64),
    )
    digit, extent = np.empty(axes, np.int64), np.empty(axes, np.int64)
    for t in range(len(order)):
        k = scope_first[t + 1] - scope_first[t]
        many = _gathered(
            f,
            unary,
            x,
            t,
            order,
            position,
            scope_first,
            scope,
            child_first,
            child,
            message_first,
            message,
            own,
            single,
            taken,
            start,
            stride,
            extent,
        )
        if k:
            d = f.offset[order[t] + 1] - f.offset[order[t]]
            _sent(
                d,
                k,
                message_first[t],
                many,
                own,
                single,
                taken,
                start,
                stride,
                extent,
                digit,
                lead,
                acc,
                row,
                message,
            )
    _decide(
        f,
        unary,
        x,
        order,
        position,
        scope_first,
        scope,
        child_first,
        child,
        message_first,
        message,
        own,
    )


@dataclass(frozen=True)
class Cut:
    """Nodes that are eliminated beside some that are kept (`draw`), and the room that takes."""

    flat: Flat
    order: tuple[np.ndarray, ...]
    children: tuple[np.ndarray, np.ndarray]
    first: np.ndarray  # [steps + 1] where messages start
    message: np.ndarray

    def eliminate(self, unary: np.ndarray, x: np.ndarray) -> None:
        """Set all nodes of x that are not kept to what is least under unary costs [positions]."""
        eliminate(self.flat, unary, x, *self.order, *self.children, self.first, self.message)  # type: ignore[call-arg]

    @property
    def work(self) -> float:
        """Of one elimination, and of making its choice fit."""
        return float(len(self.message) + PASSES * len(self.flat.cost))


def drawn(flat: Flat, limit: float, room: float, random: np.random.Generator) -> Cut:
    """A random cut under which no table has more than `limit` entries, nor all messages more than
    `room`."""
    n = len(flat.offset) - 1
    order, position, scope_first, scope = draw(
        flat, limit, room, random.random(n) ** 3, random.random(n)
    )
    first = room_of(flat, order, scope_first, scope)
    return Cut(
        flat,
        (order, position, scope_first, scope),
        children_of(order, position, scope_first, scope),
        first,
        np.empty(first[-1]),
    )
