"""Recomputation by name: which values of a block are saved, as plans, pins and files write it.

    none, block, block-keep       nothing is computed again; blocks whole; blocks with the results
                                  of collectives saved
    save:q,k,v                    blocks, but for what follows from the values of these names
                                  (planner.execution.block_values says which tensors those are)

What enters a block is saved in any case, so that `save:` with no name is `block`. A named value is
saved as it is made, cut as its operator leaves it; of pending sums what their reduction leaves, so
that naming it spares that collective. Other collectives of the block run again.

MaxText's presets (`remat_policy`) are such lists of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from planner.errors import PlanError

ENTERS = "block_input"
"""The name of what enters a block, which is always saved."""
NAMES: Mapping[str, str] = {
    "norm": "results of norms",
    "q": "queries, as attention reads them",
    "k": "keys, likewise",
    "v": "values, likewise",
    "context": "the result of attention",
    "out_proj": "the product that reads the result of attention",
    "router": "the product that experts are chosen by",
    "experts": "the result of a mixture of experts",
    "mlp_gate": "the product that goes through the activation of a gated unit",
    "mlp_up": "the product beside it, or the only one before an activation",
    "mlp_act": "what the last product of an MLP reads",
    "mlp_down": "the last product of an MLP",
}
"""Names of values, in the order in which blocks make them, and what they are."""
BLOCK = "block"
PREFIX = "save:"
_QKV = ("q", "k", "v")
_WIDE = ("mlp_gate", "mlp_up")
PRESETS: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "save_out_proj": ("out_proj",),
    "save_qkv_proj": _QKV,
    "save_dot_except_mlp": (*_QKV, "out_proj"),
    "save_dot_except_mlpwi": (*_QKV, "out_proj", "mlp_down"),
    "save_dot_with_context_except_mlp": (*_QKV, "context", "out_proj"),
    "minimal": (*_QKV, "out_proj", *_WIDE, "mlp_down"),
    "minimal_with_context": (*_QKV, "context", "out_proj", *_WIDE, "mlp_down"),
}
"""MaxText's remat_policy -> the names that it saves. Its mlpwi is here mlp_gate and mlp_up, its
mlpwo mlp_down."""


def saving(names: Iterable[str]) -> str:
    """The plan's value for these names saved."""
    asked = frozenset(names)
    listed = [n for n in NAMES if n in asked]
    return PREFIX + ",".join(listed) if listed else BLOCK


def saved_names(recompute: str) -> tuple[str, ...]:
    """The names that a plan's value saves."""
    return tuple(recompute.removeprefix(PREFIX).split(",")) if is_named(recompute) else ()


def is_named(recompute: str) -> bool:
    """Whether a plan's value saves values by name."""
    return recompute.startswith(PREFIX)


def fault(recompute: Any, others: Iterable[str]) -> str:
    """What is wrong with a plan's value, "" where nothing is. others: those without names."""
    if recompute in others:
        return ""
    if not isinstance(recompute, str) or not is_named(recompute):
        return f"recompute {recompute!r} is none of {', '.join(others)}, {PREFIX}NAME,NAME"
    named = saved_names(recompute)
    if saving(named) != recompute:
        return f"recompute {recompute!r} is not made of {', '.join(NAMES)}, once each, in order"
    return ""


def read_policy(value: Any, words: Mapping[str, str]) -> str:
    """A pin's value as plans have it. words: what may be written -> the value without names that it
    stands for. Raises PlanError P020 for one that is not possible."""
    if isinstance(value, str) and value in words:
        return words[value]
    if isinstance(value, str) and value in PRESETS:
        return saving(PRESETS[value])
    if isinstance(value, str) and is_named(value):
        named = [n.strip() for n in value.removeprefix(PREFIX).replace("+", ",").split(",")]
        named = [n for n in named if n and n != ENTERS]
        strange = [n for n in named if n not in NAMES]
        if not strange:
            return saving(named)
        raise PlanError(
            "P020",
            f"recompute = {value!r} is not possible: no value of a block is called"
            f" {', '.join(map(repr, strange))}",
            help=[f"names are {', '.join(NAMES)}"],
        )
    raise PlanError(
        "P020",
        f"recompute = {value!r} is not possible",
        help=[
            f"one of {', '.join(dict.fromkeys((*words.values(), *PRESETS)))}",
            f"or names of values that are saved: {PREFIX}q,k,v (of {', '.join(NAMES)})",
        ],
    )


def policy_words(recompute: str) -> str:
    """A plan's value with names in words for people."""
    return f"recompute, {', '.join(saved_names(recompute))} saved"
