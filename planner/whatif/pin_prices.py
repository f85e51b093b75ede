"""What each pin of a plan costs: the best plan under all the other pins, beside the one under all
of them.

With one pin less there are all the plans that there are with it, and more: what the best is faster
by is the price of that pin. A search may look at others (without `data = 2` what is left of the
mesh takes more) or not offer at all what the pin asks for (blocks written out on a TPU): where it
finds none as fast, the pin is what makes the plan faster.
Pins can stand in for each other (without `tp = 8` a pinned split over its axis is still held), so
prices do not add up; a last row is of the search without any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.machine.topology import from_json
from planner.pins.pins import Pins
from planner.space.propagation import MODES
from planner.strategy.pins import pins_of
from planner.strategy.strategy import Strategy
from planner.whatif.reprice import best_plan, own_model, recorded_request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from planner.workload.model import Model

ALL = "all of them"
BINDING = 1e-3
"""Share of the step that a plan without the pin must be faster by: searches call plans nearer than
that equal (planner.search.request.TIE)."""


@dataclass(frozen=True)
class PinPrice:
    """without: the plan that is found where this pin is left out, None where there is none, refused
    then says why. saved_s: what its step is shorter by (seconds); below 0 it is longer."""

    pin: str
    without: Strategy | None
    saved_s: float
    refused: str = ""

    @property
    def binds(self) -> bool:
        """Whether leaving the pin out makes a step notably shorter."""
        return self.without is not None and self.saved_s > self._notable_s(self.without)

    @property
    def pays(self) -> bool:
        """Whether leaving the pin out makes a step notably longer."""
        return self.without is not None and -self.saved_s > self._notable_s(self.without)

    @staticmethod
    def _notable_s(plan: Strategy) -> float:
        step_s: float = plan.costs["step_time_s"]
        return BINDING * step_s


def price_pins(strategy: Strategy, source: str | Path) -> Iterator[PinPrice]:
    """Each pin, then all of them: a search each on the recorded machine, one after the other as
    they are asked for.

    Raises PlanError: P059 where there are no pins, or where the mode leaves nothing else to the
    search; P051 for another model.
    """
    pins, mode = pins_of(strategy), str(strategy.provenance.get("mode", "auto"))
    if pins.empty:
        raise PlanError(
            "P059",
            "this plan was made without pins, so none has a price",
            help=["plan MODEL ... --pin tp=8 -o FILE, then explain that file"],
        )
    if mode in MODES:
        raise PlanError(
            "P059",
            f"under --mode {mode} the pins are the plan: without one of them there is nothing to"
            " search",
            help=["--mode semi-auto with the same pins, then explain that file"],
        )
    model = own_model(strategy, source)
    pinned_best = _best(strategy, model, pins)
    step = pinned_best.costs["step_time_s"]
    several = pins.each()
    for words, fewer in (*several, *([(ALL, Pins())] if len(several) > 1 else [])):
        try:
            best = _best(strategy, model, fewer)
        except PlanError as e:
            yield PinPrice(words, None, 0.0, e.what)
            continue
        yield PinPrice(words, best, step - best.costs["step_time_s"])


def _best(strategy: Strategy, model: Model, pins: Pins) -> Strategy:
    """The best plan under some pins, without baselines. Raises PlanError where there is none."""
    return best_plan(
        model,
        replace(recorded_request(strategy, from_json(strategy.topology), pins), baselines=False),
    )
