"""A few constants of what a framework's kernels keep, fitted to which runs ran and which ran out of
memory.

    minimise   - sum over rows of log(e + (1 - e) P(row))  +  1/2 sum over constants of ((constant -
               count) / width)^2
    P(ran out) = 1 / (1 + exp(-log(priced / usable) / s))

Each starts from a count of the tensors that have to be kept, and stays near it. e: a run may fail,
or pass, for reasons that no model has. What is reported for a row comes from a fit that has not
seen its group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from costmodels.frameworks.peak_memory import peak
from costmodels.runtimes import Runtime
from planner.calibrate.runs.fit import Prepared
from planner.calibrate.runs.rows import Case

COUNTS = {
    "overhead_gb": (0.6, 0.18),
    "memory_slack": (0.03, 0.018),
    "pipeline_slack": (0.0, 0.024),
    "pinned": (0.0, 0.18),
    "fused norm": (2.0, 0.36),
    "eager norm": (6.0, 0.9),
    "logit_kept": (16.0, 1.2),
    "logit_gathered": (4.0, 1.2),
    "fused scores": (4.0, 0.9),
    "eager scores": (6.0, 0.6),
}
"""Constant -> (count, width). Logits: as they come (2 bytes) and those of the microbatch before
(2), whose buffer is written over only later, the logarithm of their softmax in float32 (4), its
gradient (4) and theirs (4); gathered ones once as a list and once put together. Scores without a
fused kernel: probabilities in float32 (4) and in bf16 (2). Norms in multiples of their result:
operand and result, eager ones also float32 copies. The framework's code was published later
(Aleph-Alpha/scaling: `cross_entropy.py`, `buffers.py`, `masked_softmax.py`), so what is counted in
it is sure to about a tenth."""
SCALES = (0.05, 0.035, 0.025, 0.025)
"""s of the rounds: wide first, so that rows far from the limit pull too; no sharper than prices of
groups left out are (standard deviation 4 to 5 %, 1.8 s)."""
ROUNDS = 5
ODD = 0.02
"""e."""
FAR = 0.5
"""Rows whose price is this far (in log) from the limit say nothing about the constants."""


def applied(runtime: Runtime, constants: Sequence[float]) -> Runtime:
    """A profile with constants in the order of COUNTS."""
    by_name, kernels = dict(zip(COUNTS, constants, strict=True)), runtime.kernels
    assert kernels is not None
    norm = by_name["eager norm" if kernels.passes["norm"][0] > 4 else "fused norm"]
    scores = (
        by_name["eager scores" if kernels.score_bytes[0] > 20 else "fused scores"]
        if not kernels.flash
        else 0.0
    )
    kernels = replace(
        kernels,
        saved={**kernels.saved, "norm": norm},
        logit_saved=by_name["logit_kept"],
        logit_gathered=by_name["logit_gathered"],
        score_saved=scores,
    )
    return replace(
        runtime,
        kernels=kernels,
        overhead_bytes=by_name["overhead_gb"] * 1e9,
        memory_slack=by_name["memory_slack"],
        pipeline_slack=by_name["pipeline_slack"],
        pinned=by_name["pinned"],
    )


def priced_bytes(rows: Sequence[Prepared], constants: Sequence[float]) -> list[int]:
    """Peak bytes of each row, of frameworks all, under constants in the order of COUNTS."""
    pairs = [(row.memory, applied(row.case.runtime, constants)) for row in rows]
    return [peak(memory, runtime).total for memory, runtime in pairs if memory is not None]


def fitted_constants(rows: Sequence[Prepared]) -> list[float]:
    """The constants, in the order of COUNTS, that tell best which rows ran."""
    counts, widths = (np.array(x, float) for x in zip(*COUNTS.values(), strict=True))
    limit = np.log([row.case.usable_bytes for row in rows])
    near = np.abs(np.log(priced_bytes(rows, list(counts))) - limit) < FAR
    rows = [row for row, is_near in zip(rows, near, strict=True) if is_near]
    limit, side = limit[near], np.array([-1.0 if row.case.measured_s else 1.0 for row in rows])

    def margins(constants: np.ndarray) -> np.ndarray:
        return side * (np.log(priced_bytes(rows, list(constants))) - limit)

    def loss(constants: np.ndarray, scale: float) -> float:
        right = 1 / (1 + np.exp(np.clip(-margins(constants) / scale, -60, 60)))
        return float(
            -np.log(ODD + (1 - ODD) * right).sum()
            + 0.5 * (((constants - counts) / widths) ** 2).sum()
        )

    theta = counts
    for scale in SCALES:
        best = loss(theta, scale)
        for _ in range(ROUNDS):
            now = margins(theta)
            slopes = (
                np.stack(
                    [
                        (margins(theta + 0.1 * width * step) - now) / (0.1 * width)
                        for step, width in zip(np.eye(len(widths)), widths, strict=True)
                    ],
                    1,
                )
                / scale
            )
            right = 1 / (1 + np.exp(np.clip(-now / scale, -60, 60)))
            pull = (1 - ODD) * right * (1 - right) / (ODD + (1 - ODD) * right)
            normal = (slopes * (right * (1 - right))[:, None]).T @ slopes + np.diag(widths**-2.0)
            way = np.linalg.solve(normal, slopes.T @ pull - (theta - counts) / widths**2)
            tries = [np.maximum(theta + share * way, 0.0) for share in (1.0, 0.3, 0.1)]
            losses = [loss(x, scale) for x in tries]
            if min(losses) >= best - 1e-3:
                break
            best, theta = min(losses), tries[int(np.argmin(losses))]
    return [float(x) for x in theta]


def held_out_bytes(rows: Sequence[Prepared], group: Callable[[Case], Hashable]) -> list[int]:
    """Per row the bytes priced under constants fitted to the other groups' rows."""
    row_bytes = [0] * len(rows)
    for left_out in dict.fromkeys(group(row.case) for row in rows):
        constants = fitted_constants([row for row in rows if group(row.case) != left_out])
        mine = [k for k, row in enumerate(rows) if group(row.case) == left_out]
        for k, size in zip(mine, priced_bytes([rows[k] for k in mine], constants), strict=True):
            row_bytes[k] = size
    return row_bytes
