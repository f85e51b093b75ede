"""Optimizers: what each keeps beside a parameter. Its update is a file of emitted programs,
planner/emit/runtime/step/NAME.py."""

from __future__ import annotations

from dataclasses import dataclass

MOMENT_BYTES = 4
"""Of an element: moments are float32 whatever parameters are."""
NEWTON_SCHULZ_STEPS = 5
"""Of Muon, in which a matrix is brought near the orthogonal one (Keller Jordan, "Muon: an optimizer
for hidden layers in neural networks", 2024; optax.contrib.muon's default)."""


@dataclass(frozen=True)
class Optimizer:
    """moments: arrays of a parameter's shape that it keeps from step to step. counts_steps: its
    update reads the number of the step (to correct moments that begin at zero). matrix_moments:
    moments of the matrices that it orthogonalises, which it keeps fewer of; None where it
    orthogonalises none."""

    moments: int
    counts_steps: bool
    matrix_moments: int | None = None

    @property
    def moment_bytes(self) -> int:
        """Bytes of moments per parameter."""
        return MOMENT_BYTES * self.moments

    @property
    def orthogonalises(self) -> bool:
        """Whether the optimizer takes matrices of hidden layers apart from all else."""
        return self.matrix_moments is not None

    @property
    def matrix_moments_less(self) -> int:
        """How many moments fewer such a matrix has."""
        return 0 if self.matrix_moments is None else self.moments - self.matrix_moments


OPTIMIZERS = {
    "adamw": Optimizer(moments=2, counts_steps=True),
    "lion": Optimizer(moments=1, counts_steps=False),
    "sgd": Optimizer(moments=0, counts_steps=False),
    "muon": Optimizer(moments=2, counts_steps=True, matrix_moments=1),
}
"""By name, the default first."""
DEFAULT_OPTIMIZER = next(iter(OPTIMIZERS))
