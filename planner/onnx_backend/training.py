"""The preview training operators: one step of an optimizer for any number of tensors, and gradients
of the surrounding graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from planner.onnx_backend.program import function_of
from planner.onnx_backend.table import Call, Value, as_array, handles
from planner.onnx_backend.values import value_info
from planner.reader import read_model

PREVIEW = "ai.onnx.preview.training"
Step = Callable[..., tuple[np.ndarray, ...]]


def _each(call: Call, groups: int, step: Step) -> tuple[Value, ...]:
    """`step(rate, count, x, gradient, state...)` per tensor; operands and results are ordered group
    by group."""
    rate, count = (as_array(v) for v in call.inputs[:2])
    rest = [as_array(v) for v in call.inputs[2:]]
    n = len(rest) // groups
    updates = [step(rate, int(count), *rest[k::n]) for k in range(n)]
    return tuple(
        np.asarray(update[g]).astype(rest[0].dtype) for g in range(groups - 1) for update in updates
    )


@handles("Momentum", domain=PREVIEW)
def momentum(call: Call) -> tuple[Value, ...]:
    """v' = alpha v + beta g; x' = x - r v' (or Nesterov's x - r (g + alpha v'))."""
    alpha, beta, decay, mode = (call.attr(k) for k in ("alpha", "beta", "norm_coefficient", "mode"))

    def step(
        rate: np.ndarray, count: int, x: np.ndarray, g: np.ndarray, v: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        g = g + np.float32(decay) * x
        v = np.float32(alpha) * v + np.float32(beta if count > 0 else 1.0) * g
        return (x - rate * (g + np.float32(alpha) * v) if mode == "nesterov" else x - rate * v), v

    return _each(call, 3, step)


@handles("Adagrad", domain=PREVIEW)
def adagrad(call: Call) -> tuple[Value, ...]:
    """h' = h + g^2; x' = x - r g / (sqrt(h') + epsilon)."""
    fade, epsilon, decay = (
        call.attr(k, d)
        for k, d in (("decay_factor", 0.0), ("epsilon", 1e-6), ("norm_coefficient", 0.0))
    )

    def step(
        rate: np.ndarray, count: int, x: np.ndarray, g: np.ndarray, h: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        g = g + np.float32(decay) * x
        h = h + g * g
        return x - rate / (1 + count * np.float32(fade)) * g / (np.sqrt(h) + np.float32(epsilon)), h

    return _each(call, 3, step)


@handles("Adam", domain=PREVIEW)
def adam(call: Call) -> tuple[Value, ...]:
    """Moments of the gradient, the rate corrected for their start, then decay after the step."""
    alpha, beta, epsilon = (
        call.attr(k, d) for k, d in (("alpha", 0.9), ("beta", 0.999), ("epsilon", 1e-6))
    )
    before, after = call.attr("norm_coefficient", 0.0), call.attr("norm_coefficient_post", 0.0)

    def step(
        rate: np.ndarray, count: int, x: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        g = g + np.float32(before) * x
        m, v = (
            np.float32(alpha) * m + np.float32(1 - alpha) * g,
            np.float32(beta) * v + np.float32(1 - beta) * g * g,
        )
        if count > 0:
            rate = rate * np.sqrt(1 - beta**count) / (1 - alpha**count)
        return np.float32(1 - after) * (x - rate * m / (np.sqrt(v) + np.float32(epsilon))), m, v

    return _each(call, 4, step)


@handles("Gradient", domain=PREVIEW)
def gradient(call: Call) -> tuple[Value, ...]:
    """Derivatives of tensor `y` by the tensors `xs`, through the nodes of the graph around; `zs`
    are held fixed."""
    import jax

    names, target = list(call.attr("xs")), str(call.attr("y"))
    values = dict(
        zip([*names, *call.attr("zs", [])], (as_array(v) for v in call.inputs), strict=True)
    )
    model = _between(call.machine.model, values, target)
    del model.graph.input[:]
    model.graph.input.extend(value_info(name, value) for name, value in values.items())
    graph = read_model(model)
    run, weights = function_of(graph)

    def total(xs: dict[str, Value]) -> Value:
        return run({**values, **xs}, weights)[0].sum()

    with jax.enable_x64(True):
        gradients = jax.grad(total)({n: values[n] for n in names})
    return tuple(np.asarray(gradients[n]) for n in names)


def _between(model: Any, values: dict[str, Value], target: str) -> Any:
    """A copy of a model that keeps the nodes on the way from the given values to a target, which
    becomes its output."""
    from onnx import ModelProto, helper

    copy = ModelProto()
    copy.CopyFrom(model)
    wanted, nodes = {target}, []
    for node in reversed(model.graph.node):
        if wanted & set(node.output) - set(values):
            nodes.append(node)
            wanted |= set(node.input)
    del copy.graph.node[:], copy.graph.output[:]
    copy.graph.node.extend(reversed(nodes))
    copy.graph.output.append(helper.make_empty_tensor_value_info(target))
    return copy
