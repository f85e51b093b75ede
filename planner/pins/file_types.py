"""Topology files and files of pins, which users write, as types. Keys that may be missing are
`NotRequired`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from planner.execution.techniques import TECHNIQUES
from planner.support.table_types import Split


class SizeTable(TypedDict):
    """The size of a mesh axis, or a choice of sizes, and the levels of links that it runs over."""

    size: int | list[int]
    level: NotRequired[str | list[str]]


if TYPE_CHECKING:
    PinTechniques = dict[str, Any]
else:
    PinTechniques = TypedDict(
        "PinTechniques", {t.name: NotRequired[t.pin_type] for t in TECHNIQUES if t.pin_type}
    )
    PinTechniques.__doc__ = "Techniques that are fixed."


class ForbidTable(TypedDict):
    """What no split may cut."""

    factors: NotRequired[list[str]]


class NodePin(TypedDict):
    """The split of nodes, or the layout of their first result; the key is an id, a tensor, a scope
    or a glob of these."""

    split: NotRequired[Split]
    layout: NotRequired[list[list[str]]]


class PinsFile(TypedDict):
    """A file of pins; other keys are pins of nodes."""

    mesh: NotRequired[dict[str, int | list[int] | SizeTable]]
    techniques: NotRequired[PinTechniques]
    forbid: NotRequired[ForbidTable]
