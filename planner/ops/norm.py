"""Normalisations and softmax: the normalised dims stay whole; everything else splits. Live
BatchNorm is global over its batch axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, register, tuple_text
from planner.ops.cost import normalising
from planner.ops.pointwise import letters, uneven_never
from planner.sharding.rule import KernelCollective, Rule, parse


def _axis_whole(node: Node, graph: Graph) -> Rule:
    (shape,) = graph.shapes(node.inputs[:1])
    axis = int(node.attrs["axis"]) % len(shape)  # type: ignore[arg-type]
    names = [n + ("!" if i == axis else "") for i, n in enumerate(letters(len(shape)))]
    return parse(f"{' '.join(names)} -> {' '.join(names)}", (shape,), (shape,))


def _regular(rule: Callable[[Node, Graph], Rule]) -> Callable[[Node, Graph], Rule]:
    """Without an epsilon a row of padding (zeros) would be divided by 0: its dims are then cut only
    evenly."""
    return lambda node, graph: (
        rule(node, graph) if node.attrs.get("epsilon", 1e-5) else uneven_never(rule(node, graph), 0)
    )


def _suffix_norm(node: Node, graph: Graph) -> Rule:
    """LayerNormalization and RMSNormalization: dims from `axis` on are whole, in the scale and the
    bias too."""
    shapes = graph.shapes(node.inputs)
    x = shapes[0]
    axis = int(node.attrs.get("axis", len(x) - 1)) % len(x)  # type: ignore[arg-type]
    names = [n + ("!" if i >= axis else "") for i, n in enumerate(letters(len(x)))]
    if len(node.outputs) > 1 and any(node.outputs[1:]):
        raise NoRule("statistics as outputs")
    sides = [" ".join(names)]
    for shape in shapes[1:]:
        aligned = names[len(x) - len(shape) :] if shape else []
        sides.append(
            " ".join(
                "1" if s == 1 and x[len(x) - len(shape) + i] != 1 else n
                for i, (s, n) in enumerate(zip(shape, aligned, strict=True))
            )
        )
    return parse(",".join(sides) + "->" + " ".join(names), shapes, (x,))


def _layer_norm(call: Call) -> str:
    rank = len(call.in_shapes[0])
    axes = tuple(range(int(call.attr("axis", rank - 1)) % rank, rank))  # type: ignore[arg-type]
    bias = call.args[2] if len(call.args) > 2 and call.args[2] else "None"
    return (
        f"{call.use('layer_norm')}({call.args[0]}, {call.args[1]}, {bias}, {axes},"
        f" {call.attr('epsilon', 1e-5)!r})"
    )


def _rms_norm(call: Call) -> str:
    rank = len(call.in_shapes[0])
    axes = tuple(range(int(call.attr("axis", rank - 1)) % rank, rank))  # type: ignore[arg-type]
    return (
        f"{call.use('rms_norm')}({call.args[0]}, {call.args[1]}, {axes},"
        f" {call.attr('epsilon', 1e-5)!r})"
    )


def _space(rank: int) -> str:
    """Rows may be cut (the statistics are then summed over their axes), evenly."""
    return " ".join(f"y{i}" + ("!" if i else "") for i in range(rank))


def _of_rows(rule: Rule, over: tuple[str, ...]) -> Rule:
    """Statistics [over] of rows that may be cut: two sums in the forward pass, two at once in the
    backward pass."""
    inner = (
        KernelCollective("y0", "all-reduce", over, 2, 0),
        KernelCollective("y0", "all-reduce", over, 0, 1, units=2),
    )
    return (
        replace(rule, inner=inner, no_pad=rule.no_pad | {"y0"}, spatial=frozenset({"y0"}))
        if "y0" in rule.sizes
        else rule
    )


def _instance_rule(node: Node, graph: Graph) -> Rule:
    shapes = graph.shapes(node.inputs)
    line = f"n c {_space(len(shapes[0]) - 2)}"
    return _of_rows(parse(f"{line}, c, c -> {line}", shapes, (shapes[0],)), ("n", "c"))


def _group_rule(node: Node, graph: Graph) -> Rule:
    shapes = graph.shapes(node.inputs)
    groups = int(node.attrs["num_groups"])  # type: ignore[arg-type]
    if shapes[1] != (shapes[0][1],):
        raise NoRule("scale per group")
    line = f"n (g c!) {_space(len(shapes[0]) - 2)}"
    rule = parse(
        f"{line}, (g c!), (g c!) -> {line}",
        shapes,
        (shapes[0],),
        sizes={"g": groups, "c": shapes[0][1] // groups},
    )
    return _of_rows(rule, ("n", "g"))


def _instance_norm(call: Call) -> str:
    return _normed(call, call.in_shapes[0][1])


def _group_norm(call: Call) -> str:
    return _normed(call, call.rule.local(call.split, call.mesh)["g"])


def _normed(call: Call, groups: int) -> str:
    text = f"{', '.join(call.args)}, {groups}, {call.attr('epsilon', 1e-5)!r}"
    if not call.axes("y0"):
        return f"{call.use('group_norm')}({text})"
    count = call.in_shapes[0][1] // groups * prod(call.global_in[0][2:])
    return f"{call.use('group_norm_rows')}({text}, {count}, {call.axis_text('y0')})"


def _batch_rule(node: Node, graph: Graph) -> Rule:
    """Inference: everything splits. Training: statistics are summed over the axes of the batch and
    of rows, forward and backward (two each)."""
    shapes = graph.shapes(node.inputs)
    space = " ".join(f"y{i}" for i in range(len(shapes[0]) - 2))
    line = f"n c {space}"
    if not node.attrs.get("training_mode"):
        return parse(f"{line}, c, c, c, c -> {line}", shapes, (shapes[0],))
    live = tuple(o for o in node.outputs if o)
    line = f"n c {_space(len(shapes[0]) - 2)}"
    inner = (KernelCollective("n+y0" if len(shapes[0]) > 2 else "n", "all-reduce", ("c",), 2, 2),)
    return parse(
        f"{line}, c, c, c, c -> {line}{', c' * (len(live) - 1)}",
        shapes,
        graph.shapes(live),
        inner=inner,
        no_pad=frozenset({"n", "y0"}),
        spatial=frozenset({"y0"}),
    )


def _batch_norm(call: Call) -> str:
    args, eps = ", ".join(call.args), call.attr("epsilon", 1e-5)
    if not call.attr("training_mode", 0):
        return f"{call.use('batch_norm')}({args}, {eps!r})"
    axes = tuple(a for a in call.mesh if a in (*call.axes("n"), *call.axes("y0")))
    count = call.rule.sizes["n"] * prod(call.global_in[0][2:])
    text = (
        f"{call.use('batch_norm_live')}({args}, {eps!r}, {call.attr('momentum', 0.9)!r}, {count},"
        f" {tuple_text(axes)})"
    )
    live = sum(1 for o in call.node.outputs if o)
    return text if live == 3 else f"{text}[0]" if live == 1 else f"{text}[:{live}]"


ROOT_NORM_BACKWARD, LAYER_NORM_BACKWARD = 4.0, 6.0
"""The backward pass of a norm over rows as XLA's GPU compiler runs it, in forward passes (two
arrays): the operand's gradient reads two arrays and writes one; the scale's writes the product that
is summed, with statistics of its own, and reads it again. A LayerNorm's has two statistics, and a
shift whose gradient reads one more (benchmarks/RESULTS.md, "Norms on GPUs" and "On one H100")."""
ROW_SUMS = 8
"""What sums over rows for the gradients of a scale and a shift take on GPUs beside their bytes, as
launches: fitted to programs on one H100 (benchmarks/RESULTS.md, "Norms on GPUs")."""


# Many parameters: what norms differ in.
def _norm(
    name: str,
    rule: Callable[[Node, Graph], Rule],
    kernel: Callable[[Call], str],
    starts_at_one: tuple[int, ...] = (1,),
    adds: tuple[int, ...] = (),
    extents: bool = False,
    counted: str = "",
    gpu_backward: float = 2.0,
    gpu_sums: int = 0,
    lays_out_anew: bool = False,
) -> Operator:
    return Operator(
        name,
        _regular(rule),
        kernel,
        kind="norm",
        gradient=normalising,
        starts_at_one=starts_at_one,
        adds=adds,
        extents=extents,
        counted=counted,
        gpu_backward=gpu_backward,
        gpu_sums=gpu_sums,
        lays_out_anew=lays_out_anew,
    )


register(
    Operator(
        "Softmax",
        _axis_whole,
        lambda c: f"jax.nn.softmax({c.args[0]}, axis={c.attr('axis')})",
        saves="out",
        traffic=1.5,
        extents=True,
    ),
    Operator(
        "LogSoftmax",
        _axis_whole,
        lambda c: f"jax.nn.log_softmax({c.args[0]}, axis={c.attr('axis')})",
        saves="out",
        traffic=1.5,
        extents=True,
    ),
    _norm(
        "LayerNormalization",
        _suffix_norm,
        _layer_norm,
        extents=True,
        gpu_backward=LAYER_NORM_BACKWARD,
        gpu_sums=ROW_SUMS,
    ),
    _norm(
        "RMSNormalization",
        _suffix_norm,
        _rms_norm,
        extents=True,
        gpu_backward=ROOT_NORM_BACKWARD,
        gpu_sums=ROW_SUMS,
    ),
    _norm("InstanceNormalization", _instance_rule, _instance_norm, lays_out_anew=True),
    _norm("GroupNormalization", _group_rule, _group_norm, counted="g", lays_out_anew=True),
    _norm("BatchNormalization", _batch_rule, _batch_norm, starts_at_one=(1, 4), adds=(2,)),
)
