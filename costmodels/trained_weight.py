"""What a weight that trains takes of a device under each ZeRO stage.

With p, g and s the bytes of a parameter, of a gradient and of the optimizer's state an element, w
the elements of the weight as its operators read it, and c those of one device's piece where the
ZeRO stage cuts it over the devices with equal weights:

    ZeRO stage                           0          1          2          3
    parameters between steps           p w        p w        p w        p c
    gradient of one microbatch         g w        g w        g w        g c
    sum of it over microbatches        g w        g w        g c        none: it is the gradient
    optimizer's state                  s w        s c        s c        s c

A program without a loop over blocks has no array that holds all gradients of a microbatch: they
come and go (`costmodels.liveness`), and the sum is an array of its own under stage 3 too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from costmodels.kernels import Amount
from costmodels.precision import Recipe


@dataclass(frozen=True)
class TrainedWeight(Generic[Amount]):
    """Elements that a device has of one weight (numbers), or of several (arrays).

    whole: as its operators read it. piece: of the optimizer's state. zero_stage: that of the weight
    itself, 0 where no dim of it can be cut. matrices: of the piece, what lies in matrices that the
    optimizer orthogonalises: all of it or nothing.
    """

    whole: Amount
    piece: Amount
    zero_stage: int
    matrices: Amount | float = 0.0

    @property
    def stored(self) -> Amount:
        """Elements of the parameter between steps, and of its gradient after a microbatch."""
        return self.piece if self.zero_stage == 3 else self.whole

    @property
    def summed(self) -> Amount:
        """Elements of the sum of gradients over microbatches."""
        return self.piece if self.zero_stage >= 2 else self.whole

    def gradient_bytes(self, recipe: Recipe, *, looped: bool) -> Amount:
        """Bytes of a microbatch's gradient that are there at the end of its backward pass. looped:
        whether a loop over blocks fills arrays with them."""
        return self.stored * (recipe.gradient_bytes if looped else 0.0)

    def accumulator_bytes(self, recipe: Recipe, *, looped: bool) -> Amount:
        """Bytes of the sum of gradients over several microbatches, beside `gradient_bytes`."""
        return self.summed * (0.0 if self.zero_stage == 3 and looped else recipe.gradient_bytes)

    def optimizer_bytes(self, recipe: Recipe) -> Amount:
        """Bytes of the optimizer's state."""
        return self.piece * recipe.state_bytes - self.matrices * recipe.matrix_less_bytes

    def loop_copies(self, recipe: Recipe) -> tuple[Amount, Amount]:
        """Bytes that a loop over blocks cuts out of stacks at a time, the parameter, and those that
        it puts into them, its gradient. A gradient that is scattered after the loop is put in
        whole."""
        return self.stored * recipe.parameter_bytes, self.stored * recipe.gradient_bytes

    def remaining_bytes(self, recipe: Recipe) -> Amount:
        """Bytes of what is left of the reduced gradient until the end of the step: of ZeRO stages 1
        and 2 the new weight, waiting to be gathered."""
        return (
            self.piece
            * (0.0, recipe.parameter_bytes, recipe.parameter_bytes, recipe.gradient_bytes)[
                self.zero_stage
            ]
        )
