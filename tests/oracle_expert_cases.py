"""The oracle's cases of routed experts: balanced and lopsided routers, experts nobody chose, gates and biases, weights stored either way."""

from __future__ import annotations

import numpy as np

from tests.oracle import Case

RNG = np.random.default_rng(13)


def chosen(experts: int, top: int, *tokens: int) -> np.ndarray:
    """`top` different experts for each token."""
    return np.argsort(RNG.normal(size=(*tokens, experts)), -1)[..., :top].astype(np.int32)


def expert_cases() -> list[Case]:
    h, f, e = 6, 12, 8
    silu, turned = {"activation": "silu"}, {"activation": "silu", "trans_in": 1, "trans_out": 1}
    into, out_of, three = (e, h, f), (e, f, h), (8, 16, h)
    some = chosen(e, 3, 8, 16)
    same = np.tile(np.array([5, 2], np.int32), (8, 16, 1))
    few = chosen(3, 2, 8, 16) * 2
    twice = np.tile(np.array([4, 4], np.int32), (8, 16, 1))
    return [
        Case("experts", "RoutedExperts", (three, some, (8, 16, 3), into, into, out_of), (three,), silu),
        Case("experts-all-to-two", "RoutedExperts", (three, same, (8, 16, 2), into, into, out_of), (three,), silu),
        Case("experts-nobody-chose", "RoutedExperts", (three, few, (8, 16, 2), into, into, out_of), (three,), silu),
        Case("experts-chosen-twice", "RoutedExperts", (three, twice, (8, 16, 2), into, into, out_of), (three,), silu),
        Case("experts-turned", "RoutedExperts", (three, some, (8, 16, 3), (e, f, h), (e, f, h), (e, h, f)), (three,), turned),
        Case("experts-flat", "RoutedExperts", ((64, h), chosen(e, 2, 64), (64, 2), None, into, out_of), ((64, h),), {"activation": "gelu"}),
        Case("experts-biases", "RoutedExperts", (three, some, (8, 16, 3), None, into, out_of, None, (e, f), (e, h)), (three,), {"activation": "relu"}),
        Case("experts-all-biases", "RoutedExperts", (three, some, (8, 16, 3), into, into, out_of, (e, f), (e, f), (e, h)), (three,), {"activation": "gelu_tanh"}),
    ]  # fmt: skip
