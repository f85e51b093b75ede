"""The oracle over the whole operator table; a seeded sample by default, every candidate in the slow
suite; planted wrong rules must fail."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from planner.ops import OPERATORS
from planner.ops.lookup import rule_of
from planner.sharding.rule import parse
from tests.ops.oracle import Case, all_splits, build, mismatch
from tests.ops.oracle_cases import all_cases

CASES = all_cases()
OFTEN = 1
"""Cases of an operator whose samples are compared always; those of more are slow."""


def sampled() -> list[Any]:
    """All cases, those of an operator beyond the first few marked slow."""
    seen, found = Counter[str](), list[Any]()
    for case in CASES:
        seen[case.op] += 1
        slow = [pytest.mark.slow] if seen[case.op] > OFTEN else []
        found.append(pytest.param(case, marks=slow, id=case.name))
    return found


def test_every_operator_has_a_case() -> None:
    assert not set(OPERATORS) - {c.op for c in CASES}


@pytest.mark.parametrize("case", sampled())
def test_sample_equals_unsharded(case: Case) -> None:
    """One split, of those that use as much of the mesh as any: both axes at once, if they can."""
    splits = all_splits(case)
    most = max((len(s.used) for s in splits), default=0)
    wide = [s for s in splits if len(s.used) == most]
    assert mismatch(case, random.Random(case.name).sample(wide, min(1, len(wide)))) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_candidate_equals_unsharded(case: Case) -> None:
    assert mismatch(case, all_splits(case)) == []


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_some_candidate_uses_the_whole_mesh(case: Case) -> None:
    """A rule that lets nothing be split would pass every comparison; only opaque reshapes, and what
    is made from nothing, may leave devices idle."""
    used = {len(s.used) for s in all_splits(case)}
    assert 2 in used or case.name == "reshape-opaque" or not case.inputs


WRONG = {
    "bias counted once per term": (
        Case("matmul", "MatMul", ((6, 8), (8, 12)), ((6, 12),), {}),
        "m k, k n -> n m",
    ),
    "softmax cut along its axis": (
        Case("softmax", "Softmax", ((8, 12),), ((8, 12),), {"axis": 1}),
        "a b -> a b",
    ),
    "norm cut along its axis": (
        Case(
            "ln",
            "LayerNormalization",
            ((8, 12), (12,), (12,)),
            ((8, 12),),
            {"axis": 1, "epsilon": 1e-5},
        ),
        "a b, b, b -> a b",
    ),
    "slice of a cut dim": (
        Case(
            "slice",
            "Slice",
            ((8, 8),),
            ((8, 8),),
            {"axes": (1,), "starts": (7,), "ends": (-1,), "steps": (-1,)},
        ),
        "a b -> a b",
    ),
    "cumulative sum of a cut dim": (
        Case("cs", "CumSum", ((8, 12),), ((8, 12),), {"axis": 1, "exclusive": 0, "reverse": 0}),
        "a b -> a b",
    ),
    "keys cut in attention": (
        Case(
            "att",
            "Attention",
            ((4, 8, 6, 10), (4, 8, 12, 10), (4, 8, 12, 16)),
            ((4, 8, 6, 16),),
            {"scale": 0.3, "causal": 0, "guard": 0},
        ),
        "b g s d, b g t d, b g t e -> b g s e",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WRONG)
def test_planted_wrong_rules_fail(name: str) -> None:
    case, line = WRONG[name]
    graph, _ = build(case)
    node = graph.nodes[0]
    try:
        rule = parse(line, graph.shapes(node.inputs), graph.shapes(node.outputs))
    except ValueError:
        return  # refused before it can do harm
    from planner.sharding.candidates import candidates
    from tests.ops.oracle import MESH

    found = 0
    for split in candidates(rule, dict(MESH)):
        if split in candidates(rule_of(node, graph)[0], dict(MESH)):
            continue
        try:
            found += bool(mismatch(case, [split], rule))
        except Exception:  # a kernel that cannot even run on its pieces is caught too
            found += 1
        if found >= 2:
            return
    assert found


def test_the_attention_rule_knows_the_kernel_s_block() -> None:
    """Prices and FLOPs of long sequences rest on the block size the emitted kernel uses."""
    import re
    from pathlib import Path

    import planner.emit.runtime
    from planner.ops.attention_pairs import QUERY_BLOCK

    text = (Path(planner.emit.runtime.__file__).parent / "kernels" / "kernels.py").read_text()
    assert re.search(r"^QUERY_BLOCK = (\d+)$", text, re.M).group(1) == str(QUERY_BLOCK)  # type: ignore[union-attr]
