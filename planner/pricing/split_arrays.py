"""Splits of one rule as arrays: into how many pieces each cuts every factor, and what share of the
work a device has of each, so that all splits of an operator are priced together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from costmodels.precision import Recipe
from planner.execution.eight_bit import eight_bit
from planner.graph.ir import Graph
from planner.sharding.layout import Axes, group
from planner.sharding.rule import Rule, Split

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class SplitArrays:
    """Splits of one rule on one mesh. parts: choice of the rule -> into how many pieces each split
    cuts it [splits]; choices that none cuts are left out."""

    splits: Sequence[Split]
    parts: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, splits: Sequence[Split], mesh: Mapping[str, int]) -> SplitArrays:
        """Read off the splits; choices by name, as in each of them."""
        return cls.at(splits, cls.axes(splits), mesh)

    @staticmethod
    def axes(splits: Sequence[Split]) -> dict[str, tuple[tuple[Axes, ...], np.ndarray]]:
        """Name -> each choice that some split cuts: the ways to, and which of them is each split's
        [splits]."""
        result: dict[str, tuple[dict[Axes, int], list[int]]] = {}
        for k, split in enumerate(splits):
            for choice, axes in split.pairs:
                if choice not in result:
                    result[choice] = {(): 0}, [0] * len(splits)
                ways, which = result[choice]
                which[k] = ways.setdefault(axes, len(ways))
        return {
            choice: (tuple(ways), np.array(which))
            for choice, (ways, which) in sorted(result.items())
        }

    @classmethod
    def at(
        cls,
        splits: Sequence[Split],
        axes: Mapping[str, tuple[tuple[Axes, ...], np.ndarray]],
        mesh: Mapping[str, int],
    ) -> SplitArrays:
        """The arrays of splits on one mesh. axes: of these splits."""
        return cls(
            splits,
            {
                choice: np.array([group(way, mesh) for way in ways])[which]
                for choice, (ways, which) in axes.items()
            },
        )

    def share(self, rule: Rule, without: str = "") -> np.ndarray:
        """What part of all index tuples of the rule's factors one device has, padding included;
        `without` a factor. [splits]"""
        share = np.ones(len(self.splits))
        for f, parts in self.parts.items():
            n = rule.sizes.get(f)
            if f in rule.paired:  # even, and the work is divided once
                share /= parts
            elif n and f != without:
                share *= -(-n // parts) * parts / parts / n
        return share

    def local(self, rule: Rule) -> dict[str, np.ndarray | int]:
        """Size of each factor that a device works through, padding included: as `Rule.work`.
        [splits]"""
        sizes: dict[str, np.ndarray | int] = dict(rule.sizes)
        for choice, parts in self.parts.items():
            if (f := rule.members(choice)[0]) in sizes:
                sizes[f] = -(-sizes[f] // parts)
        return sizes


def program_type(graph: Graph, i: int, recipe: Recipe) -> str:
    """The type that a node of an emitted program computes with: that of products where it is a
    linear layer in float8, else that of what lies between them."""
    node = graph.nodes[i]
    if not graph.tensors[node.outputs[0] or next(o for o in node.outputs if o)].is_float:
        return "float32"
    short = recipe.compute != recipe.between and i in eight_bit(graph)
    return recipe.compute if short else recipe.between


def compute_type(graph: Graph, i: int, recipe: Recipe) -> str:
    """The type that a node of a framework's program computes with: that of products where weights
    are multiplied (linear layers, experts), else that of what lies between them."""
    node = graph.nodes[i]
    if not graph.tensors[node.outputs[0] or next(o for o in node.outputs if o)].is_float:
        return "float32"
    return recipe.between if graph.weights.keys().isdisjoint(node.inputs) else recipe.compute
