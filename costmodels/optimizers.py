"""Optimizers: what each keeps beside a parameter. Its update is a file of emitted programs,
planner/emit/runtime/step/NAME.py."""

from __future__ import annotations

from dataclasses import dataclass

MOMENT_BYTES = 4
"""Of an element: moments are float32 whatever parameters are."""


@dataclass(frozen=True)
class Optimizer:
    """moments: arrays of a parameter's shape that it keeps from step to step. counts_steps: its
    update reads the number of the step (to correct moments that begin at zero)."""

    moments: int
    counts_steps: bool

    @property
    def moment_bytes(self) -> int:
        """Bytes of moments per parameter."""
        return MOMENT_BYTES * self.moments


OPTIMIZERS = {
    "adamw": Optimizer(moments=2, counts_steps=True),
    "lion": Optimizer(moments=1, counts_steps=False),
    "sgd": Optimizer(moments=0, counts_steps=False),
}
"""By name, the default first."""
