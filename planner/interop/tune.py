"""A launcher's configuration, and better ones that the same launcher can say.

The configuration is priced as it is. Then everything its launcher can say is searched
(planner.pins.launcher_space) on the same machine, for the same batch; the best plans that differ in
mesh, recompute or ZeRO stage are rounded as an export rounds them and priced as an import prices
them, so that what is promised is what `plan import` says of the file that is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.analysis.axis_roles import role_named
from planner.errors import PlanError
from planner.execution.techniques import BESIDE, WAITING
from planner.interop import precisions
from planner.interop.launchers import hf
from planner.interop.price import LAUNCHERS, Configuration, facts_of, priced, styled
from planner.interop.settings import Facts, Rounds, Settings
from planner.machine.topology import Mesh
from planner.pins.launcher_space import SPACES, within
from planner.pins.pins import Pins
from planner.search.best_first import BestFirst, PlanFamily
from planner.search.request import Candidate, Progress, Request
from planner.search.search import Search
from planner.sharding.layout import STAGE
from planner.strategy.strategy import Strategy

if TYPE_CHECKING:
    from planner.workload.model import Model

BEST = 3
"""Plans that are rounded, priced and compiled."""
SHARES = (0.75, 0.5, 0.25)
"""Of the best plan's memory what plans of the front may take."""


@dataclass(frozen=True)
class Choice:
    """Settings and their plan."""

    settings: Settings
    strategy: Strategy

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return float(self.strategy.costs["step_time_s"])

    @property
    def memory_bytes(self) -> int:
        """Bytes of a device."""
        return int(self.strategy.costs["memory_per_device_bytes"])


@dataclass(frozen=True)
class Tuned:
    """yours: the configuration as it is, None where it has no price, and why; best: the fastest
    first; front: plans of which none is both faster and smaller; tried: plans priced;
    facts: as launchers write settings."""

    launcher: str
    yours: Choice | None
    why: str
    best: tuple[Choice, ...]
    front: tuple[Choice, ...]
    tried: int
    facts: Facts
    stopped: str = ""

    @property
    def left(self) -> tuple[float, float] | None:
        """Share of the configuration's step that the best one saves, and how far off that may be
        for plans of one model on one machine; None without a price of both."""
        if self.yours is None or not self.best:
            return None
        best = self.best[0]
        low, high = best.strategy.costs["tie_range_s"]
        return 1 - best.step_s / self.yours.step_s, (high - low) / 2 / self.yours.step_s


def tune(
    model: Model, request: Request, configuration: Configuration, progress: Progress | None = None
) -> Tuned:
    """A configuration beside the best that its launcher can say. request: of the machine and the
    launcher's runtime, without pins.

    Raises PlanError: exit 3 where nothing fits, P190 where no space of the launcher is known."""
    if configuration.launcher not in SPACES:
        raise PlanError(
            "P190",
            f"no search is known of what {configuration.launcher} can say",
            help=[f"configurations of {', '.join(SPACES)}"],
        )
    space, read_settings = SPACES[configuration.launcher], configuration.settings
    plain = replace(request, baselines=False, launcher=None)
    yours, why = None, ""
    try:
        yours = Choice(read_settings, priced(model, plain, read_settings, progress=progress))
    except PlanError as e:
        why = e.what
    pins = within(space, Pins(), request.topology, model.workload.kind)
    search = Search(model, replace(plain, launcher=space, pins=pins, cache=None), progress)
    result = search.run()
    base = search.base(1)
    assert base is not None
    facts = facts_of(model.name, request.topology, base)
    candidates = [] if result.best is None else [result.best]
    limit = _limit(request, result.best)
    with suppress(KeyboardInterrupt):
        if not result.stopped:
            candidates = _of_meshes(search, candidates, limit)
    settings_of = _Said(model, plain, space.name, _written(read_settings, space.name), facts)
    best = _best(settings_of, candidates, limit) or _best(
        settings_of, candidates, request.limit_bytes
    )
    front = best[:1]
    with suppress(KeyboardInterrupt):
        if not result.stopped and best:
            front = _front(search, settings_of, best[0])
    if yours is not None and yours.strategy.costs["fit"] != "no":
        others = (
            c
            for c in best
            if replace(c.settings, precision=read_settings.precision) != read_settings
        )
        best = tuple(sorted((yours, *others), key=lambda c: c.step_s))
    return Tuned(
        launcher=space.name,
        yours=yours,
        why=why,
        best=best[:BEST],
        front=front,
        tried=len(search.details),
        facts=facts,
        stopped=result.stopped,
    )


def _written(settings: Settings, launcher: str) -> Settings:
    """A configuration without a precision that it says in words which are not written here, or not
    in each form of the launcher's files: those in the file stay."""
    some = precisions.IN_SOME_FORMS.get(launcher, ())
    known = settings.precision in precisions.WRITTEN[launcher] and settings.precision not in some
    return settings if known else replace(settings, precision="")


def settings_for(c: Candidate, read_settings: Settings) -> Settings:
    """A candidate of a launcher's space as settings, batch and length as given."""
    sizes, plan = _degrees(c.mesh), c.plan
    tensor = sizes.get("tensor", 1)
    return Settings(
        batch=read_settings.batch,
        stage=sizes.get(STAGE, 1),
        data=sizes.get("data", 1),
        expert=sizes.get("expert", 1),
        sequence=sizes.get("sequence", 1),
        tensor=tensor,
        microbatches=plan.microbatches,
        zero_stage=plan.zero_stage,
        recompute=plan.recompute,
        offload=plan.offload,
        schedule=plan.schedule if c.mesh.stages > 1 else "",
        positions=tensor > 1,
        length=read_settings.length,
        virtual_stages=plan.virtual_stages,
        precision=read_settings.precision,
        exchanges=plan.exchanges,
        blocks=read_settings.blocks,
    )


def _degrees(mesh: Mesh) -> dict[str, int]:
    """Axes by their roles: data that shards parameters is called fsdp in plans that were found."""
    return {role_named(a) or a: n for a, n in mesh.shape}


def _of_meshes(
    search: Search, candidates: Sequence[Candidate], limit_bytes: int
) -> list[Candidate]:
    """The best plan within so many bytes of each of the best meshes, `candidates` among them."""
    best = {tuple(_degrees(c.mesh).items()): c for c in candidates}
    for mesh in search.offered.meshes():
        degrees = tuple(_degrees(mesh).items())
        ranked = sorted(search.value(c) for c in best.values())
        worth = ranked[BEST - 1] if len(ranked) >= BEST else math.inf
        candidate = None if degrees in best else _within(search, (mesh,), limit_bytes, worth)
        if candidate is not None:
            best[degrees] = candidate
    return list(best.values())


def _within(
    search: Search, meshes: tuple[Mesh, ...], limit_bytes: int, worth: float
) -> Candidate | None:
    """The best plan of some meshes within so many bytes that takes less than `worth`."""
    family = PlanFamily("plan", None, search.offered.levels())
    return BestFirst(search, family, meshes, limit_bytes).run(worth)


class _Said:
    """Plans of the search as the launcher says them: rounded as an export is, and priced."""

    def __init__(
        self, model: Model, request: Request, launcher: str, given: Settings, facts: Facts
    ) -> None:
        self.model, self.request, self.launcher = model, request, launcher
        self.given, self.facts = given, facts

    def __call__(self, c: Candidate, most_bytes: float = math.inf) -> Choice | None:
        """The settings of a plan within so many bytes, with experts' rows sent beside other kernels
        where that is faster; None where they cannot be said after all, or do not fit."""
        settings = settings_for(c, self.given)
        ways = dict.fromkeys((settings.exchanges, WAITING))
        if settings.expert > 1 and self.request.runtime.exchange_slows:
            ways[BESIDE] = None
        choices = dict[Settings, Choice]()
        for exchanges in ways:
            rounds = Rounds(replace(settings, exchanges=exchanges))
            LAUNCHERS[self.launcher].round_off(rounds, self.facts)
            choice = None if rounds.now in choices else self._priced(rounds.now)
            if choice is not None and choice.memory_bytes <= most_bytes:
                choices[choice.settings] = choice
        return min(choices.values(), key=lambda choice: choice.step_s, default=None)

    def _priced(self, settings: Settings) -> Choice | None:
        try:
            strategy = priced(self.model, self.request, settings)
            if self.launcher == hf.NAME and settings.tensor > 1:
                settings = styled(self.model, self.request, settings, strategy)
                strategy = priced(self.model, self.request, settings)
        except PlanError:
            return None
        return Choice(settings, strategy) if strategy.costs["fit"] != "no" else None


def _limit(request: Request, best: Candidate | None) -> int:
    """Bytes that settings may take: those of plans with room where the best that was found has it.
    A tight one that is faster by more than its range would have been found in its place."""
    roomy = best is not None and best.cost.memory.total <= request.roomy_bytes
    return request.roomy_bytes if roomy else request.limit_bytes


def _best(
    settings_of: _Said, candidates: Sequence[Candidate], limit_bytes: int
) -> tuple[Choice, ...]:
    """The fastest within so many bytes that differ in mesh, recompute or ZeRO stage."""
    choices: list[Choice] = []
    seen: set[tuple[object, ...]] = set()
    for c in sorted(candidates, key=lambda c: c.key(settings_of.request)):
        kind = tuple(_degrees(c.mesh).items()), c.plan.recompute, c.plan.zero_stage
        choice = None if kind in seen else settings_of(c, limit_bytes)
        seen.add(kind)
        if choice is not None and choice.settings not in [b.settings for b in choices]:
            choices.append(choice)
        if len(choices) == BEST:
            break
    return tuple(sorted(choices, key=lambda c: c.step_s))


def _front(search: Search, settings_of: _Said, best: Choice) -> tuple[Choice, ...]:
    """Plans of which none is both faster and smaller, the fastest first: the best, and the best
    within ever less memory."""
    front, meshes = [best], search.offered.meshes()
    for share in SHARES:
        limit = int(best.memory_bytes * share)
        if limit >= front[-1].memory_bytes:
            continue
        c = _within(search, meshes, limit, math.inf)
        choice = None if c is None else settings_of(c, limit)
        if choice is None:
            break
        if choice.memory_bytes < front[-1].memory_bytes:
            front = [f for f in front if f.step_s < choice.step_s] + [choice]
    return tuple(front)
