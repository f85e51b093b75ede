"""Operators that move or reshape data. Reshape's rule follows factors through merged and divided
dims."""

from __future__ import annotations

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, jnp_dtype, register
from planner.ops.pointwise import broadcast_line, letters
from planner.ops.ties import concatenated, padded, sliced, split_up
from planner.sharding.rule import Rule, parse

SPLIT = "Split"


def reshape_factors(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[list[list[str]], list[list[str]], dict[str, int], set[str]]:
    """Common factors of both shapes: (factors per source dim, per target dim, sizes, those that
    must stay whole).

    Walks both shapes major first; where neither remaining extent divides the other, the rest of
    that group is opaque (whole).
    """
    source_factors: list[list[str]] = [[] for _ in source]
    target_factors: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    opaque: set[str] = set()
    i = j = 0
    a = b = 1  # what is left of source[i-1], target[j-1]
    while True:
        if a == 1:
            while i < len(source) and source[i] == 1:
                i += 1
        if b == 1:
            while j < len(target) and target[j] == 1:
                j += 1
        if a == 1 and i < len(source):
            a, i = source[i], i + 1
        if b == 1 and j < len(target):
            b, j = target[j], j + 1
        if a == 1 and b == 1:
            break
        name = f"f{len(sizes)}"
        if a % b == 0 or b % a == 0:
            size = min(a, b)
            sizes[name] = size
            source_factors[i - 1].append(name)
            target_factors[j - 1].append(name)
            a, b = a // size, b // size
        else:  # opaque until the running products meet again
            for side, extent, dim in ((source_factors, a, i - 1), (target_factors, b, j - 1)):
                name = f"f{len(sizes)}"
                sizes[name] = extent
                opaque.add(name)
                side[dim].append(name)
            pa, pb = a, b
            while pa != pb:
                side, shape = (source_factors, source) if pa < pb else (target_factors, target)
                name = f"f{len(sizes)}"
                dim = i if pa < pb else j
                sizes[name] = shape[dim]
                opaque.add(name)
                side[dim].append(name)
                if pa < pb:
                    pa, i = pa * shape[dim], i + 1
                else:
                    pb, j = pb * shape[dim], j + 1
            a = b = 1
    return source_factors, target_factors, sizes, opaque


def _reshape_rule(node: Node, graph: Graph) -> Rule:
    (source,), (target,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs)
    if 0 in source:
        raise NoRule("an empty tensor")
    left, right, sizes, whole = reshape_factors(source, target)
    mark = lambda f: f + ("!" if f in whole else "")  # noqa: E731
    side = lambda dims: " ".join(  # noqa: E731
        "1" if not d else mark(d[0]) if len(d) == 1 else f"({' '.join(map(mark, d))})" for d in dims
    )
    return parse(f"{side(left)} -> {side(right)}", (source,), (target,), sizes=sizes, linear=(0,))


def _transpose_rule(node: Node, graph: Graph) -> Rule:
    (shape,), (out,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    names = letters(len(shape))
    perm: tuple[int, ...] = tuple(node.attrs["perm"])  # type: ignore[arg-type]
    return parse(
        f"{' '.join(names)} -> {' '.join(names[p] for p in perm)}", (shape,), (out,), linear=(0,)
    )


def _expand_rule(node: Node, graph: Graph) -> Rule:
    (shape,), (out,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs)
    return parse(broadcast_line((shape,), out), (shape,), (out,), linear=(0,))


def _partly_whole(shape: tuple[int, ...], out: tuple[int, ...], whole: set[int]) -> Rule:
    """Dims in `whole` keep to themselves on each side; the others go through."""
    names = letters(len(shape))
    left = " ".join(f"i{i}!" if i in whole else n for i, n in enumerate(names))
    right = " ".join(f"o{i}!" if i in whole else n for i, n in enumerate(names))
    return parse(f"{left} -> {right}", (shape,), (out,), linear=(0,))


def _slice_rule(node: Node, graph: Graph) -> Rule:
    (shape,), (out,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs)
    return _partly_whole(shape, out, {int(a) for a in node.attrs["axes"]})  # type: ignore[union-attr]


def _slice(call: Call) -> str:
    parts = [":"] * len(call.in_shapes[0])
    for axis, start, end, step in zip(
        *(call.node.attrs[k] for k in ("axes", "starts", "ends", "steps")), strict=True
    ):
        stop = "" if step < 0 and end < 0 else str(end)
        parts[int(axis)] = f"{start}:{stop}" + (f":{step}" if step != 1 else "")
    while parts and parts[-1] == ":":
        parts.pop()
    return f"{call.args[0]}[{', '.join(parts) or '...'}]"


def _pad_rule(node: Node, graph: Graph) -> Rule:
    (shape,), (out,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs)
    rule = _partly_whole(
        shape, out, {i for i, (s, o) in enumerate(zip(shape, out, strict=True)) if s != o}
    )
    return rule if not node.attrs.get("value") else _not_linear(rule)


def _not_linear(rule: Rule) -> Rule:
    from dataclasses import replace

    return replace(rule, linear=())


def _pad(call: Call) -> str:
    n = len(call.in_shapes[0])
    pads = call.node.attrs["pads"]
    widths = [(pads[i], pads[i + n]) for i in range(n)]  # type: ignore[index]
    mode = {
        "constant": "",
        "reflect": ", mode='reflect'",
        "edge": ", mode='edge'",
        "wrap": ", mode='wrap'",
    }[str(call.attr("mode", "constant"))]
    value = call.node.attrs.get("value", 0.0)
    return f"jnp.pad({call.args[0]}, {widths}{mode or f', constant_values={value!r}'})"


def _tile_rule(node: Node, graph: Graph) -> Rule:
    (shape,), (out,) = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs)
    return _partly_whole(
        shape, out, {i for i, (s, o) in enumerate(zip(shape, out, strict=True)) if s != o}
    )


def _concat_rule(node: Node, graph: Graph) -> Rule:
    shapes, (out,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    axis = int(node.attrs["axis"])  # type: ignore[arg-type]
    names = letters(len(out))
    sides = [
        " ".join(f"i{k}!" if i == axis else n for i, n in enumerate(names))
        for k in range(len(shapes))
    ]
    right = " ".join("o!" if i == axis else n for i, n in enumerate(names))
    return parse(f"{','.join(sides)} -> {right}", shapes, (out,), linear=tuple(range(len(shapes))))


def _split_rule(node: Node, graph: Graph) -> Rule:
    (shape,), outs = graph.shapes(node.inputs[:1]), graph.shapes(node.outputs)
    axis = int(node.attrs["axis"])  # type: ignore[arg-type]
    names = letters(len(shape))
    left = " ".join("i!" if i == axis else n for i, n in enumerate(names))
    sides = [
        " ".join(f"o{k}!" if i == axis else n for i, n in enumerate(names))
        for k in range(len(outs))
    ]
    return parse(f"{left} -> {','.join(sides)}", (shape,), outs, linear=(0,))


def _split(call: Call) -> str:
    axis = int(call.attr("axis"))  # type: ignore[arg-type]
    cuts, offset = [], 0
    for shape in call.global_out[:-1]:
        offset += shape[axis]
        cuts.append(offset)
    return f"jnp.split({call.args[0]}, {cuts}, axis={axis})"


def _trilu_rule(node: Node, graph: Graph) -> Rule:
    (shape,) = graph.shapes(node.inputs[:1])
    names = [n + ("!" if i >= len(shape) - 2 else "") for i, n in enumerate(letters(len(shape)))]
    return parse(f"{' '.join(names)} -> {' '.join(names)}", (shape,), (shape,), linear=(0,))


def _trilu(call: Call) -> str:
    return f"jnp.{'triu' if call.attr('upper', 1) else 'tril'}({call.args[0]}, {call.attr('k', 0)})"


def _made_rule(node: Node, graph: Graph) -> Rule:
    """The rule of what is made from nothing: whole on every device, where cutting it is free."""
    names = letters(len(graph.tensors[node.outputs[0]].shape))
    return parse(f"-> {' '.join(f'{n}!' for n in names)}", (), graph.shapes(node.outputs))


def _range(call: Call) -> str:
    start, delta, (count,) = call.attr("start"), call.attr("delta"), call.out_shapes[0]
    text = f"jnp.arange({count}, dtype={jnp_dtype(call.out_dtypes[0])})"
    return text if (start, delta) == (0, 1) else f"{start!r} + {delta!r} * {text}"


register(
    Operator(
        "Reshape",
        _reshape_rule,
        lambda c: f"{c.args[0]}.reshape({c.out_shapes[0]})",
        saves="",
        fusible=True,
        free=True,
        rearranges=True,
        passes_values=True,
    ),
    Operator(
        "Transpose",
        _transpose_rule,
        lambda c: f"jnp.transpose({c.args[0]}, {tuple(c.attr('perm'))})",  # type: ignore[arg-type]
        saves="",
        fusible=True,
        rearranges=True,
        passes_values=True,
    ),
    Operator(
        "Expand",
        _expand_rule,
        lambda c: f"jnp.broadcast_to({c.args[0]}, {c.out_shapes[0]})",
        saves="",
        fusible=True,
        passes_values=True,
    ),
    Operator(
        "Slice",
        _slice_rule,
        _slice,
        saves="",
        fusible=True,
        passes_values=True,
        extents=True,
        ties=sliced,
    ),
    Operator(
        "Pad",
        _pad_rule,
        _pad,
        saves="",
        fusible=True,
        passes_values=True,
        extents=True,
        ties=padded,
    ),
    Operator(
        "Tile",
        _tile_rule,
        lambda c: f"jnp.tile({c.args[0]}, {tuple(c.attr('repeats'))})",  # type: ignore[arg-type]
        saves="",
        fusible=True,
    ),
    Operator(
        "Concat",
        _concat_rule,
        lambda c: f"jnp.concatenate([{', '.join(c.args)}], axis={c.attr('axis')})",
        saves="",
        passes_values=True,
        extents=True,
        ties=concatenated,
    ),
    Operator(SPLIT, _split_rule, _split, saves="", fusible=True, extents=True, ties=split_up),
    Operator("Range", _made_rule, _range, saves=""),
    Operator(
        "ConstantOfShape",
        _made_rule,
        lambda call: (
            f"jnp.full({call.out_shapes[0]}, {call.attr('value')!r},"
            f" {jnp_dtype(call.out_dtypes[0])})"
        ),
        saves="",
    ),
    Operator("Trilu", _trilu_rule, _trilu, saves="", fusible=True, extents=True),
)
