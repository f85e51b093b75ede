"""What each option of a space's variables cuts over each mesh axis: what the solver `recursive` decides level by level."""

from __future__ import annotations

import numpy as np

from planner.space import Space


def axis_choices(space: Space) -> tuple[np.ndarray, ...]:
    """`_axis_choices`, kept with the space."""
    if "axes" not in space.memo:
        space.memo["axes"] = _axis_choices(space)
    found: tuple[np.ndarray, ...] = space.memo["axes"]
    return found


def _axis_choices(space: Space) -> tuple[np.ndarray, ...]:
    """Per variable [options, axes] which factor (a small integer) each mesh axis cuts, -1 for none: what `recursive` decides level by level."""
    axes = tuple(space.pricer.sizes)
    out = []
    for v in space.variables:
        rows = []
        if v.kind == "op":
            names = {f: k for k, f in enumerate((*space.base.rules[v.node].choices, "+"))}
            for s in v.splits:
                of = {a: names[f] for f, used in s.pairs for a in used}
                rows.append([of.get(a, -1) for a in axes])
        else:
            for hub, branch in v.layouts:
                row = []
                for a in axes:
                    kind, d = hub.state(a)
                    code = d if kind == "sharded" else {"partial": 100, "fan": 101, "replicated": -1}[kind]
                    row.append(code + (200 if branch is not None and a in branch.fan else 0))
                rows.append(row)
        out.append(np.array(rows, np.int64).reshape(len(rows), len(axes)))
    return tuple(out)
