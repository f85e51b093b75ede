"""Which pairs of a query and a key attention computes: those that positions leave it, and of these
the emitted blocks of queries.

A query sees all keys; under a causal mask those up to its own position; in a window the last so
many of the latter.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.ir import Node

QUERY_BLOCK = 1024
"""Queries per block of the emitted kernel (planner/emit/runtime/kernels/kernels.py; a test holds
the two together)."""
CAUSAL_PARTS = 8
"""Parts, at most, of the blocks whose keys begin with the first key, each compiled for as many keys
as its last block sees."""
KEY_STEP = 128
"""Keys before a block that its window reaches are rounded up to a multiple of this."""

SPLASH_BLOCK = 1024
"""Queries, and keys, at most of a block of Splash's kernels (`splash_blocks` of
planner/emit/runtime/kernels/fused_attention.py; a test holds the two together)."""


def splash_block(size: int) -> int:
    """Queries of a block of Splash's kernels, of so many, or keys."""
    return next((n for n in (SPLASH_BLOCK, 512, 256) if size % n == 0), 128)


def in_query_blocks(queries: int) -> bool:
    """Whether the emitted kernel runs over blocks of queries and makes their scores again in the
    backward pass."""
    return queries > QUERY_BLOCK and queries % QUERY_BLOCK == 0


@dataclass(frozen=True)
class Positions:
    """What positions leave of the keys. causal: none after the query's own; window: of those up to
    it the last so many, 0 for all (without causal: and all after it)."""

    causal: bool = False
    window: int = 0

    def __and__(self, other: Positions) -> Positions:
        """What both leave."""
        windows = [n for n in (self.window, other.window) if n]
        return Positions(self.causal or other.causal, min(windows, default=0))

    @property
    def known(self) -> bool:
        """Whether Attention has attributes for it: a window ends with the query."""
        return self.causal or not self.window

    @classmethod
    def of(cls, node: Node) -> Positions:
        """Those of an Attention node."""
        window: int = node.attrs.get("window", 0)  # type: ignore[assignment]
        return cls(bool(node.attrs.get("causal", 0)), window)

    def pairs(self, queries: int, keys: int) -> int:
        """How many pairs are left: query i sees keys up to i, or the last `window` of these."""
        if not self.causal:
            return queries * keys
        return _triangle(queries, keys) - (
            _triangle(queries - self.window, keys) if 0 < self.window < queries else 0
        )

    def splash_pairs(self, queries: int, keys: int) -> int:
        """How many pairs Splash's kernels compute: all of a block of which a mask leaves any."""
        rows, columns = splash_block(queries), splash_block(keys)
        if not self.causal:
            return queries * keys
        pairs = 0
        for first in range(0, queries, rows):
            end = min(-(-(first + rows) // columns) * columns, keys)
            start = max(0, first - self.window + 1) // columns * columns if self.window else 0
            pairs += rows * max(0, end - start)
        return pairs

    def share(self, queries: int, keys: int) -> float:
        """What part of the pairs that a step's FLOPs are counted over is left."""
        return self.pairs(queries, keys) / (queries * self.counted_keys(keys))

    def counted_keys(self, keys: int) -> int:
        """Keys of a query that a step's FLOPs are counted over: the window's, else all, whether or
        not a causal mask leaves them."""
        return min(self.window or keys, keys)

    def parts(self, queries: int, keys: int, whole: bool) -> tuple[tuple[int, int], ...]:
        """How the emitted blocks meet keys: (how many consecutive blocks, how many keys each).
        whole: the first query here is the first of the sequence, and known to be when the program
        is compiled."""
        size = QUERY_BLOCK if in_query_blocks(queries) else queries
        blocks = queries // size
        if not self.causal:
            return ((blocks, keys),)
        before = -(-(self.window - 1) // KEY_STEP) * KEY_STEP
        width = min(keys, size + before) if self.window else keys
        growing = min(blocks, width // size) if whole else 0
        many = max(1, -(-growing // CAUSAL_PARTS))
        ends = [min(a + many, growing) for a in range(0, growing, many)]
        parts = tuple((b - a, b * size) for a, b in zip([0, *ends], ends, strict=False))
        return parts + (((blocks - growing, width),) if growing < blocks else ())

    def computed_pairs(self, queries: int, keys: int, whole: bool) -> int:
        """Pairs that the emitted blocks compute."""
        size = QUERY_BLOCK if in_query_blocks(queries) else queries
        return sum(n * size * width for n, width in self.parts(queries, keys, whole))


ALL = Positions()


@dataclass(frozen=True)
class Met:
    """A piece of keys that queries meet: how often so many queries meet so many keys, and which of
    these positions leave them."""

    often: int
    queries: int
    keys: int
    positions: Positions = ALL

    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """The emitted blocks of queries: (how many, of how many queries, how many keys each
        meets)."""
        parts = self.positions.parts(self.queries, self.keys, True)
        size = self.queries // sum(n for n, _ in parts)
        return tuple((self.often * n, size, keys) for n, keys in parts)

    @property
    def computed_pairs(self) -> int:
        """Pairs that the emitted blocks compute."""
        return sum(n * rows * keys for n, rows, keys in self.blocks())


def around_ring(queries: int, keys: int, pieces: int, balanced: bool) -> tuple[Met, ...]:
    """What the queries of a device meet of so many pieces of so many keys on a ring: each whole,
    masked or not; on a balanced ring, where each device has an early and a late half of the
    positions, its own keys under a causal mask and of each other device's two pairs of halves."""
    if not balanced:
        return (Met(pieces, queries, keys),)
    own_keys = Met(1, queries, keys, Positions(True))
    return own_keys, Met(2 * (pieces - 1), queries // 2, keys // 2)


def _triangle(queries: int, keys: int) -> int:
    """Pairs of which query i has those with keys up to i."""
    growing = min(queries, keys)
    return growing * (growing + 1) // 2 + (queries - growing) * keys
