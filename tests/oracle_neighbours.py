"""Oracle cases of kernels that exchange with their neighbours: attention on a ring of devices."""

from __future__ import annotations

import numpy as np

from tests.oracle import Case

RNG = np.random.default_rng(3)


def _flags(*shape: int) -> np.ndarray:
    """A mask that leaves some rows nothing to attend to."""
    flags = RNG.random(shape) < 0.6
    flags[..., 1, :] = False
    return flags


def neighbour_cases() -> list[Case]:
    """Every kind of mask, of heads and of causality on a ring; keys and queries of different numbers; several blocks of queries."""
    plain = {"scale": 0.3, "causal": 0, "guard": 0}
    causal, guarded = {**plain, "causal": 1}, {**plain, "guard": 1}
    q, k, v = (2, 4, 8, 10), (2, 4, 16, 10), (2, 4, 16, 6)
    own = ((2, 4, 16, 10), k, v)
    return [
        Case("ring", "Attention", (q, k, v), ((2, 4, 8, 6),), plain),
        Case("ring-causal", "Attention", own, ((2, 4, 16, 6),), causal),
        Case("ring-guard", "Attention", (*own, _flags(2, 1, 16, 16)), ((2, 4, 16, 6),), {**guarded, "causal": 1}),
        Case("ring-mask-heads", "Attention", (q, k, v, _flags(1, 4, 8, 16)), ((2, 4, 8, 6),), guarded),
        Case("ring-mask-keys", "Attention", (q, k, v, RNG.random((2, 1, 1, 16)) < 0.7), ((2, 4, 8, 6),), guarded),
        Case("ring-bias", "Attention", (q, k, v, (1, 4, 8, 16)), ((2, 4, 8, 6),), plain),
        Case("ring-bias-keys", "Attention", (q, k, v, (2, 1, 1, 16)), ((2, 4, 8, 6),), plain),
        Case("ring-bias-queries", "Attention", (q, k, v, (8, 1)), ((2, 4, 8, 6),), plain, frozen=(3,)),  # its gradient is 0: softmax does not see it
        Case("ring-gqa", "Attention", ((2, 8, 16, 10), (2, 2, 16, 10), (2, 2, 16, 6)), ((2, 8, 16, 6),), causal),
        Case("ring-gqa-bias", "Attention", ((2, 8, 8, 10), (2, 2, 16, 10), (2, 2, 16, 6), (8, 8, 16)), ((2, 8, 8, 6),), plain),
        Case("ring-mqa", "Attention", ((2, 4, 8, 10), (2, 1, 16, 10), (2, 1, 16, 6)), ((2, 4, 8, 6),), plain),
        Case("ring-one-batch", "Attention", ((2, 4, 8, 10), (1, 4, 16, 10), (1, 4, 16, 6)), ((2, 4, 8, 6),), plain),
        Case("ring-blocks", "Attention", ((1, 2, 8192, 2), (1, 2, 8, 2), (1, 2, 8, 3), (8192, 8)), ((1, 2, 8192, 3),), plain),
    ]
