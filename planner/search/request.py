"""What a search is asked, and what it finds.

Plans that fit with the upper end of their memory range go before those that do not, unless one of
these is faster by more than the range of its step time is wide. Among either kind plans within a
thousandth are ties: less memory first (by more than a hundredth), then the simpler mesh and
techniques.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from costmodels.capacity import Capacity
from costmodels.precision import Recipe
from costmodels.runtimes import Runtime
from planner.analysis.facts import GraphFacts
from planner.cache.folder import Cache
from planner.execution.plan import Plan
from planner.execution.techniques import (
    BY_NAME,
    TECHNIQUES,
    WRITTEN_OUT,
    contradiction,
    recompute_rank,
)
from planner.graph.findings import Finding
from planner.machine.topology import Mesh, Topology
from planner.pins.launcher_space import LauncherSpace
from planner.pins.pins import Pins
from planner.pricing.bucketing import OPEN
from planner.pricing.cost import Cost
from planner.pricing.written_out import LONGEST
from planner.solvers.problem import Problem
from planner.space.propagation import MODES
from planner.space.techniques import Techniques
from planner.space.variables import Space

TIE, TIE_MEMORY = 1e-3, 1e-2
Progress = Callable[[str, float | None, float | None], None]
"""Told (what is done, best seconds so far, bound)."""


@dataclass(frozen=True)
class Request:
    """Everything a search needs to know beside the model."""

    topology: Topology
    capacity: Capacity
    recipe: Recipe
    runtime: Runtime
    solver: str = "auto"
    mode: str = "auto"
    objective: str = "step"
    pins: Pins = field(default_factory=Pins)
    launcher: LauncherSpace | None = None
    """The launcher whose plans alone are searched; its degrees are part of the pins."""
    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    seed: int = 0
    fold: bool = True
    baselines: bool = True
    partitioned: bool = False
    """Whether the program is one whose collectives the compiler's partitioner places (jit): such
    have no pipeline stages, no copies, and nothing in the host's memory."""
    offload: tuple[str, ...] = ()
    """What waits in the host's memory in every plan of the search
    (planner.execution.techniques.OFFLOAD)."""
    blocks: str | None = None
    """How the programs of all plans run their blocks, where that is settled and not pinned
    (planner.execution.techniques)."""
    cache: Cache | None = field(default=None, compare=False, repr=False)
    """Where answers are kept and looked for (planner.search.cache_entry); it changes none."""
    incremental: bool = field(default=False, compare=False)
    """Whether what was decided for most of a model before may stay (planner.search.incremental). No
    part of a key: where all was searched before, that is the answer."""

    @property
    def bucket(self) -> int | str:
        """Bytes that collectives are sent together up to in every plan of the search;
        planner.pricing.bucketing.AUTO or OPEN for a choice, 0 for the compiler's own."""
        opened = (
            self.runtime.stacked and self.topology.device.kind == "gpu" and self.mode not in MODES
        )
        bucket: int | str = self.pins.techniques.get("bucket", OPEN if opened else 0)
        return bucket

    @property
    def only_blocks(self) -> str | None:
        """How all plans of the search run their blocks; None where that is open."""
        pinned: str | None = self.pins.techniques.get("blocks")
        return pinned or self.blocks

    @property
    def staged_pin(self) -> str:
        """The first pinned technique that only plans with pipeline stages have, as it is typed; ""
        where there is none."""
        techniques = self.pins.techniques
        return next(
            (
                f"{t.name} = {techniques[t.name]!r}"
                for t in TECHNIQUES
                if t.staged and t.among(techniques) != t.neutral
            ),
            "",
        )

    @property
    def written_out_up_to(self) -> int:
        """Operators of models whose plans may have their blocks written out."""
        if self.only_blocks is not None:
            return sys.maxsize if self.only_blocks == WRITTEN_OUT else 0
        pinned = {**self.pins.techniques, "blocks": WRITTEN_OUT}
        opened = (
            self.runtime.stacked
            and self.topology.device.kind == "gpu"
            and self.mode not in MODES
            and contradiction(pinned, self.pins.mesh) is None
        )
        return LONGEST if opened else 0

    @property
    def copies(self) -> int:
        """Microbatches that run at the same time in every plan of the search; 0 where that is
        open."""
        return int(self.pins.techniques.get("copies", 0))

    @property
    def widths(self) -> tuple[int, ...]:
        """Pinned: places of the mesh that each pipeline stage takes, () where the search finds
        them."""
        return tuple(BY_NAME["widths"].among(self.pins.techniques))

    @property
    def limit_bytes(self) -> int:
        """Bytes a plan may use on a device."""
        usable = self.capacity.usable
        return usable if self.memory_limit_bytes is None else min(usable, self.memory_limit_bytes)

    @property
    def roomy_bytes(self) -> int:
        """Bytes a plan may be priced at so that the upper end of its printed range fits, too
        (`fit`: yes); the limit itself where the least memory is asked for."""
        limit, upper_share = self.limit_bytes, self.runtime.memory_spread[1]
        return (
            limit
            if self.objective == "memory"
            else next(
                n
                for n in range(int((limit + 1) / (1 + upper_share)) + 1, 0, -1)
                if int(n * (1 + upper_share)) <= limit
            )
        )

    def roomy(self, cost: Cost) -> bool:
        """Whether a plan fits with the upper end of its range."""
        return cost.memory.total <= self.roomy_bytes


@dataclass(frozen=True)
class Candidate:
    """A priced plan, and what its solver claims about the problem it came from."""

    label: str
    mesh: Mesh
    plan: Plan
    cost: Cost
    techniques: Techniques
    objective_s: float = 0.0
    bound_s: float = 0.0
    status: str = "feasible"

    def key(self, request: Request) -> tuple:
        """Order among plans that fit: the objective in steps of a tie, then memory in steps of its
        own, then the simpler mesh and techniques."""
        main = self.cost.memory.total if request.objective == "memory" else self.cost.step_time_s
        simple = (self.plan.zero_stage, recompute_rank(self.plan.recompute), self.plan.microbatches)
        size = self.cost.memory.total
        return (
            round(np.log(max(main, 1e-12)) / TIE),
            round(np.log(max(size, 1)) / TIE_MEMORY),
            len(self.plan.mesh),
            simple,
            size,
            self.plan.mesh,
        )


@dataclass(frozen=True)
class ReusedPlan:
    """What an answer keeps of a search before (planner.search.incremental). name, date: of the
    model that was planned then, and when; kept, solved: operators of this model."""

    name: str
    date: str
    kept: int
    solved: int

    def to_json(self) -> dict[str, str | int]:
        """As in a strategy's provenance."""
        return {"model": self.name, "date": self.date, "kept": self.kept, "solved": self.solved}


@dataclass(frozen=True)
class Covered:
    """Plans that a bound holds for: those on these meshes with these numbers of microbatches.

    meshes: sizes of their axes, outermost first, `8x8`, stages before a bar, `4|8x8`. all_splits:
    whether every split that pins and mode leave was among them, or those that cut only what plans
    found before cut. What no such plan has, docs/how-a-plan-is-chosen.md lists.
    """

    meshes: tuple[str, ...]
    microbatches: tuple[int, ...]
    all_splits: bool

    def to_json(self) -> dict[str, Any]:
        """As in a strategy's `solver.covers`."""
        return {
            "meshes": list(self.meshes),
            "microbatches": list(self.microbatches),
            "splits": "all" if self.all_splits else "some",
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Covered:
        """The row that `to_json` made; anything else is a KeyError, TypeError or ValueError."""
        if not all(isinstance(m, str) for m in row["meshes"]) or row["splits"] not in (
            "all",
            "some",
        ):
            raise ValueError(row)
        return cls(
            tuple(row["meshes"]), tuple(int(n) for n in row["microbatches"]), row["splits"] == "all"
        )


@dataclass
class SearchResult:
    """What a search returns: the winner, the baselines (label -> best tuned variant, fitting or the
    smallest), the spaces used."""

    best: Candidate | None
    baselines: dict[str, Candidate]
    base: GraphFacts
    space: Space | None
    choice: tuple[int, ...]
    problem: Problem | None
    bound_s: float
    tried: int
    stopped: str = ""
    smallest: Candidate | None = None
    reused_from: ReusedPlan | None = None
    """What was kept of a search before; nothing is proven then."""
    bound_bytes: int | None = None
    """The bound is of plans that are priced at so many bytes at most; None: of all that fit."""
    bound_of_all_s: float = 0.0
    """No plan is below this, whatever memory it takes."""
    covers: tuple[Covered, ...] = ()
    """What `bound_s` holds for."""
    findings: tuple[Finding, ...] = ()
    """What a user should not miss, beside what the graph and the plan say by themselves."""
