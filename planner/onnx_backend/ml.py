"""The ai.onnx.ml operators that work on tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.onnx_backend.table import Call, Refused, Value, as_array, handles

ML = "ai.onnx.ml"


@handles("ArrayFeatureExtractor", domain=ML)
def features(call: Call) -> Value:
    """Columns of the last dim."""
    return as_array(call.get(0))[..., as_array(call.get(1)).reshape(-1)]


@handles("Binarizer", domain=ML)
def binarize(call: Call) -> Value:
    """One above a threshold, else zero."""
    x = as_array(call.get(0))
    return (x > call.attr("threshold", 0.0)).astype(x.dtype)


def _side(call: Call, stem: str) -> tuple[list[Any], np.dtype] | None:
    from onnx import numpy_helper

    for name, dtype in (
        (f"{stem}_int64s", np.int64),
        (f"{stem}_floats", np.float32),
        (f"{stem}_strings", object),
    ):
        if name in call.attrs:
            return list(call.attrs[name]), np.dtype(dtype)
    if f"{stem}_tensor" in call.attrs:
        values = numpy_helper.to_array(call.attrs[f"{stem}_tensor"])
        return values.reshape(-1).tolist(), values.dtype
    return None


@handles("LabelEncoder", domain=ML)
def encode(call: Call) -> Value:
    """Each element looked up in a table; those it lacks become a default."""
    from onnx import numpy_helper

    x, keys, values = as_array(call.get(0)), _side(call, "keys"), _side(call, "values")
    if keys is None or values is None:
        raise Refused("a LabelEncoder without keys and values")
    dtype = values[1]
    if "default_tensor" in call.attrs:
        default: Any = numpy_helper.to_array(call.attr("default_tensor")).reshape(-1)[0]
    elif dtype.kind == "O":
        default = call.attr("default_string", "_Unused")
    else:
        default = (
            call.attr("default_int64", -1)
            if dtype.kind == "i"
            else call.attr("default_float", -0.0)
        )
    table = dict(zip((_key(k) for k in keys[0]), values[0], strict=True))
    encoded = np.empty(x.size, dtype)
    encoded[:] = [table.get(_key(v), default) for v in x.reshape(-1).tolist()]
    return encoded.reshape(x.shape)


def _key(value: Any) -> Any:
    """NaN is equal to itself here."""
    return "nan-key" if isinstance(value, float) and np.isnan(value) else value


_COMPARE = {
    0: np.less_equal,
    1: np.less,
    2: np.greater_equal,
    3: np.greater,
    4: np.equal,
    5: np.not_equal,
}


@handles("TreeEnsemble", domain=ML, since=5)
def trees(call: Call) -> Value:
    """Trees as arrays of nodes; each sample adds one leaf's weight per tree to a target."""
    from onnx import numpy_helper

    x = as_array(call.get(0))
    get = lambda name: numpy_helper.to_array(call.attr(name))  # noqa: E731
    modes, splits = get("nodes_modes"), get("nodes_splits")
    features, yes, no = (
        call.attr(f"nodes_{k}") for k in ("featureids", "truenodeids", "falsenodeids")
    )
    yes_leaf, no_leaf = call.attr("nodes_trueleafs"), call.attr("nodes_falseleafs")
    targets, weights = call.attr("leaf_targetids"), get("leaf_weights")
    members: list[set[float]] = [set()]
    if "membership_values" in call.attrs:
        for v in get("membership_values").tolist():
            members[-1].add(v) if not np.isnan(v) else members.append(set())
    member_set = np.cumsum(modes == 6) - (modes == 6)
    missing = call.attr("nodes_missing_value_tracks_true", [0] * len(modes))
    totals: list[list[list[float]]] = [[[] for _ in range(call.attr("n_targets"))] for _ in x]
    for sample, row in zip(totals, x, strict=True):
        for root in call.attr("tree_roots"):
            node, leaf = root, False
            while not leaf:
                v = row[features[node]]
                holds = (
                    v in members[member_set[node]]
                    if modes[node] == 6
                    else bool(_COMPARE[int(modes[node])](v, splits[node]))
                )
                holds = holds or bool(missing[node] and np.isnan(v))
                leaf, node = (
                    (bool(yes_leaf[node]), yes[node]) if holds else (bool(no_leaf[node]), no[node])
                )
            sample[targets[node]].append(float(weights[node]))
    join: Any = {0: np.mean, 1: np.sum, 2: np.min, 3: np.max}[
        int(call.attr("aggregate_function", 1))
    ]
    scores = np.asarray([[join(v) if v else 0.0 for v in sample] for sample in totals], x.dtype)
    if call.attr("post_transform", 0) != 0:
        raise Refused("a post-transform of scores")
    return scores
