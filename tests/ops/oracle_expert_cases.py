"""The oracle's cases of routed experts: balanced and lopsided routers, experts nobody chose, gates
and biases, weights stored either way."""

from __future__ import annotations

import numpy as np

from tests.ops.oracle import Case

RNG = np.random.default_rng(13)


def chosen(experts: int, top: int, *tokens: int) -> np.ndarray:
    """`top` different experts for each token."""
    return np.argsort(RNG.normal(size=(*tokens, experts)), -1)[..., :top].astype(np.int32)


def expert_cases() -> list[Case]:
    h, f, e = 6, 12, 8
    silu, turned = (
        {"activation": "silu"},
        {"activation": "gelu_tanh", "trans_in": 1, "trans_out": 1},
    )
    into, out_of, three = (e, h, f), (e, f, h), (8, 16, h)
    some, flat = chosen(e, 3, 8, 16), (64, h)
    same = np.tile(np.array([5, 2], np.int32), (8, 16, 1))  # six experts have no token
    return [
        Case(
            "experts",
            "RoutedExperts",
            (three, some, (8, 16, 3), into, into, out_of),
            (three,),
            silu,
        ),
        Case(
            "experts-all-to-two",
            "RoutedExperts",
            (three, same, (8, 16, 2), into, into, out_of),
            (three,),
            silu,
        ),
        Case(
            "experts-turned",
            "RoutedExperts",
            (three, some, (8, 16, 3), (e, f, h), (e, f, h), (e, h, f), (e, f), (e, f), (e, h)),
            (three,),
            turned,
        ),
        Case(
            "experts-flat",
            "RoutedExperts",
            (flat, chosen(e, 2, 64), (64, 2), None, into, out_of, None, (e, f), (e, h)),
            (flat,),
            {"activation": "gelu"},
        ),
        Case(
            "experts-swiglu",
            "RoutedExperts",
            (three, some, (8, 16, 3), into, into, out_of, (e, f), (e, f)),
            (three,),
            {"activation": "swiglu", "alpha": 1.702, "beta": 1.0, "limit": 0.9},
        ),
    ]
