"""What layers of a Hugging Face config.json attend to, and how positions turn: fields that many
model types share.

A window is said by sliding_window and, of late, by a list layer_types with a word a layer. The zoo
writes lists in which every n-th layer, or the layers up to one, attend to everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models_zoo.hf_fields import Fields

_KINDS = {"full_attention": False, "sliding_attention": True, "chunked_attention": True}


def near_layers(f: Fields, layers: int, *, every: int = 0, first: int = 0) -> dict[str, Any] | None:
    """Which layers see a window alone: {full_every, full_shift} or {window_from} of the zoo, None
    where none does. every, first: what the model type does where the file has no list (each
    `every`-th layer attends to everything, and those before `first`)."""
    listed = f.data.get("layer_types")
    if listed is None:
        is_local = [not (every and (i + 1) % every == 0) and i >= first for i in range(layers)]
    elif (
        not isinstance(listed, list)
        or len(listed) < layers
        or any(not isinstance(kind, str) or kind not in _KINDS for kind in listed)
    ):
        raise f.bad("layer_types", f"{layers} words or more, of " + ", ".join(_KINDS))
    else:
        is_local = [_KINDS[kind] for kind in listed[:layers]]
    if not any(is_local):
        return None
    pattern = _pattern(is_local)
    if pattern is None:
        raise f.bad("layer_types", "each n-th layer, or those before one, attending to everything")
    return pattern


def _pattern(is_local: Sequence[bool]) -> dict[str, int] | None:
    """The zoo's two numbers for a list, None where it has none."""
    start = is_local.index(True)
    if all(is_local[start:]):
        return {"window_from": start}
    first = is_local.index(False)
    second = is_local.index(False, first + 1) if is_local.count(False) > 1 else 2 * first + 1
    every = second - first
    if any(flag == (i % every == first) for i, flag in enumerate(is_local)):
        return None
    shift = every - 1 - first
    return {"full_every": every} | ({"full_shift": shift} if shift else {})


def windowed(
    f: Fields, layers: int, *, window: int = 0, every: int = 0, first: int = 0
) -> dict[str, Any]:
    """Fields of LlamaConfig for a sliding window; the arguments are the model type's defaults."""
    if not f.flag("use_sliding_window", True):
        return {}
    size = f.whole("sliding_window", window) if "sliding_window" in f.data or window else 0
    if "sliding_window" in f.data and f.data["sliding_window"] is None:
        return {}
    near = near_layers(f, layers, every=every, first=first) if size else None
    return {"window": size, **near} if near else {}


def rescaled(f: Fields, scaling: Any) -> None:
    """Note that a file rescales rotary positions, once."""
    note = "Rotary rescaling is left out: it changes constants, not shapes."
    if (
        isinstance(scaling, dict)
        and scaling.get("rope_type", scaling.get("type", "default")) != "default"
        and note not in f.notes
    ):
        f.notes.append(note)


def turning(
    f: Fields, *, theta: float, share: float = 1.0, local: float | None = None
) -> dict[str, Any]:
    """Fields of LlamaConfig for rotary positions, `share` standing for the part of a head that
    turns. theta, share: the model type's defaults; local: likewise of layers with a window, None
    where they have the same."""
    nested = f.data.get("rope_parameters")
    by_kind = nested if isinstance(nested, dict) else {}
    per_kind = isinstance(by_kind.get("full_attention"), dict)
    rope = Fields(f.path, by_kind["full_attention"] if per_kind else by_kind or f.data)
    scaling = rope.data if by_kind else f.data.get("rope_scaling")
    rescaled(f, scaling)
    fields: dict[str, Any] = {"theta": rope.number("rope_theta", f.number("rope_theta", theta))}
    part = rope.number("partial_rotary_factor", f.number("partial_rotary_factor", share))
    if part > 1:
        raise f.bad("partial_rotary_factor", "a number up to 1")
    if part != 1:
        fields["share"] = part
    if local is not None:
        near = by_kind.get("sliding_attention")
        table = Fields(f.path, near) if per_kind and isinstance(near, dict) else f
        key = "rope_theta" if table is not f else "rope_local_base_freq"
        fields["local_theta"] = table.number(key, local)
    return fields
