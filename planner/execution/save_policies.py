"""Recomputation by name: which values of a block are saved, as plans, pins and files write it.

    none, block, block-keep       nothing is computed again; blocks whole; blocks with the results
                                  of collectives saved
    save:q,k,v                    blocks, but for what follows from the values of these names
                                  (planner.execution.block_values says which tensors those are)
    save:q,k,offload:context      the same; values behind `offload:` wait in the host's memory
    offload:context               all of them do

What enters a block is saved in any case, so that `save:` with no name is `block`. A named value is
saved as it is made, cut as its operator leaves it; of pending sums what their reduction leaves, so
that naming it spares that collective. Other collectives of the block run again.

MaxText's presets (`remat_policy`) are such lists of names.
"""

from __future__ import annotations

import re
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
PREFIX, OFFLOADED_PREFIX = "save:", "offload:"
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
OFFLOADED_PRESETS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj_offloaded": _QKV,
    "minimal_offloaded": PRESETS["minimal"],
}
"""Its policies of which all values wait in the host's memory."""


def saving(names: Iterable[str], offloaded: Iterable[str] = ()) -> str:
    """The plan's value for these names saved. offloaded: those that wait in the host's memory,
    whether they are among the names or not."""
    away = frozenset(offloaded) & NAMES.keys()
    here = frozenset(names) & NAMES.keys() - away
    lists = ((PREFIX, here), (OFFLOADED_PREFIX, away))
    text = [p + ",".join(n for n in NAMES if n in some) for p, some in lists if some]
    return ",".join(text) or BLOCK


def saved_names(recompute: str) -> tuple[str, ...]:
    """The names whose values a plan's value spares the second run: saved, on the device or in the
    host's memory."""
    here, away = _lists(recompute)
    return tuple(n for n in NAMES if n in here or n in away)


def offloaded_values(recompute: str) -> tuple[str, ...]:
    """The names of saved values that wait in the host's memory."""
    return _lists(recompute)[1]


def kept_among(recompute: str, names: Iterable[str]) -> str:
    """A plan's value with names, without those that are not among these."""
    here, away = _lists(recompute)
    known = frozenset(names)
    return saving(known & {*here}, known & {*away})


def is_named(recompute: str) -> bool:
    """Whether a plan's value saves values by name."""
    return recompute.startswith((PREFIX, OFFLOADED_PREFIX))


def _lists(recompute: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a plan's value, as written: saved on the device, and offloaded."""
    names_by_prefix: dict[str, list[str]] = {PREFIX: [], OFFLOADED_PREFIX: []}
    under = names_by_prefix[PREFIX]
    for word in recompute.split(",") if is_named(recompute) else ():
        for prefix, names in names_by_prefix.items():
            if word.startswith(prefix):
                under, word = names, word.removeprefix(prefix)
        under.append(word)
    return tuple(names_by_prefix[PREFIX]), tuple(names_by_prefix[OFFLOADED_PREFIX])


def fault(recompute: Any, others: Iterable[str]) -> str:
    """What is wrong with a plan's value, "" where nothing is. others: those without names."""
    if recompute in others:
        return ""
    if not isinstance(recompute, str) or not is_named(recompute):
        return f"recompute {recompute!r} is none of {', '.join(others)}, {PREFIX}NAME,NAME"
    if saving(*_lists(recompute)) != recompute:
        return f"recompute {recompute!r} is not made of {', '.join(NAMES)}, once each, in order"
    return ""


def read_policy(value: Any, words: Mapping[str, str]) -> str:
    """A pin's value as plans have it. words: what may be written -> the value without names that it
    stands for. Raises PlanError P020 for one that is not possible."""
    if isinstance(value, str) and value in words:
        return words[value]
    if isinstance(value, str) and value in PRESETS:
        return saving(PRESETS[value])
    if isinstance(value, str) and value in OFFLOADED_PRESETS:
        return saving((), OFFLOADED_PRESETS[value])
    if isinstance(value, str) and is_named(value):
        return _named_policy(value)
    raise PlanError(
        "P020",
        f"recompute = {value!r} is not possible",
        help=[
            f"one of {', '.join(dict.fromkeys((*words.values(), *PRESETS, *OFFLOADED_PRESETS)))}",
            f"or names of values that are saved: {PREFIX}q,k,v (of {', '.join(NAMES)})",
            f"and of values that wait in the host's memory: {PREFIX}q,k,{OFFLOADED_PREFIX}context",
        ],
    )


def _named_policy(value: str) -> str:
    """A pin's value with names, those of a list joined by commas or +. Raises PlanError P020."""
    commas = ",".join(w for w in re.split(r"[,+;\s]+", value) if w)
    on_device, offloaded = (
        [n for n in names if n] for names in _lists(re.sub(r":,+", ":", commas))
    )
    if ENTERS in offloaded:
        raise PlanError(
            "P020",
            f"recompute = {value!r} is not possible: where what enters blocks waits is said by"
            " another pin",
            help=["offload=activations beside recompute"],
        )
    strange = [n for n in (*on_device, *offloaded) if n not in NAMES and n != ENTERS]
    if strange:
        raise PlanError(
            "P020",
            f"recompute = {value!r} is not possible: no value of a block is called"
            f" {', '.join(map(repr, strange))}",
            help=[f"names are {', '.join(NAMES)}"],
        )
    if both := sorted({*on_device} & {*offloaded}):
        raise PlanError(
            "P020",
            f"recompute = {value!r} is not possible: {', '.join(both)} cannot be saved on the"
            " device and in the host's memory",
            help=[f"each name once, behind {PREFIX} or behind {OFFLOADED_PREFIX}"],
        )
    return saving(on_device, offloaded)


def policy_words(recompute: str) -> str:
    """A plan's value with names in words for people."""
    here, away = _lists(recompute)
    phrases = [f"{', '.join(here)} saved"] if here else []
    phrases += [f"{', '.join(away)} offloaded to host memory"] if away else []
    return f"recompute, {' and '.join(phrases)}"


def values_words(recompute: str) -> str:
    """What the values of a plan's names do for its blocks, in words."""
    here, away = _lists(recompute)
    phrases = [f"{', '.join(here)} {'saves' if len(here) == 1 else 'save'}"] if here else []
    sends = "sends" if len(away) == 1 else "send"
    phrases += [f"{', '.join(away)} {sends} to host memory"] if away else []
    return " and ".join(phrases)
