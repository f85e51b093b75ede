"""Precision recipes: which type is stored, computed with, reduced and kept by the optimizer, in
bytes per parameter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter element by role. state_bytes holds the master copy (when there is one:
    master_bytes) and the optimizer's moments.

    compute: the type of products with weights; between: of everything else, and of what operators
    hand to one another. emitted: whether emitted programs compute this way; a recipe that is only
    priced says so wherever it is shown.
    """

    name: str
    parameter: str
    compute: str
    between: str
    gradient_bytes: float
    parameter_bytes: float
    reduction_bytes: float
    state_bytes: float
    emitted: bool
    note: str
    master_bytes: float = 0.0

    def describe(self) -> str:
        """One line for people; of inference, what inference keeps."""
        if not self.gradient_bytes and not self.state_bytes:
            kept, compute = (_SHORT.get(t, t) for t in (self.parameter, self.compute))
            return (
                f"{self.name}: {kept} weights, {compute} compute; {self.parameter_bytes:g} bytes a"
                " parameter" + ("" if self.emitted else "; priced, not emitted")
            )
        total = self.parameter_bytes + self.gradient_bytes + self.state_bytes
        emitted = "" if self.emitted else "; priced, not emitted"
        return (
            f"{self.name}: {self.note}; {self.parameter_bytes:g} + {self.gradient_bytes:g} +"
            f" {self.state_bytes:g} = {total:g} bytes a parameter{emitted}"
        )


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
_MOMENTS = {"adamw": 8, "sgd": 0}
_RECIPES = {
    # name: (parameter, compute, parameter bytes, gradient bytes, reduction bytes, master copy
    # bytes, emitted, note)
    "bf16-mixed": (
        "bfloat16",
        "bfloat16",
        2,
        2,
        2,
        4,
        True,
        "bf16 weights, compute and gradients, float32 master copy and moments",
    ),
    "fp32": ("float32", "float32", 4, 4, 4, 0, True, "float32 throughout"),
    "bf16-pure": ("bfloat16", "bfloat16", 2, 2, 2, 0, False, "bf16 throughout, moments in float32"),
    "fp16": (
        "float16",
        "float16",
        2,
        2,
        2,
        4,
        False,
        "fp16 weights and compute, float32 master copy and moments",
    ),
    "fp8": (
        "bfloat16",
        "float8_e4m3fn",
        2,
        2,
        2,
        4,
        False,
        "fp8 products, bf16 weights, float32 master copy and moments",
    ),
    "int8-weights": (
        "int8",
        "bfloat16",
        1,
        0,
        0,
        0,
        False,
        "int8 weights, bf16 compute, inference only",
    ),
}
OPTIMIZERS = tuple(_MOMENTS)


def recipe_names() -> tuple[str, ...]:
    """Known recipes, the default first."""
    return tuple(_RECIPES)


def load_recipe(name: str, optimizer: str = "adamw", training: bool = True) -> Recipe:
    """The recipe for an optimizer. KeyError for unknown names (the caller suggests); inference
    keeps weights only."""
    parameter, compute, weight, gradient, reduction, master, emitted, note = _RECIPES[name]
    state = master + _MOMENTS[optimizer]
    if not training:
        gradient = reduction = state = 0
    return Recipe(
        name,
        parameter,
        compute,
        "bfloat16" if compute == "float8_e4m3fn" else compute,
        gradient,
        weight,
        reduction,
        state,
        emitted,
        note,
        master if training else 0,
    )
