"""com.microsoft::MoE, onnxruntime's mixture of experts, as RoutedExperts behind a router.

Read as onnxruntime 1.31 computes it: weights of the k largest of softmax(logits), divided by their
sum where normalize_routing_weights = 1; stacks [E, out, in] ([E, in, out] in files from before the
operator stored them so, which the shapes tell); "gelu" is the one with tanh; a third stack is
multiplied by the activated first. "swiglu" in one stack: g * sigmoid(alpha g) * (u + beta), g and u
alternating (swiglu_fusion = 1) or in halves (2), g bounded from above and u on both sides by
swiglu_limit.
"""

from __future__ import annotations

from typing import Any

from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.call import Call, Unsupported

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "identity": "identity"}


def moe(call: Call) -> None:
    """input [.., H], router logits [T, E], then weights and biases of the first, the last and the
    multiplied layer."""
    act, fusion = str(call.attr("activation_type", "relu")), int(call.attr("swiglu_fusion", 0))
    if call.attr("use_sparse_mixer", 0):
        raise Unsupported("routing by sparse mixing")
    if (act == "swiglu") != (fusion in (1, 2)) or (act != "swiglu" and act not in _ACTIVATIONS):
        raise Unsupported(f"experts with the activation {act}, fused as {fusion}")
    x, logits = call.arg(0), call.shape(1)
    k = int(call.attr("k", 1))
    if len(logits) != 2 or not 0 < k <= logits[1]:
        raise ShapeError(f"router of shape {list(logits)} for {k} choices")
    share = call.emit("Softmax", [call.arg(1)], {"axis": 1})
    value, index = call.draft.add_many(
        "TopK",
        [share],
        {"k": k, "axis": 1, "largest": 1, "sorted": 1},
        [f"{call.name(0)}/share", f"{call.name(0)}/index"],
    )
    if call.attr("normalize_routing_weights", 0):
        value = call.emit(
            "Div", [value, call.emit("ReduceSum", [value], {"axes": (1,), "keepdims": 1})]
        )
    lead = call.shape()[:-1]
    value, index = (call.emit("Reshape", [t], shape=(*lead, k)) for t in (value, index))
    width = call.shape()[-1]
    turned = call.shape(2)[2] == width
    attrs: dict[str, Any] = {
        "trans_in": int(turned),
        "trans_out": int(
            call.shape(4)[1] == width if call.shape(4)[1] != call.shape(4)[2] else turned
        ),
    }
    stacks: list[str] = []
    if act == "swiglu":
        gate, up = _halves(call, call.arg(2), 1 if turned else 2, fusion)
        biases = _halves(call, call.arg(3), 1, fusion) if call.has(3) else ("", "")
        limit = call.attr("swiglu_limit")
        attrs |= {
            "activation": "swiglu",
            "alpha": float(call.attr("activation_alpha", 1.0)),
            "beta": float(call.attr("activation_beta", 0.0)),
        }
        attrs |= {"limit": float(limit)} if limit is not None else {}
        stacks = [gate, up, call.arg(4), *biases, call.arg(5)]
    elif call.has(6):
        attrs["activation"] = _ACTIVATIONS[act]
        stacks = [call.arg(2), call.arg(6), call.arg(4), call.arg(3), call.arg(7), call.arg(5)]
    else:
        attrs["activation"] = _ACTIVATIONS[act]
        stacks = ["", call.arg(2), call.arg(4), "", call.arg(3), call.arg(5)]
    while not stacks[-1]:
        stacks.pop()
    call.result("RoutedExperts", [x, index, value, *stacks], attrs)


def _halves(call: Call, name: str, axis: int, fusion: int) -> tuple[str, str]:
    """The two parts of a fused stack."""
    size = call.draft.shape(name)[axis]
    cuts = (
        ((0, size, 2), (1, size, 2)) if fusion == 1 else ((0, size // 2, 1), (size // 2, size, 1))
    )
    first, second = (
        call.emit("Slice", [name], {"axes": (axis,), "starts": (a,), "ends": (b,), "steps": (s,)})
        for a, b, s in cuts
    )
    return first, second
