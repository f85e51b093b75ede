"""The techniques around one solve: what is decided for a whole plan before its splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.execution.plan import Plan
from planner.execution.techniques import STRUCTURAL
from planner.machine.topology import Mesh
from planner.sharding.rule import Split


@dataclass(frozen=True)
class Techniques:
    """Structural choices around one solve. recompute: none | block | block-keep (collective results
    saved) | save:NAMES (planner.execution.save_policies). schedule, virtual_stages: of pipeline
    stages, where the space's mesh has some. microbatches: 0 stands for as many as would hide the
    bubble, in bounds.
    """

    zero_stage: int = 0
    recompute: str = "none"
    microbatches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1

    @classmethod
    def of(cls, plan: Plan) -> Techniques:
        """The techniques of a plan."""
        return cls(**{t.field: getattr(plan, t.field) for t in STRUCTURAL})

    def plan(
        self,
        mesh: Mesh,
        splits: Mapping[str, Split],
        runs: tuple[tuple[int, int, int], ...],
        **others: Any,
    ) -> Plan:
        """The plan of these techniques on a mesh, with its splits and repeated blocks. others:
        fields of Plan that are no structural choice."""
        values = {t.field: getattr(self, t.field) for t in STRUCTURAL if not t.staged}
        if mesh.stages > 1:
            values["schedule"] = self.schedule
        return Plan(
            mesh=mesh.shape,
            splits=splits,
            repeated_blocks=runs,
            zero_axes=mesh.zero_axes,
            virtual_stages=self.virtual_stages,
            **values,
            **others,
        )
