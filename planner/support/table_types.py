"""Types of tables that several of the project's file formats have in common."""

from __future__ import annotations

from typing import TypedDict

Split = dict[str, list[str]]
"""factor -> mesh axes, outermost first"""


class GroupTable(TypedDict):
    """So many devices of one kind, of several that share the work evenly."""

    device: str
    devices: int
