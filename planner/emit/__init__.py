"""Emission: a Strategy and a Graph in, a program's text out.

`planner.emit(strategy, model)` is the public function, and this package its room: the module is
made callable so that both names hold.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any


class _Emit(types.ModuleType):
    def __call__(
        self, strategy: Any, source: str | Path, *, backend: str = "shard_map", unroll: bool = False
    ) -> str:
        """Source text of the program of a strategy: see `planner.emit.from_strategy.emit`."""
        from planner.emit.from_strategy import emit

        return emit(strategy, source, backend=backend, unroll=unroll)


sys.modules[__name__].__class__ = _Emit
