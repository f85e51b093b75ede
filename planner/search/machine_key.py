"""The cache key of the tables that all searches on one machine share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from planner.cache.keys import digest, program

if TYPE_CHECKING:
    from planner.search.request import Request
from planner.cache.reshard_tables import FORMAT


def machine_key(request: Request) -> str:
    """What all tables of a search share: the program and the machine, as the runtime uses its
    links. Sizes of buckets are in no table."""
    return digest(
        ("tables", FORMAT, program(), request.topology, replace(request.runtime, bucket_bytes=0.0))
    )
