"""TODO."""

from __future__ import annotations

import hashlib


def key_of(*parts: bytes) -> bytes:
    """The key of a table that follows from these parts."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()
