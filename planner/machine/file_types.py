"""The types of a topology file's tables, as TOML gives them."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from planner.support.table_types import GroupTable


class TopologyLevel(TypedDict):
    """One [[level]] of a topology file; quantities with their units ("450 GB/s", "2 us"). A torus
    has `shape` instead of `size`."""

    name: NotRequired[str]
    size: NotRequired[int]
    shape: NotRequired[list[int]]
    kind: NotRequired[Literal["switch", "mesh", "torus"]]
    wrap: NotRequired[bool]
    bandwidth: str
    latency: str
    efficiency: NotRequired[float]
    all_reduce_bandwidth: NotRequired[str]
    all_reduce_latency: NotRequired[str]
    source: NotRequired[str]


class TopologyFile(TypedDict):
    """A topology file: a device, or groups of several, and the levels of links that join as many,
    innermost first."""

    device: NotRequired[str]
    group: NotRequired[list[GroupTable]]
    aliases: NotRequired[list[str]]
    level: list[TopologyLevel]
    summary: NotRequired[str]
    date: NotRequired[str]
