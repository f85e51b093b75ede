"""Sentences about a model or a workload that a user should know, each of a kind that views can
pick."""

from __future__ import annotations

from collections.abc import Iterable

KINDS = (
    "speed",
    "loss",
    "frozen",
    "tie",
    "experts",
    "training",
    "attention",
    "memory",
    "devices",
    "published",
    "range",
    "batch",
    "operators",
    "tables",
    "padding",
    "note",
)
"""From the gravest: a speed that nobody would accept; what changes the training (loss left out,
weights frozen or untied, experts not recognised, layers in evaluation mode); what the plan costs
more than it should, or may not hold; what is good to know."""


TRAINING = frozenset({"loss", "frozen", "tie", "training"})
"""Kinds that say nothing where nothing is trained."""


class Finding(str):
    """A sentence of a kind."""

    kind: str

    def __new__(cls, kind: str, text: str) -> Finding:
        """kind: one of KINDS."""
        finding = super().__new__(cls, text)
        finding.kind = kind
        return finding

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.kind, str(self)


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The gravest first, each once; a kind of a later version last."""
    place = {kind: rank for rank, kind in enumerate(KINDS)}
    return tuple(sorted(dict.fromkeys(findings), key=lambda f: place.get(f.kind, len(KINDS))))
