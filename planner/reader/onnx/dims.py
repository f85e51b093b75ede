"""Binding dims: every input dim becomes an integer before anything else is read.

The batch is the symbol named like one, else the symbol that all inputs share as dim 0. A static
export has no symbol: its batch is dim 0 of its first input, and another batch is traced through the
finished graph (`planner.reader.batch.rebatch`).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.errors import PlanError, did_you_mean
from planner.reader.draft.draft import MOST_ELEMENTS
from planner.reader.draft.shapes import Type
from planner.reader.lower.guide import stand_in
from planner.reader.onnx.tensors import input_type

_BATCH = re.compile(r"(?i)^(b|n|bs|bsz|(\w+_)?batch(es)?(_?(size|dim|axis|num))?(_?\d+)?)$")

_CACHE = re.compile(r"(?i)past|cache")
"""Names of inputs that hold keys and values of earlier tokens: they may be empty."""

_Declared = Mapping[str, tuple[tuple[int | str, ...], str]]
"""Input -> (its dims, numbers or symbols, and its dtype)."""


@dataclass
class Bound:
    """Inputs with static shapes, and what was decided about the batch.

    lowered: the batch the inputs have, None when the model has none that can be traced. batch: the
    batch asked for. traced: inputs whose dim 0 is the lowered batch. exported: the batch in the
    file, None when it is a symbol. guided: the lowered batch stands in for a single exported sample
    (see `planner.reader.lower.guide`). symbols: values of the symbolic dims as lowered; dims: as
    asked for.
    """

    inputs: dict[str, Type]
    batch: int
    lowered: int | None = None
    traced: tuple[str, ...] = ()
    exported: int | None = None
    guided: bool = False
    symbols: dict[str, int] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def bind(
    graph: Any,
    *,
    batch: int | None,
    dims: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    tokens_per_step: int | None,
    devices: int,
    direct: bool = False,
    carriers: Mapping[str, int] | None = None,
) -> Bound:
    """Static input types from the graph's inputs and the user's options. Raises PlanError listing
    every dim still unbound.

    A symbolic batch of 1 is read as 2 and traced back (unless `direct`): dims of 1 look like no
    dims at all, and the graph of one sample should have the operators that the graph of many has.
    `carriers` are inputs of a guided lowering that hold the batch in another dim than the first.
    """
    declared = _declared(graph, shapes)
    known = {str(k): _size(str(k), v, declared) for k, v in dims.items()}
    _bind_shapes(declared, shapes, known)
    symbols = _symbols(declared)
    symbol = _batch_symbol(declared, symbols)
    batch = _given_batch(declared, symbols, known, symbol, batch)
    exported, traced = (None, ()) if symbol is not None else _static_batch(declared)
    notes: list[str] = []
    _refuse_unbound(declared, symbols, known, symbol)
    if tokens_per_step is not None:
        batch = _from_tokens(declared, known, symbol, tokens_per_step, batch)
    if batch is None:
        batch, how = _default_batch(exported, max(1, devices))
        notes.append(f"batch {batch}: {how} (--batch sets it)")
    lowered = exported
    if symbol is not None:
        known[symbol] = batch
        if batch == 1 and not direct and _leads(declared, symbols[symbol], symbol):
            lowered = known[symbol] = 2
            traced = tuple(
                name for name, (shape, _) in declared.items() if shape and shape[0] == symbol
            )
    inputs = {
        name: (_static(name, shape, known), dtype) for name, (shape, dtype) in declared.items()
    }
    asked = {**known, **({symbol: batch} if symbol is not None else {}), "batch": batch}
    guided = exported == 1 and batch != 1
    if guided:
        lowered = stand_in(graph)
        for name, axis in [*((name, 0) for name in traced), *(carriers or {}).items()]:
            _set_dim(inputs, name, axis, lowered)
    return Bound(
        inputs=inputs,
        batch=batch,
        lowered=lowered,
        traced=traced,
        exported=exported,
        guided=guided,
        symbols=dict(known),
        dims=asked,
        notes=notes,
    )


def _leads(declared: _Declared, places: Sequence[tuple[str, int]], symbol: str) -> bool:
    """Whether a symbol is the first dim at each of its places (input, axis), and nothing else."""
    return all(axis == 0 and declared[name][0][0] == symbol for name, axis in places)


def _set_dim(inputs: dict[str, Type], name: str, axis: int, n: int) -> None:
    """Gives one dim of an input another size."""
    shape, dtype = inputs[name]
    inputs[name] = ((*shape[:axis], n, *shape[axis + 1 :]), dtype)


def _symbols(declared: _Declared) -> dict[str, list[tuple[str, int]]]:
    """Symbolic dim -> (input, axis) of every place whose size is the symbol or a formula of it."""
    symbols: dict[str, list[tuple[str, int]]] = {}
    for name, (shape, _) in declared.items():
        for axis, n in enumerate(shape):
            if isinstance(n, str):
                for part in _names(n):
                    symbols.setdefault(part, []).append((name, axis))
    return symbols


def _given_batch(
    declared: _Declared,
    symbols: Mapping[str, list[tuple[str, int]]],
    known: dict[str, int],
    symbol: str | None,
    batch: int | None,
) -> int | None:
    """The batch that the user gives, as --batch or as a dim; None where neither is given. A dim
    named batch that is no dim of the model is taken out of `known`. Raises PlanError."""
    for key in known:
        if key not in symbols and key != "batch":
            close = did_you_mean(key, sorted(symbols))
            raise PlanError(
                "P141",
                f"no input of the model has a dim named {key!r}" + (f"; {close}" if close else ""),
                detail=[_listing(declared)],
                help=["its dims are " + (", ".join(sorted(symbols)) or "all fixed")],
            )
    if "batch" in known and symbol != "batch":
        if symbol in known or (batch is not None and batch != known["batch"]):
            raise PlanError(
                "P142",
                "the batch is given twice with different values",
                detail=[f"--batch {batch}, --dim batch={known['batch']}"],
            )
        batch = known.pop("batch")
    batch = None if batch is None else _positive(batch, "--batch")
    if symbol is not None and symbol in known:
        if batch is not None and batch != known[symbol]:
            raise PlanError(
                "P142", f"the batch is given twice: --batch {batch} and {symbol}={known[symbol]}"
            )
        batch = known[symbol]
    return batch


def _refuse_unbound(
    declared: _Declared,
    symbols: Mapping[str, list[tuple[str, int]]],
    known: Mapping[str, int],
    symbol: str | None,
) -> None:
    """Raises PlanError P140 naming every dim without a value."""
    missing = sorted(s for s in symbols if s not in known and s != symbol)
    if missing:
        raise PlanError(
            "P140",
            "the model's inputs have dims without a value: " + ", ".join(missing),
            detail=[_listing(declared)],
            help=["add " + " ".join(f"--dim {_quote(s)}=?" for s in missing), *_without(declared)],
        )


def _without(declared: _Declared) -> list[str]:
    """What to say of the dims of a model with a cache where nothing was generated yet."""
    lengths = [
        d[2] for n, (d, _) in declared.items() if _CACHE.search(n) and len(d) == 4 and d[2] != d[3]
    ]
    length = next((n for n in lengths if isinstance(n, str) and _formula(n) is None), "")
    return (
        [
            f"to train it, or for prompts alone, without a cache: --dim {_quote(length)}=0",
            "to serve it: --workload infer --prompt 2048 --generate 256 --concurrency 8",
        ]
        if length
        else []
    )


def _default_batch(exported: int | None, devices: int) -> tuple[int, str]:
    """The batch where none is given, and why it is this one."""
    start = exported or 1
    batch = -(-start // devices) * devices
    if exported == batch:
        return batch, f"the exported {exported}"
    if devices > 1:
        return batch, f"the smallest multiple of {devices} devices from {start} on"
    return batch, "one sample"


def _declared(
    graph: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[tuple[int | str, ...], str]]:
    """name -> (dims: ints or symbols, dtype) of the data inputs (those without an initializer)."""
    stored = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    inputs: dict[str, tuple[tuple[int | str, ...], str]] = {}
    for value in graph.input:
        if value.name in stored:
            continue
        kind, dtype = input_type(value)
        if kind != "tensor":
            raise PlanError(
                "P143", f"input {value.name!r} has {kind} type; only tensors can be planned"
            )
        if dtype in ("string", "undefined") or dtype.startswith("unknown"):
            raise PlanError(
                "P143", f"input {value.name!r} holds {dtype} values; only numbers can be planned"
            )
        if value.type.tensor_type.HasField("shape"):
            dims = tuple(
                _dim(value.name, k, d) for k, d in enumerate(value.type.tensor_type.shape.dim)
            )
        elif value.name in shapes:
            dims = tuple(f"{value.name}.{k}" for k in range(len(shapes[value.name])))
        else:
            raise PlanError(
                "P144",
                f"input {value.name!r} has no shape",
                help=[f"add --shape {_quote(value.name)}=4,8 with its dims"],
            )
        inputs[value.name] = (dims, dtype)
    unknown = [name for name in shapes if name not in inputs]
    if unknown:
        close = did_you_mean(unknown[0], list(inputs))
        raise PlanError(
            "P141",
            f"the model has no input named {unknown[0]!r}" + (f"; {close}" if close else ""),
            detail=["inputs: " + ", ".join(inputs)],
        )
    firsts = {name: dims[0] for name, (dims, _) in inputs.items() if dims}
    if firsts and all(
        first == f"{name}.0" for name, first in firsts.items()
    ):  # no input says its first dim: one batch
        for name in firsts:
            inputs[name] = (("batch", *inputs[name][0][1:]), inputs[name][1])
    return inputs


def _dim(name: str, axis: int, dim: Any) -> int | str:
    kind = dim.WhichOneof("value")
    if kind == "dim_param" and dim.dim_param.strip() not in (
        "",
        "?",
        "*",
        "-1",
        "None",
    ):  # what some exporters write for unknown
        text = dim.dim_param
        return int(text) if text.isdecimal() and int(text) > 0 else text
    if kind == "dim_value" and dim.dim_value > 0:
        return int(dim.dim_value)
    return f"{name}.{axis}"  # no value, 0, or the -1 that some exporters write: unknown


def _bind_shapes(
    declared: dict[str, tuple[tuple[int | str, ...], str]],
    shapes: Mapping[str, tuple[int, ...]],
    known: dict[str, int],
) -> None:
    """Takes the shapes that are given. A dim that the file says as a formula of others ("past +
    new") is then the number given, whatever the others are where nothing else has them."""
    formulas: list[tuple[str, int]] = []
    for name, shape in shapes.items():
        dims = declared[name][0]
        if len(shape) != len(dims):
            raise PlanError(
                "P142",
                f"--shape {name} has {len(shape)} dims; the input has {len(dims)}: {list(dims)}",
            )
        for k, (n, value) in enumerate(zip(dims, shape, strict=True)):
            value = _positive(value, f"--shape {name}")
            if isinstance(n, int):
                if n != value:
                    raise PlanError(
                        "P142",
                        f"--shape {name}={list(shape)} contradicts the model's {list(dims)}",
                        help=["a static batch is changed by --batch"],
                    )
            elif _formula(n):
                formulas.append((name, k))
            elif known.setdefault(n, value) != value:
                raise PlanError("P142", f"dim {n!r} is given twice: {known[n]} and {value}")
    for name, k in formulas:
        dims, dtype = declared[name]
        text, value = str(dims[k]), shapes[name][k]
        if known.keys() >= _names(text).keys() and (computed := _evaluate(text, known)) != value:
            raise PlanError("P142", f"dim {text!r} is given twice: {computed} and {value}")
        declared[name] = (*dims[:k], value, *dims[k + 1 :]), dtype


def with_batch(
    graph: Any, dims: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], batch: int
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Dims and shapes that say another batch: those of a reading of a part of it."""
    declared = _declared(graph, shapes)
    symbol = _batch_symbol(declared, _symbols(declared))
    return (
        {k: batch if k in ("batch", symbol) else n for k, n in dims.items()},
        {
            name: tuple(
                batch if symbol is not None and d == symbol else n
                for d, n in zip(declared[name][0], shape, strict=True)
            )
            for name, shape in shapes.items()
        },
    )


def _batch_symbol(declared: _Declared, symbols: Mapping[str, Any]) -> str | None:
    for name in symbols:
        if _BATCH.match(name):
            return name
    firsts = [shape[0] for shape, _ in declared.values() if shape]
    first = firsts[0] if firsts else None
    if isinstance(first, str) and first in symbols and all(f == first for f in firsts):
        return first
    return None


def _static_batch(declared: _Declared) -> tuple[int | None, tuple[str, ...]]:
    ranked = [(name, shape[0]) for name, (shape, _) in declared.items() if shape]
    if not ranked or not isinstance(ranked[0][1], int):
        return None, ()
    first = ranked[0][1]
    return first, tuple(name for name, n in ranked if n == first)


def _from_tokens(
    declared: _Declared,
    known: Mapping[str, int],
    symbol: str | None,
    tokens: int,
    batch: int | None,
) -> int:
    """The batch that makes `tokens` tokens a step; the sequence is dim 1 of the first
    two-dimensional integer input."""
    tokens_of = [
        (n, shape)
        for n, (shape, dtype) in declared.items()
        if dtype.startswith(("int", "uint")) and len(shape) == 2
    ]
    if not tokens_of:
        raise PlanError(
            "P145",
            "--tokens-per-step needs an input of token ids [batch, sequence]; this model has none",
            help=["give --batch"],
        )
    name, dims = tokens_of[0]
    length = dims[1] if isinstance(dims[1], int) else known.get(dims[1], 0)
    if length < 1 or tokens < 1 or tokens % length:
        raise PlanError(
            "P145",
            f"--tokens-per-step {tokens} is no multiple of the sequence length {length} of input"
            f" {name!r}",
        )
    if batch is not None and batch != tokens // length:
        raise PlanError(
            "P142",
            f"--batch {batch} and --tokens-per-step {tokens} (a batch of {tokens // length})"
            " contradict each other",
        )
    return tokens // length


def _static(name: str, shape: tuple[int | str, ...], known: Mapping[str, int]) -> tuple[int, ...]:
    extents = []
    for n in shape:
        if isinstance(n, str):
            n = known[n] if n in known else _evaluate(n, known)
        extents.append(n)
    if min(extents, default=1) < (0 if _CACHE.search(name) else 1):
        raise PlanError(
            "P140",
            f"input {name!r} gets the shape {extents} from {list(shape)}",
            help=["choose dims that make every size positive"],
        )
    elements = 1
    for n in extents:
        elements *= n
    if elements > MOST_ELEMENTS:
        raise PlanError(
            "P133",
            f"input {name!r} of shape {extents} has {elements} elements, which does not fit in any"
            " device memory",
        )
    return tuple(extents)


_OPS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def _formula(text: str) -> ast.expr | None:
    """The expression of a dim such as '2*seq + 1', or None when it is a plain symbol."""
    if text.isidentifier() or len(text) > 200:
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    allowed = (ast.BinOp, ast.Name, ast.Constant, ast.Load, *_OPS)
    if not isinstance(tree, ast.BinOp) or not all(isinstance(n, allowed) for n in ast.walk(tree)):
        return None
    return tree


def _names(text: str) -> dict[str, None]:
    """The symbols of a dim, in order."""
    tree = _formula(text)
    names = [text] if tree is None else [t.id for t in ast.walk(tree) if isinstance(t, ast.Name)]
    return dict.fromkeys(names)


def _evaluate(text: str, known: Mapping[str, int]) -> int:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            return known[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if not isinstance(node, ast.BinOp):
            raise PlanError("P140", f"dim {text!r} cannot be worked out")
        a, b = value(node.left), value(node.right)
        if isinstance(node.op, ast.FloorDiv) and b == 0:
            raise PlanError("P140", f"dim {text!r} divides by zero")
        return int(_OPS[type(node.op)](a, b))

    tree = _formula(text)
    assert tree is not None
    return value(tree)


def _positive(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError("P142", f"{what} must be a positive integer, not {value!r}")
    return value


def _size(symbol: str, value: Any, declared: _Declared) -> int:
    """The value of a dim: 0 of caches alone, behind the batch. Raises PlanError."""
    places = [
        (n, k) for n, (dims, _) in declared.items() for k, d in enumerate(dims) if d == symbol
    ]
    if value == 0 and places and all(axis and _CACHE.search(name) for name, axis in places):
        return 0
    return _positive(value, f"--dim {symbol}")


def _listing(declared: _Declared) -> str:
    return "inputs: " + "; ".join(
        f"{name!r} [{', '.join(map(str, shape))}]" for name, (shape, _) in declared.items()
    )


def _quote(name: str) -> str:
    return name if re.fullmatch(r"[\w.:-]+", name) else repr(name)
