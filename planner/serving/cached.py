"""How a decoder was exported with its cache: which inputs are earlier keys and values, and which
outputs are those and the new ones.

The form is that of transformers' exports with a past (models_zoo.cache writes it too). Layer i
reads `past_key_values.i.key`, `.value` [batch, heads, past, width] and returns `present.i.key`,
`.value`, the same with the new tokens' behind; other spellings are understood where numbers and the
words key and value tell them apart. `attention_mask` says which of past and new tokens are real,
`position_ids` where the new ones stand: with both, a cache of fixed length can be filled from the
front, because nothing else in the graph depends on where a key lies.

Layers without attention keep states of a constant size: `past_conv.i` [batch, channels, rows] what
a convolution reads of earlier tokens, `past_ssm.i` or `past_recurrent.i` [batch, heads, ..] what
linear attention does; `present_..` go on with them. What each is, its use in the graph says
(planner.serving.states). A model that keeps nothing else needs no positions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import PlanError
from planner.support.model_folder import model_file

EXPORT = (
    "export it with a cache: optimum-cli export onnx --task text-generation-with-past, or a"
    " config.json or zoo:NAME of the Llama, GPT, mixture and hybrid families"
)
_PAST, _PRESENT = re.compile(r"past|cache", re.I), re.compile(r"present|new_cache|updated", re.I)
_KINDS = (("latent", "latent"), ("rotary key", "rotary"), ("key", "k"), ("value", "v"))
"""What a cache holds, and what of its name says so."""
_LEAD = re.compile(r"^(past_key_values?|past_kv|present_key_values?|past|present|cache)", re.I)


def with_cache(source: Any) -> Any:
    """A source of models with a cache of keys and values, where it is written here and says nothing
    of one: `zoo:NAME` and `config.json`; any other as it is."""
    if not isinstance(source, str | Path):
        return source
    text = model_file(str(source))
    if text.startswith("zoo:"):
        import models_zoo

        return models_zoo.with_cache(text)
    if text.endswith(".json") or ".json," in text:
        from models_zoo import hf_config

        return hf_config.with_cache(text)
    return source


@dataclass(frozen=True)
class Form:
    """Names in the model. pairs: (past, present) of layer 0's keys, layer 0's values, layer 1's
    keys ... sizes: (heads, width) of each, by past. rows, states: likewise (past, present) of what
    convolutions and what linear attention keep; shapes: of a sequence's, by past."""

    ids: str
    mask: str
    positions: str
    logits: str
    pairs: tuple[tuple[str, str], ...]
    sizes: dict[str, tuple[int, int]]
    rows: tuple[tuple[str, str], ...] = ()
    states: tuple[tuple[str, str], ...] = ()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def held(self) -> tuple[str, ...]:
        """All inputs that hold something of earlier tokens: the cache, then rows, then states."""
        return tuple(past for past, _ in (*self.pairs, *self.rows, *self.states))

    @property
    def handed(self) -> tuple[str, ...]:
        """The outputs that go on with them, in the same order."""
        return tuple(present for _, present in (*self.pairs, *self.rows, *self.states))

    @property
    def constant(self) -> tuple[str, ...]:
        """The inputs that hold something of a constant size."""
        return tuple(past for past, _ in (*self.rows, *self.states))

    @property
    def pasts(self) -> tuple[str, ...]:
        """The inputs that hold the cache."""
        return tuple(past for past, _ in self.pairs)

    @property
    def presents(self) -> tuple[str, ...]:
        """The outputs that hold it."""
        return tuple(present for _, present in self.pairs)


def form_of(proto: Any, name: str, dims: Mapping[str, int] | None = None) -> Form:
    """The form of a model's cache; dims: values of symbolic ones. Raises PlanError P220 where it
    has none, P221 where it is wired in a way that is not understood."""
    graph = proto.graph
    stored = {t.name for t in graph.initializer}
    inputs = {i.name: i for i in graph.input if i.name not in stored}
    states = _states(inputs, {o.name: o for o in graph.output}, name)
    going = {present for _, present, _ in states}
    pasts = {
        n: _place(n)
        for n in inputs.keys() - {past for past, *_ in states}
        if _PAST.search(n) and _rank(inputs[n]) == 4
    }
    presents = {
        _place(o.name): o.name
        for o in graph.output
        if o.name not in going
        and (_PRESENT.search(o.name) or (_LEAD.match(o.name) and _rank(o) == 4))
    }
    if not states and (not pasts or not presents):
        raise PlanError(
            "P220",
            f"{name} has no cache: generating with it would compute every earlier token again",
            help=[EXPORT],
        )
    unmatched = [n for n, place in pasts.items() if place is None or place not in presents]
    if unmatched or len(set(pasts.values())) < len(pasts) or "encoder" in " ".join(pasts):
        raise _unclear(name, f"which output continues {(unmatched or list(pasts))[0]!r}")
    order = sorted(pasts, key=lambda n: pasts[n] or (0, ""))
    rest = [n for n in inputs if n not in pasts and n not in {past for past, *_ in states}]
    mask, positions = (
        next((n for n in rest if word in n.lower()), "") for word in ("mask", "position")
    )
    ids = next((n for n in rest if n not in (mask, positions) and _rank(inputs[n]) == 2), "")
    wanted = [("token ids", ids), ("an attention mask", mask)]
    wanted += [("positions of tokens", positions)] if pasts and not _counts(proto, pasts) else []
    if missing := " and ".join(what for what, input_name in wanted if not input_name):
        raise _unclear(name, f"how a cache of fixed length is filled: the model takes no {missing}")
    if extra := [n for n in rest if n not in (ids, mask, positions)]:
        raise _unclear(name, f"what the input {extra[0]!r} is")
    logits = next((o.name for o in graph.output if "logit" in o.name.lower()), graph.output[0].name)
    sizes = {n: tuple(_size(inputs[n], k, name, dims or {}) for k in (1, 3)) for n in order}
    return Form(
        ids=ids,
        mask=mask,
        positions=positions,
        logits=logits,
        pairs=tuple((n, presents[pasts[n]]) for n in order),
        sizes={n: (heads, width) for n, (heads, width) in sizes.items()},
        rows=tuple((past, present) for past, present, shape in states if len(shape) == 2),
        states=tuple((past, present) for past, present, shape in states if len(shape) == 3),
        shapes={past: shape for past, _, shape in states},
    )


def _states(
    inputs: Mapping[str, Any], outputs: Mapping[str, Any], name: str
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(past, present, shape of a sequence's) of inputs that hold something of a constant size.
    Raises PlanError P221 where its size is not said, or no output goes on with it."""
    states = []
    for past, value in inputs.items():
        rank = _rank(value)
        if not past.startswith("past") or not (rank == 3 or (rank == 4 and _place(past) is None)):
            continue
        present = past.replace("past", "present", 1)
        dims = value.type.tensor_type.shape.dim[1:]
        shape = tuple(int(d.dim_value) for d in dims)
        if present not in outputs:
            raise _unclear(name, f"which output continues {past!r}")
        if min(shape) < 1:
            raise _unclear(name, f"how large a sequence's state {past!r} is")
        states.append((past, present, shape))
    return states


def _unclear(name: str, what: str) -> PlanError:
    return PlanError(
        "P221",
        f"{name}: it is not clear {what}",
        help=[
            "inputs input_ids, attention_mask, position_ids and past_key_values.I.key, .value",
            EXPORT,
        ],
    )


def _place(name: str) -> tuple[int, str] | None:
    """(layer, of _KINDS) that a name speaks of; None where it does not say."""
    rest = _LEAD.sub("", name).lower()
    numbers = re.findall(r"\d+", rest)
    kind = next((kind for kind, letters in _KINDS if letters in rest), "")
    return (int(numbers[0]), kind) if len(numbers) == 1 and kind else None


def _rank(value: Any) -> int:
    return len(value.type.tensor_type.shape.dim)


def _counts(proto: Any, pasts: Mapping[str, Any]) -> bool:
    """Whether all that reads a cache is an operator of onnxruntime that takes positions from the
    attention mask: nothing else can depend on where a key lies."""
    readers = [node for node in proto.graph.node if not pasts.keys().isdisjoint(node.input)]
    return all(
        node.op_type == "GroupQueryAttention"
        and any(a.name == "do_rotary" and a.i == 1 for a in node.attribute)
        for node in readers
    )


def _size(value: Any, dim: int, name: str, dims: Mapping[str, int]) -> int:
    extent = value.type.tensor_type.shape.dim[dim]
    size = int(extent.dim_value) or dims.get(extent.dim_param, 0)
    if size < 1:
        what = f"how many {'heads' if dim == 1 else 'features a head'} the cache {value.name!r} has"
        if not extent.dim_param:
            raise _unclear(name, what)
        raise PlanError(
            "P221", f"{name}: it is not clear {what}", help=[f"add --dim {extent.dim_param}=?"]
        )
    return size


def with_constants(proto: Any, values: Sequence[tuple[str, Any]]) -> Any:
    """The model with these inputs held fixed (name, array)."""
    from onnx import ModelProto, numpy_helper

    model = ModelProto()
    model.CopyFrom(proto)
    names = {n for n, _ in values}
    kept = [i for i in model.graph.input if i.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(numpy_helper.from_array(value, n) for n, value in values)
    return model
