"""What blocks of published TPU recipes save, where rows of results do not say: what
costmodels/runtimes/tpu_recipes.toml has of them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from costmodels.runtimes import FOLDER

Row = Mapping[str, Any]
FILE: Path = FOLDER / "tpu_recipes.toml"
UNTOLD = "tensor-level"
"""A word of a row's policy that names no value: "custom (tensor-level save and offload)"."""


@dataclass(frozen=True)
class TpuRecipe:
    """One table of the file. source, model, precision: parts of a row's words; seq, chips: 0 for
    any; the rest as the file's head says."""

    source: str
    model: str
    seq: int = 0
    chips: int = 0
    precision: str = ""
    saved: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    inputs: bool = False
    attention: str = ""
    weights: str = "float32"

    def made(self, row: Row) -> bool:
        """Whether a row is a run of it."""
        return (
            self.source in str(row["source"])
            and self.model in str(row["model"]).lower().replace(" ", "-")
            and self.seq in (0, int(row.get("seq") or 0))
            and self.chips in (0, int(row.get("devices") or 0))
            and self.precision in str(row.get("precision") or "bf16")
        )


@cache
def _tables() -> dict[str, Any]:
    with FILE.open("rb") as file:
        return tomllib.load(file)


def tokamax() -> tuple[float, float]:
    """What Tokamax's attention reaches of peak, forward and backward (the file)."""
    reached = _tables()["tokamax"]
    return float(reached["forward"]), float(reached["backward"])


@cache
def tpu_recipes() -> tuple[TpuRecipe, ...]:
    """The recipes of tpu-recipes that are known, in the order of the file, in which the narrower of
    two comes first."""
    lists = ("saved", "away")
    return tuple(
        TpuRecipe(**table | {k: tuple(table.get(k, ())) for k in lists})
        for table in _tables()["recipe"]
    )


def tpu_recipe_of(row: Row) -> TpuRecipe | None:
    """The recipe of a row of tpu-recipes that does not say itself what its blocks save."""
    policy = str(row.get("remat_policy") or "")
    if "tpu-recipes" not in str(row["source"]) or (policy and UNTOLD not in policy):
        return None
    return next((recipe for recipe in tpu_recipes() if recipe.made(row)), None)
