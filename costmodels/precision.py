"""Precision recipes: which type is stored, computed with, reduced and kept by the optimizer, in
bytes per parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter element by role. state_bytes holds the master copy (when there is one:
    master_bytes) and the optimizer's moments.

    matrix_less_bytes: how much of state_bytes a matrix has not that the optimizer orthogonalises.
    compute: the type of products with weights; between: of everything else, and of what operators
    hand to one another. emitted: whether emitted programs compute this way; a recipe that is only
    priced says so wherever it is shown. program: the recipe that emitted programs compute in
    instead, "" where none is near.
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
    moment_bytes: float = 4
    """of an element of one of the optimizer's moments"""
    loss_scaled: bool = False
    """whether gradients need the loss to be scaled to stay within the range of their type"""
    program: str = ""
    matrix_less_bytes: float = 0.0

    @property
    def state_type(self) -> str:
        """The type of the optimizer's moments, and of master copies where there are any."""
        return "float32" if self.moment_bytes == 4 else self.parameter

    @property
    def orthogonalises(self) -> bool:
        """Whether the optimizer takes matrices of hidden layers apart from all else."""
        return self.matrix_less_bytes > 0

    @property
    def orthogonalising_type(self) -> str:
        """The type in which matrices are orthogonalised: bfloat16, but in programs in float32."""
        return "float32" if self.between == "float32" else "bfloat16"

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
        less = f", {self.matrix_less_bytes:g} less in hidden matrices" * self.orthogonalises
        return (
            f"{self.name}: {self.note}; {self.parameter_bytes:g} + {self.gradient_bytes:g} +"
            f" {self.state_bytes:g} = {total:g} bytes a parameter{less}{emitted}"
        )


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
_MIXED = Recipe(
    name="bf16-mixed",
    parameter="bfloat16",
    compute="bfloat16",
    between="bfloat16",
    gradient_bytes=2,
    parameter_bytes=2,
    reduction_bytes=2,
    state_bytes=4,
    emitted=True,
    note="bf16 weights, compute and gradients, float32 master copy and moments",
    master_bytes=4,
)
_EIGHT = replace(
    _MIXED,
    name="fp8",
    compute="float8_e4m3fn",
    note="fp8 products of linear layers, bf16 weights and gradients, float32 master copy and"
    " moments",
)


def _summed_in_float32(recipe: Recipe, note: str) -> Recipe:
    """A recipe whose gradients are kept, added up and sent in float32: Megatron's default in
    bfloat16 (megatron/training/arguments.py, accumulate_allreduce_grads_in_fp32; its
    theoretical_memory_usage.py counts 18 bytes a parameter)."""
    return replace(
        recipe,
        name=f"{recipe.name.removesuffix('-mixed')}-fp32-grads",
        gradient_bytes=4,
        reduction_bytes=4,
        emitted=False,
        program=recipe.name,
        note=note,
    )


_RECIPES = (
    _MIXED,
    Recipe(
        name="fp32",
        parameter="float32",
        compute="float32",
        between="float32",
        gradient_bytes=4,
        parameter_bytes=4,
        reduction_bytes=4,
        state_bytes=0,
        emitted=True,
        note="float32 throughout",
    ),
    replace(
        _MIXED,
        name="bf16-pure",
        state_bytes=0,
        note="bf16 throughout, moments too; no master copy",
        master_bytes=0,
        moment_bytes=2,
    ),
    replace(
        _MIXED,
        name="fp16",
        parameter="float16",
        compute="float16",
        between="float16",
        note="fp16 weights, compute and gradients, dynamic loss scale, float32 master copy and"
        " moments",
        loss_scaled=True,
    ),
    _EIGHT,
    _summed_in_float32(
        _MIXED, "bf16 weights and compute, float32 gradients, master copy and moments"
    ),
    _summed_in_float32(
        _EIGHT,
        "fp8 products of linear layers, bf16 weights, float32 gradients, master copy and moments",
    ),
    Recipe(
        name="int8-weights",
        parameter="int8",
        compute="bfloat16",
        between="bfloat16",
        gradient_bytes=0,
        parameter_bytes=1,
        reduction_bytes=0,
        state_bytes=0,
        emitted=False,
        note="int8 weights, bf16 compute, inference only",
    ),
)
"""Of each recipe what an optimizer without moments keeps; the default first."""


def recipe_names() -> tuple[str, ...]:
    """Known recipes, the default first."""
    return tuple(recipe.name for recipe in _RECIPES)


def load_recipe(name: str, optimizer: str = "adamw", training: bool = True) -> Recipe:
    """The recipe for an optimizer. KeyError for unknown names (the caller suggests); inference
    keeps weights only."""
    recipe = {recipe.name: recipe for recipe in _RECIPES}[name]
    if not training:
        return replace(recipe, gradient_bytes=0, reduction_bytes=0, state_bytes=0, master_bytes=0)
    kept = OPTIMIZERS[optimizer]
    return replace(
        recipe,
        state_bytes=recipe.master_bytes + kept.moments * recipe.moment_bytes,
        matrix_less_bytes=kept.matrix_moments_less * recipe.moment_bytes,
    )


def recipe_in(
    compute: str, precision: str = "", optimizer: str = "adamw", training: bool = True
) -> Recipe:
    """The recipe of a program that computes in `compute`: that of its plan, `precision`, or where
    the plan computes in another type, the usual one of this type with what else the program does.
    """
    usual = {recipe.between: recipe.name for recipe in reversed(_RECIPES)}[compute]
    planned = load_recipe(precision or usual, optimizer, training)
    if planned.between == compute:
        return planned
    return replace(load_recipe(usual, optimizer, training), loss_scaled=planned.loss_scaled)
