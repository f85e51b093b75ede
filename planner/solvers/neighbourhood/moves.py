"""Compiled moves on a choice (numba): repair, descent, and annealing with single changes and exact
tree moves.

Every move is taken in place with a journal, so that it can be undone. See `kernels` for the row
loads (top, lazy).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from planner.solvers.bounds.messages_numba import change, marginal


@njit(cache=True)
def worst_row(f, top):
    """Leaf (in the tree's numbering) of a row of largest load."""
    p = 1
    while p < f.leaves:
        p = 2 * p if top[2 * p] >= top[2 * p + 1] else 2 * p + 1
    return p


@njit(cache=True)
def live_at(f, leaf, pick):
    """The pick-th interval that is live at a row; with pick < 0 minus how many there are."""
    count = 0
    p = leaf
    while p >= 1:
        size = f.stab[p + 1] - f.stab[p]
        if 0 <= pick < count + size:
            return f.item[f.stab[p] + pick - count]
        count += size
        p >>= 1
    return -count


@njit(cache=True)
def repair(f, x, top, lazy, budget, steps, samples, journal, length, out):
    """Lower the worst row by cheap changes until everything fits. Returns (fits, cost added,
    journal length).

    Gives up when the cost added passes the budget, or after `steps` changes. Each change: of
    `samples` random intervals live at the worst row, the one with the least cost per usage saved.
    """
    added = 0.0
    for _ in range(steps):
        if top[1] <= f.limit:
            return True, added, length
        excess = top[1] - f.limit
        leaf = worst_row(f, top)
        count = -live_at(f, leaf, -1)
        if count == 0:
            return False, added, length
        best, node, pick, paid = np.inf, -1, -1, 0.0
        tries = min(samples, count)
        begin = np.random.randint(count)
        for t in range(tries):
            j = live_at(
                f, leaf, (begin + t) % count if tries == count else np.random.randint(count)
            )
            i = f.owner[j]
            s0 = f.start[j]
            now = f.use[s0 + x[i]]
            if now <= 0.0:
                continue
            k = f.offset[i + 1] - f.offset[i]
            marginal(f, x, i, out)
            base = out[x[i]]
            for s in range(k):
                saved = now - f.use[s0 + s]
                if saved > 0.0:
                    extra = out[s] - base
                    rate = (
                        extra / min(saved, excess)
                        if extra > 0
                        else extra * min(saved, excess) - 1e-9
                    )
                    if rate < best:
                        best, node, pick, paid = rate, i, s, extra
        if node < 0:
            continue
        if added + paid > budget or length >= len(journal):
            return False, added, length
        journal[length, 0] = node
        journal[length, 1] = x[node]
        length += 1
        change(f, x, top, lazy, node, pick)
        added += paid
    return top[1] <= f.limit, added, length


@njit(cache=True)
def undo(f, x, top, lazy, journal, length):
    """Take back the journal's changes, last first."""
    for p in range(length - 1, -1, -1):
        change(f, x, top, lazy, journal[p, 0], journal[p, 1])


@njit(cache=True)
def descend(f, x, top, lazy, sweeps):
    """Best single changes, node by node, within the limit (or without raising an overload). Returns
    the cost change."""
    n = len(x)
    widest = 0
    for i in range(n):
        widest = max(widest, f.offset[i + 1] - f.offset[i])
    out = np.empty(widest)
    gained = 0.0
    for _ in range(sweeps):
        moved = False
        for i in range(n):
            marginal(f, x, i, out)
            old = x[i]
            here = out[old]
            while True:
                k, least = old, here
                for s in range(f.offset[i + 1] - f.offset[i]):
                    if out[s] < least:
                        k, least = s, out[s]
                if k == old:
                    break
                before = top[1]
                change(f, x, top, lazy, i, k)
                if top[1] <= f.limit or top[1] <= before:
                    gained += least - here
                    moved = True
                    break
                change(f, x, top, lazy, i, old)
                out[k] = np.inf
        if not moved:
            break
    return gained


@njit(cache=True)
def seed(value):
    """Seed the random numbers of all kernels."""
    np.random.seed(value)


@njit(cache=True)
def grow_tree(f, size, mark, hits, stamp, nodes, parent, entry, frontier):
    """A random induced tree: nodes in the order they were added, each with its parent's place and
    the parent's entry. Returns its size."""
    count, waiting = 0, 0
    i, p, a = np.random.randint(len(mark)), -1, -1
    while True:
        nodes[count], parent[count], entry[count] = i, p, a
        mark[i] = stamp
        for b in range(f.first[i], f.first[i + 1]):
            j = f.other[b]
            hits[j] = hits[j] + 1 if hits[j] >= stamp * 1024 else stamp * 1024 + 1
            if waiting < len(frontier) and mark[j] != stamp:
                frontier[waiting, 0] = count
                frontier[waiting, 1] = b
                waiting += 1
        count += 1
        if count >= size:
            return count
        while True:
            if waiting == 0:
                return count
            pick = np.random.randint(waiting)
            p, a = frontier[pick, 0], frontier[pick, 1]
            waiting -= 1
            frontier[pick, 0], frontier[pick, 1] = frontier[waiting, 0], frontier[waiting, 1]
            i = f.other[a]
            # exactly one neighbour in the tree keeps it a tree
            if mark[i] != stamp and hits[i] == stamp * 1024 + 1:
                break


@njit(cache=True)
def solve_tree(
    f,
    x,
    count,
    mark,
    stamp,
    nodes,
    parent,
    entry,
    real,
    belief,
    arg,
    width,
    noise,
    weight,
    running,
    pick,
):
    """Exact minimum over the tree's nodes with everything else fixed, under noise and memory
    prices; the change of real cost."""
    for t in range(count):
        i = nodes[t]
        o = f.offset[i]
        k = f.offset[i + 1] - o
        for s in range(k):
            real[t, s] = f.cost[o + s]
        for a in range(f.first[i], f.first[i + 1]):
            j = f.other[a]
            if mark[j] != stamp:
                row = f.place[f.back[a]] + x[j] * k
                for s in range(k):
                    real[t, s] += f.table[row + s]
        for s in range(k):
            belief[t, s] = real[t, s]
        if noise > 0.0:
            for s in range(k):
                belief[t, s] -= noise * np.log(1.0 - np.random.random())
        if weight > 0.0:
            for j in range(f.interval[i], f.interval[i + 1]):
                each = weight * (running[f.hi[j]] - running[f.lo[j]])
                if each != 0.0:
                    for s in range(k):
                        belief[t, s] += each * f.use[f.start[j] + s]
    for t in range(count - 1, 0, -1):
        i, p = nodes[t], parent[t]
        k = f.offset[i + 1] - f.offset[i]
        up = nodes[p]
        kp = f.offset[up + 1] - f.offset[up]
        for q in range(kp):
            row = f.place[entry[t]] + q * k
            least, which = np.inf, 0
            for s in range(k):
                value = belief[t, s] + f.table[row + s]
                if value < least:
                    least, which = value, s
            belief[p, q] += least
            arg[t, q] = which
    delta = 0.0
    for t in range(count):
        i = nodes[t]
        if t == 0:
            least, which = np.inf, 0
            for s in range(f.offset[i + 1] - f.offset[i]):
                if belief[0, s] < least:
                    least, which = belief[0, s], s
            pick[0] = which
        else:
            pick[t] = arg[t, pick[parent[t]]]
            up = nodes[parent[t]]
            k = f.offset[i + 1] - f.offset[i]
            delta += (
                f.table[f.place[entry[t]] + pick[parent[t]] * k + pick[t]]
                - f.table[f.place[entry[t]] + x[up] * k + x[i]]
            )
        delta += real[t, pick[t]] - real[t, x[i]]
    return delta


@njit(cache=True)
def anneal(
    f,
    x,
    top,
    lazy,
    price,
    cost,
    best_x,
    best_cost,
    hot,
    cold,
    moves,
    share,
    tree_size,
    mark,
    hits,
    stamp,
):
    """Metropolis over single changes and exact tree moves, from temperature hot to cold (geometric)
    in `moves` proposals.

    `share` of the proposals are tree moves of up to `tree_size` nodes. x must fit on entry and fits
    on return. best_x is updated. Returns (cost, best cost, next stamp, work done in table entries
    read).
    """
    n = len(x)
    widest = 0
    for i in range(n):
        widest = max(widest, f.offset[i + 1] - f.offset[i])
    nodes, parent = np.empty(tree_size, np.int64), np.empty(tree_size, np.int64)
    entry, pick = np.empty(tree_size, np.int64), np.empty(tree_size, np.int64)
    frontier = np.empty((tree_size * 64, 2), np.int64)
    real, belief = np.empty((tree_size, widest)), np.empty((tree_size, widest))
    arg = np.empty((tree_size, widest), np.int32)
    journal = np.empty((tree_size + 64, 2), np.int64)
    out = np.empty(widest)
    running = np.zeros(len(price) + 1)
    for r in range(len(price)):
        running[r + 1] = running[r] + price[r]
    work = 0.0
    bound_by_memory = len(f.lo) > 0
    for move in range(moves):
        heat = hot * (cold / hot) ** (move / moves)
        room = -heat * np.log(1.0 - np.random.random())
        length = 0
        if np.random.random() >= share:
            i = np.random.randint(n)
            k = f.offset[i + 1] - f.offset[i]
            if k < 2:
                continue
            s = np.random.randint(k - 1)
            now = x[i]
            if s >= now:
                s += 1
            delta = f.cost[f.offset[i] + s] - f.cost[f.offset[i] + now]
            for a in range(f.first[i], f.first[i + 1]):
                row = f.place[f.back[a]] + x[f.other[a]] * k
                delta += f.table[row + s] - f.table[row + now]
            work += 20.0
            if delta > room:
                continue
            journal[0, 0], journal[0, 1] = i, now
            length = 1
            change(f, x, top, lazy, i, s)
        else:
            size = tree_size // 2 + np.random.randint(tree_size - tree_size // 2)
            stamp += 1
            count = grow_tree(f, size, mark, hits, stamp, nodes, parent, entry, frontier)
            noise = heat * np.random.random() * 2.0
            weight = np.random.random() * 1.5 if bound_by_memory else 0.0
            delta = solve_tree(
                f,
                x,
                count,
                mark,
                stamp,
                nodes,
                parent,
                entry,
                real,
                belief,
                arg,
                widest,
                noise,
                weight,
                running,
                pick,
            )
            work += 1000.0 * count
            if delta > room and (not bound_by_memory or delta > room + heat * 20.0):
                continue
            for t in range(count):
                i = nodes[t]
                if pick[t] != x[i]:
                    journal[length, 0], journal[length, 1] = i, x[i]
                    length += 1
                    change(f, x, top, lazy, i, pick[t])
            if length == 0:
                continue
        if bound_by_memory and top[1] > f.limit:
            fits, added, length = repair(
                f, x, top, lazy, room - delta, 24, 32, journal, length, out
            )
            work += 2000.0
            delta += added
            if not fits or delta > room:
                undo(f, x, top, lazy, journal, length)
                continue
        elif delta > room:
            undo(f, x, top, lazy, journal, length)
            continue
        cost += delta
        if cost < best_cost - 0.5:
            best_cost = cost
            best_x[:] = x
    return cost, best_cost, stamp, work
