"""Topology files and files of pins, which users write, as types. Keys that may be missing are
`NotRequired`."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from planner.support.table_types import Split


class SizeTable(TypedDict):
    """The size of a mesh axis, or a choice of sizes, and the levels of links that it runs over."""

    size: int | list[int]
    level: NotRequired[str | list[str]]


class PinTechniques(TypedDict):
    """Techniques that are fixed."""

    zero_stage: NotRequired[Literal[0, 1, 2, 3]]
    recompute: NotRequired[Literal["none", "block", "block-keep", "full", "selective"]]
    microbatches: NotRequired[int]
    schedule: NotRequired[Literal["1f1b", "gpipe", "interleaved"]]
    virtual: NotRequired[int]
    widths: NotRequired[str | list[int]]
    zero_group: NotRequired[int]
    offload: NotRequired[
        Literal[
            "none",
            "optimizer",
            "activations",
            "optimizer+activations",
            "optimizer+parameters",
            "optimizer+embeddings",
            "optimizer+activations+parameters",
            "optimizer+activations+embeddings",
            "optimizer+parameters+embeddings",
            "optimizer+activations+parameters+embeddings",
        ]
        | list[Literal["optimizer", "activations", "parameters", "embeddings"]]
    ]
    bucket: NotRequired[int | str]
    copies: NotRequired[Literal[1, 2]]
    tensor: NotRequired[Literal["any", "megatron", "megatron-sp"]]


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
