"""Findings: what a user should not miss of a plan, a sentence each, the gravest kind first.

A note of a graph (Graph.notes) is an assumption, unless it is a Finding: then it leaves the assumptions and stands under the plan's figures. What is found of a
whole plan joins in `of_plan`; what a strategy file says by itself (padding, a tight memory) is worked out by planner.report.findings when it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.model import Model

KINDS = ("speed", "loss", "frozen", "tie", "experts", "training", "attention", "memory", "devices", "batch", "operators", "tables", "padding", "note")
"""From the gravest: a speed that nobody would accept; what changes the training (loss left out, weights frozen or untied, experts not recognised, layers in
evaluation mode); what the plan costs more than it should, or may not hold; what is good to know."""
TRAINING = frozenset({"loss", "frozen", "tie", "training"})
"""Kinds that say nothing where nothing is trained."""


class Finding(str):
    """A sentence of a kind."""

    kind: str

    def __new__(cls, kind: str, text: str) -> Finding:
        """kind: one of KINDS."""
        made = super().__new__(cls, text)
        made.kind = kind
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.kind, str(self)


def of_plan(model: Model) -> tuple[Finding, ...]:
    """What is found when a plan is put together."""
    return ordered(note for note in model.plain.notes if isinstance(note, Finding))


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The gravest first, each once; a kind of a later version last."""
    place = {kind: at for at, kind in enumerate(KINDS)}
    return tuple(sorted(dict.fromkeys(findings), key=lambda f: place.get(f.kind, len(KINDS))))


def rows(findings: Iterable[Finding]) -> tuple[Mapping[str, Any], ...]:
    """As strategy files keep them."""
    return tuple({"kind": f.kind, "text": str(f)} for f in findings)
